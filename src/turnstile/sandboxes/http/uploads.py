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

SLOWEST = 256 << 10  # bytes a second


class UnknownUploadError(Exception):
    """Raised if there is no template with this digest, or no longer."""


class Uploads:
    """At most `most_mb` of unpacked templates; the least recently used ones make room for others.

    An upload takes its space twice for a while, packed in the temporary folder and unpacked. At most `at_once` uploads
    are received at a time. One that is slower than `SLOWEST` for more than `stall` seconds is given up.
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
        """Store the archive with this digest (SHA-256, hexadecimal).

        Raises ConfigError if it is too large, SandboxError if it has another digest, arrives too slowly or does not
        fit, and ValueError if it is not an archive.
        """
        async with self._coming:
            with tempfile.TemporaryFile() as archive:  # not at home, which may be memory
                await self._spool(digest, parts, archive)
                folder = self._home.new_snapshot()
                try:
                    size = await asyncio.to_thread(_unpack, archive, folder, self._most)
                except BaseException:
                    await asyncio.to_thread(remove_tree, folder)
                    raise
        if digest in self._there:  # somebody else was quicker
            await asyncio.to_thread(remove_tree, folder)
            return
        self._there[digest] = folder, size
        await self._make_room()

    @asynccontextmanager
    async def held(self, digest: str) -> AsyncIterator[Path]:
        """Keep the folder for the duration of the block, and yield it. Raises UnknownUploadError."""
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
                raise too_large(self._most)
            with short_machine(Path(tempfile.gettempdir())):
                await asyncio.to_thread(archive.write, data)
        if found.hexdigest() != digest:
            raise SandboxError(f"what was sent as template {digest[:12]} has the digest {found.hexdigest()[:12]}")
        archive.seek(0)

    async def _make_room(self) -> None:
        """Remove the oldest folders that are not in use, but never the newest."""
        async with self._clearing:
            total = sum(size for _, size in self._there.values())
            for digest in list(self._there)[:-1]:
                if total <= self._most:
                    return
                if not self._held[digest]:
                    folder, size = self._there.pop(digest)
                    total -= size
                    await asyncio.to_thread(remove_tree, folder)


def too_large(most: int) -> ConfigError:
    """Return the error for a template of more than `most` bytes."""
    return ConfigError(f"a template of more than {most >> 20} MiB; give the sandbox server a larger --templates-mb")


def _unpack(archive: IO[bytes], folder: Path, most: int) -> int:
    """Unpack an archive and return the bytes that it takes."""
    with short_machine(folder):
        folder.mkdir()
        try:
            return unpack_tree(archive, folder, most=most)
        except TooLargeError:
            raise too_large(most) from None
        except PermissionError as error:
            raise SandboxError(f"the template cannot be unpacked: {error}") from None
