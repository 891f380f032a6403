"""What comes to a sandbox server while others stall."""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from turnstile.errors import SandboxError
from turnstile.sandboxes.archive import pack_tree
from turnstile.sandboxes.http.uploads import Uploads

PART = bytes(1 << 16)


class Client:
    """Sends one part, and the others when it is told to; knows whether it was asked for any."""

    def __init__(self, *parts: bytes) -> None:
        self.asked = asyncio.Event()
        self.go_on = asyncio.Event()
        self.rest = parts

    async def parts(self) -> AsyncIterator[bytes]:
        self.asked.set()
        yield self.rest[0]
        await self.go_on.wait()
        for part in self.rest[1:]:
            yield part


def spooled(folder: Path) -> int:
    """Bytes of the files of this process that are open below a folder, deleted ones too."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith(f"{folder}/"):
                found += os.stat(f"/proc/self/fd/{name}").st_size
        except FileNotFoundError:
            continue
    return found


async def test_few_come_at_once_and_in_the_temporary_folder(
    tmp_path: Path, template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = tmp_path / "spool"
    spool.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(spool))
    uploads = Uploads(most_mb=1, root=tmp_path / "home", at_once=2)
    with pack_tree(template) as packed:
        data = packed.read()
    clients = [Client(PART) for _ in range(8)] + [Client(data)]
    digests = [hashlib.sha256(client.rest[0]).hexdigest() for client in clients]
    coming = [
        asyncio.ensure_future(uploads.receive(digest, client.parts()))
        for digest, client in zip(digests, clients, strict=True)
    ]
    async with asyncio.timeout(60):
        while spooled(spool) < 2 * len(PART):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert [client.asked.is_set() for client in clients] == [True] * 2 + [False] * 7
    assert spooled(spool) == 2 * len(PART)
    assert spooled(tmp_path / "home") == 0
    for client in clients:
        client.go_on.set()
    ends = await asyncio.gather(*coming, return_exceptions=True)
    assert [type(end) for end in ends] == [ValueError] * 8 + [type(None)]  # parts of zeros are not an archive
    assert digests[-1] in uploads
    assert spooled(spool) == 0
    await uploads.close()


async def test_who_stalls_loses_the_place(tmp_path: Path, template: Path) -> None:
    uploads = Uploads(most_mb=1, root=tmp_path / "home", at_once=1, stall=1.0)
    with pack_tree(template) as packed:
        data = packed.read()
    digest = hashlib.sha256(data).hexdigest()
    stalled = asyncio.ensure_future(uploads.receive("0" * 64, Client(b"x").parts()))
    await asyncio.sleep(0)
    there = Client(data)
    there.go_on.set()
    async with asyncio.timeout(60):
        await uploads.receive(digest, there.parts())
    with pytest.raises(SandboxError, match="template 000000000000 comes too slowly: 0 MiB"):
        await stalled
    assert digest in uploads
    await uploads.close()
