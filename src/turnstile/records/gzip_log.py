"""Files of gzip members, only ever appended to: each member holds one line of JSON and is whole or damaged.

A member ends with gzip's own checksum, so that a damaged one is found out, and `zcat` reads a file. Whatever is damaged
costs the members that it is in and no others: reading goes on at the next header. What a process that was killed has
left half-written at the end is moved to `NAME.damaged` before the next member is written.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_GZIP = 31  # zlib's window size for "expect a gzip header"
_HEADER = b"\x1f\x8b\x08"  # gzip, deflated
_WRITTEN = _HEADER + bytes(5)  # as it is written here: no flags, no time
_PIECE = 2**12  # bytes unpacked first, of a long member then more and more at once
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
        """Writes one more member, of `body` as JSON. One that cannot be written whole (the disk is full) is moved aside
        before the next."""
        if path not in self._whole:
            _move_torn_end(path)
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
        _damaged_path(path).unlink(missing_ok=True)
        self._whole.discard(path)
        self._unsynced.discard(path)

    def sync(self) -> None:
        """Everything written so far is on the disk when this returns."""
        for path in self._unsynced:
            flush(path)
        if self._unsynced:
            flush(self._folder)
        self._unsynced.clear()


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of a file that are no whole member."""

    begin: int
    end: int
    entries: int  # that are lost in them, at least


def read_members(path: Path) -> Iterator[Any]:
    """What the whole members of a file hold, in their order; damaged ones are left out, with one warning in the log."""
    members, damages = _members(path.read_bytes())
    if damages:
        where = ", ".join(str(each.begin) for each in damages)
        _log.warning("%s: left out %s (at byte %s); %d are whole", path, _describe(damages), where, len(members))
    return (json.loads(text.decode("utf-8", "surrogatepass")) for text in members)


def flush(path: Path) -> None:
    """Brings a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _members(data: bytes) -> tuple[list[bytes], list[Damage]]:
    """The whole members, and what lies between them."""
    members: list[bytes] = []
    damages: list[Damage] = []
    place = 0
    while place < len(data):
        found = _member(data, place)
        if found is None:
            begin, place = place, _next_member(data, place + 1)
            damages.append(Damage(begin, place, max(1, data.count(_WRITTEN, begin, place))))
        else:
            text, place = found
            members.append(text)
    return members, damages


def _member(data: bytes, begin: int) -> tuple[bytes, int] | None:
    """What the member at `begin` holds, and where it ends; None where none begins there that is whole."""
    unpacker, text, place, size = zlib.decompressobj(wbits=_GZIP), bytearray(), begin, _PIECE
    try:
        while not unpacker.eof:
            piece = data[place : place + size]
            if not piece:
                return None
            text += unpacker.decompress(piece)
            place, size = place + len(piece), 2 * size
    except zlib.error:
        return None
    return bytes(text), place - len(unpacker.unused_data)


def _next_member(data: bytes, begin: int) -> int:
    """Where the next whole member begins; the end of the data where there is none."""
    while (begin := data.find(_HEADER, begin)) >= 0:
        if _member(data, begin) is not None:
            return begin
        begin += 1
    return len(data)


def _move_torn_end(path: Path) -> None:
    """Moves what lies behind the last whole member to a file beside this one, so that the next begins where it ends."""
    if not path.exists():
        return
    data = path.read_bytes()
    _, damages = _members(data)
    if not damages or damages[-1].end < len(data):
        return
    torn = damages[-1]
    with _damaged_path(path).open("ab") as file:
        file.write(data[torn.begin :])
    flush(_damaged_path(path))
    with path.open("r+b") as file:
        file.truncate(torn.begin)
    _log.warning("%s: moved %s to %s", path, _describe((torn,)), _damaged_path(path).name)


def _describe(damages: Sequence[Damage]) -> str:
    lost, size = sum(each.entries for each in damages), sum(each.end - each.begin for each in damages)
    return f"{lost} damaged or torn {'entry' if lost == 1 else 'entries'} of {size} bytes"


def _damaged_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.damaged")
