"""Append-only files of gzip members, each holding one line of JSON.

A member ends with gzip's checksum, so damage is detected, and `zcat` can read the file. Damage costs only the members
that it touches, because reading continues at the next header. A half-written member that a killed process left at the
end is moved to `NAME.damaged` before the next member is written.
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
_WRITTEN = _HEADER + bytes(5)  # the header written here, with no flags and no time
_PIECE = 2**12  # bytes decompressed first; the size doubles for long members
_log = logging.getLogger(__name__)


class Appender:
    """Appends members to the files of one folder.

    Appended members survive the death of the process; after `sync` they also survive a crash of the machine.
    """

    def __init__(self, folder: Path, *, level: int = -1) -> None:
        self._folder = folder
        self._level = level
        self._whole: set[Path] = set()  # files known to end with a complete member
        self._unsynced: set[Path] = set()

    def append(self, path: Path, body: Any) -> None:
        """Append one member that holds `body` as JSON.

        If a member could not be written completely, for example because the disk is full, the next call moves it aside
        first.
        """
        if path not in self._whole:
            _move_torn_end(path)
        packer = zlib.compressobj(self._level, wbits=_GZIP)
        line = json.dumps(body, ensure_ascii=False) + "\n"
        data = packer.compress(line.encode("utf-8", "surrogatepass")) + packer.flush()
        self._whole.discard(path)
        with path.open("ab", buffering=0) as file:
            left = memoryview(data)
            while left:  # a full disk accepts a part and raises at the next write
                left = left[file.write(left) :]
        self._whole.add(path)
        self._unsynced.add(path)

    def remove(self, path: Path) -> None:
        """Remove a file, if it exists."""
        path.unlink(missing_ok=True)
        _damaged_path(path).unlink(missing_ok=True)
        self._whole.discard(path)
        self._unsynced.discard(path)

    def sync(self) -> None:
        """Flush everything written so far to the disk."""
        for path in self._unsynced:
            flush(path)
        if self._unsynced:
            flush(self._folder)
        self._unsynced.clear()


@dataclass(frozen=True, slots=True)
class Damage:
    """A byte range of a file that is not a complete gzip member."""

    begin: int
    end: int
    entries: int  # minimum number of entries lost in it


def read_members(path: Path) -> Iterator[Any]:
    """Return the contents of a file's complete members in order. Damage is skipped, with one warning in the log."""
    members, damages = _parse_members(path.read_bytes())
    if damages:
        where = ", ".join(str(each.begin) for each in damages)
        _log.warning(
            "%s: skipped %s (at byte %s); %d are complete", path, _describe_damage(damages), where, len(members)
        )
    return (json.loads(text.decode("utf-8", "surrogatepass")) for text in members)


def flush(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _parse_members(data: bytes) -> tuple[list[bytes], list[Damage]]:
    """Return the complete members, and the damage between or after them."""
    members: list[bytes] = []
    damages: list[Damage] = []
    position = 0
    while position < len(data):
        member = _parse_member(data, position)
        if member is None:
            begin, position = position, _next_member(data, position + 1)
            damages.append(Damage(begin, position, max(1, data.count(_WRITTEN, begin, position))))
        else:
            text, position = member
            members.append(text)
    return members, damages


def _parse_member(data: bytes, begin: int) -> tuple[bytes, int] | None:
    """Return the contents and the end of the member at `begin`, or None if no complete member begins there."""
    unpacker, text, position, size = zlib.decompressobj(wbits=_GZIP), bytearray(), begin, _PIECE
    try:
        while not unpacker.eof:
            piece = data[position : position + size]
            if not piece:
                return None
            text += unpacker.decompress(piece)
            position, size = position + len(piece), 2 * size
    except zlib.error:
        return None
    return bytes(text), position - len(unpacker.unused_data)


def _next_member(data: bytes, begin: int) -> int:
    """Return the position of the next complete member, or the length of the data if there is none."""
    # Compressed data may contain the header's bytes, so a match counts only if a complete member begins there.
    while (begin := data.find(_HEADER, begin)) >= 0:
        if _parse_member(data, begin) is not None:
            return begin
        begin += 1
    return len(data)


def _move_torn_end(path: Path) -> None:
    """Move everything after the last complete member to the `.damaged` file, so that the next member can follow it."""
    if not path.exists():
        return
    data = path.read_bytes()
    _, damages = _parse_members(data)
    if not damages or damages[-1].end < len(data):
        return
    torn = damages[-1]
    with _damaged_path(path).open("ab") as file:
        file.write(data[torn.begin :])
    flush(_damaged_path(path))
    with path.open("r+b") as file:
        file.truncate(torn.begin)
    _log.warning("%s: moved %s to %s", path, _describe_damage((torn,)), _damaged_path(path).name)


def _describe_damage(damages: Sequence[Damage]) -> str:
    lost, size = sum(each.entries for each in damages), sum(each.end - each.begin for each in damages)
    return f"{lost} damaged or torn {'entry' if lost == 1 else 'entries'} of {size} bytes"


def _damaged_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.damaged")
