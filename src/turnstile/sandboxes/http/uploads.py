"""Uploaded template folders, kept on the server's disk and identified by the digest of their archive."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
import weakref
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

from turnstile.errors import ConfigError, SandboxError
from turnstile.sandboxes.archive import TooLargeError, unpack_tree
from turnstile.sandboxes.folder import Home, remove_tree, short_machine

SLOWEST = 256 << 10  # bytes per second


class UnknownUploadError(Exception):
    """Raised if no template with the requested digest is kept."""


class Uploads:
    """Unpacked templates of at most `most_mb` MiB; the least recently used ones make room for others.

    For a while an upload takes its space twice, packed in the temporary folder and unpacked. At most `at_once` uploads
    are received at a time. One that falls more than `stall` seconds behind the speed `SLOWEST` is given up.
    """

    def __init__(self, *, most_mb: int, root: Path | None = None, at_once: int = 4, stall: float = 60.0) -> None:
        self._home = Home(root)
        self._most = most_mb << 20
        self._coming = asyncio.Semaphore(at_once)
        self._stall = stall
        self._there: OrderedDict[str, tuple[Path, int]] = OrderedDict()  # digest -> folder and bytes; oldest use first
        self._held: Counter[str] = Counter()
        self._clearing = asyncio.Lock()
        self._finalizer = weakref.finalize(self, self._home.remove)

    def __contains__(self, digest: str) -> bool:
        return digest in self._there

    async def receive(self, digest: str, parts: AsyncIterator[bytes]) -> None:
        """Receive the archive with this digest (SHA-256, hexadecimal) and store it unpacked.

        Raises ConfigError if it is too large, SandboxError if it has another digest, arrives too slowly or does not
        fit, and ValueError if it is not an archive.
        """
        async with self._coming:
            with tempfile.TemporaryFile() as archive:  # not in the home, which may be in memory
                await self._spool(digest, parts, archive)
                folder = self._home.new_snapshot()
                try:
                    size = await asyncio.to_thread(_unpack, archive, folder, self._most)
                except BaseException:
                    await asyncio.to_thread(remove_tree, folder)
                    raise
        if digest in self._there:  # another upload was quicker
            await asyncio.to_thread(remove_tree, folder)
            return
        self._there[digest] = folder, size
        await self._make_room()

    @asynccontextmanager
    async def held(self, digest: str) -> AsyncIterator[Path]:
        """Yield a template's folder, and keep it for the duration of the block.

        Raises UnknownUploadError if there is no such template.
        """
        if digest not in self._there:
            raise UnknownUploadError
        self._there.move_to_end(digest)
        self._held[digest] += 1
        try:
            yield self._there[digest][0]
        finally:
            self._held[digest] -= 1

    async def close(self) -> None:
        await asyncio.to_thread(self._finalizer)

    async def _spool(self, digest: str, parts: AsyncIterator[bytes], archive: IO[bytes]) -> None:
        found, size = hashlib.sha256(), 0
        begun = asyncio.get_running_loop().time()
        while True:
            try:
                async with asyncio.timeout_at(begun + self._stall + size / SLOWEST):
                    data = await anext(parts, None)
            except TimeoutError:
                raise SandboxError(
                    f"template {digest[:12]} comes too slowly: {size >> 20} MiB, and then nothing for too long"
                ) from None
            if data is None:
                break
            found.update(data)
            size += len(data)
            if size > self._most:
                raise too_large_error(self._most)
            with short_machine(Path(tempfile.gettempdir())):
                await asyncio.to_thread(archive.write, data)
        if found.hexdigest() != digest:
            raise SandboxError(f"what was sent as template {digest[:12]} has the digest {found.hexdigest()[:12]}")
        archive.seek(0)

    async def _make_room(self) -> None:
        """Remove the least recently used folders that are not in use, except the newest, until the rest fits."""
        async with self._clearing:
            total = sum(size for _, size in self._there.values())
            for digest in list(self._there)[:-1]:
                if total <= self._most:
                    return
                if not self._held[digest]:
                    folder, size = self._there.pop(digest)
                    total -= size
                    await asyncio.to_thread(remove_tree, folder)


def too_large_error(max_bytes: int) -> ConfigError:
    """Return the error for a template of more than `max_bytes`."""
    return ConfigError(
        f"a template of more than {max_bytes >> 20} MiB; give the sandbox server a larger --templates-mb"
    )


def _unpack(archive: IO[bytes], folder: Path, max_bytes: int) -> int:
    """Unpack an archive and return the bytes that it takes on disk.

    Raises ConfigError if these are more than `max_bytes`, and SandboxError if the archive cannot be written.
    """
    with short_machine(folder):
        folder.mkdir()
        try:
            return unpack_tree(archive, folder, max_bytes=max_bytes)
        except TooLargeError:
            raise too_large_error(max_bytes) from None
        except PermissionError as error:
            raise SandboxError(f"the template cannot be unpacked: {error}") from None
