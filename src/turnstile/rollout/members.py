"""Files of gzip members, only ever appended to: each member holds one line of JSON and is whole or torn.

A member ends with gzip's own checksum, so that a damaged one is found out, `zcat` reads a file, and a process killed
in the middle of a write costs that member and no other.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_GZIP = 31  # zlib's window size for "expect a gzip header"
_PIECE = 2**16  # bytes read at once
_log = logging.getLogger(__name__)


class Appender:
    """Appends members to the files of one folder, which a killed process does not lose; `sync` is for a machine that
    stops."""

    def __init__(self, folder: Path, *, level: int = -1) -> None:
        self._folder = folder
        self._level = level
        self._whole: set[Path] = set()  # files known to end with a whole member
        self._unsynced: set[Path] = set()

    def append(self, path: Path, body: Any) -> None:
        """Writes one more member, of `body` as JSON. One that cannot be written whole (the disk is full) is cut off
        before the next."""
        if path not in self._whole:
            _cut_torn_end(path)
        packer = zlib.compressobj(self._level, wbits=_GZIP)
        line = json.dumps(body, ensure_ascii=False) + "\n"
        data = packer.compress(line.encode("utf-8", "surrogatepass")) + packer.flush()
        self._whole.discard(path)
        with path.open("ab", buffering=0) as file:
            left = memoryview(data)
            while left:  # a disk that fills up takes a part, and raises when it is given the rest
                left = left[file.write(left) :]
        self._whole.add(path)
        self._unsynced.add(path)

    def remove(self, path: Path) -> None:
        """Takes a file away, if it is there."""
        path.unlink(missing_ok=True)
        self._whole.discard(path)
        self._unsynced.discard(path)

    def sync(self) -> None:
        """Everything written so far is on the disk when this returns."""
        for path in self._unsynced:
            flush(path)
        if self._unsynced:
            flush(self._folder)
        self._unsynced.clear()


def read_members(path: Path) -> Iterator[Any]:
    """What the whole members of a file hold, in their order; a torn one ends it, with one warning in the log."""
    members, torn = _members(path)
    if torn:
        _log.warning("%s: entry %d is torn (%d bytes) and was left out", path, len(members) + 1, torn)
    return (json.loads(text.decode("utf-8", "surrogatepass")) for text, _ in members)


def flush(path: Path) -> None:
    """Brings a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _members(path: Path) -> tuple[list[tuple[bytes, int]], int]:
    """The whole members of a file with the offset each ends at, and how many bytes of a torn one follow."""
    members: list[tuple[bytes, int]] = []
    with path.open("rb") as file:
        ahead, read, end = b"", 0, 0  # `ahead` was read and is of the next member
        while True:
            unpacker, text = zlib.decompressobj(wbits=_GZIP), bytearray()
            while not unpacker.eof and (piece := ahead or file.read(_PIECE)):
                read += 0 if ahead else len(piece)
                try:
                    text += unpacker.decompress(piece)
                except zlib.error:  # a damaged member: where the next one begins cannot be known
                    return members, path.stat().st_size - end
                ahead = b""
            if not unpacker.eof:
                return members, path.stat().st_size - end
            ahead = unpacker.unused_data
            end = read - len(ahead)
            members.append((bytes(text), end))


def _cut_torn_end(path: Path) -> None:
    """Members written behind a torn one could not be found again, so it goes first."""
    if path.exists():
        members, torn = _members(path)
        if torn:
            _log.warning("%s: cut off a torn entry of %d bytes", path, torn)
            with path.open("r+b") as file:
                file.truncate(members[-1][1] if members else 0)
