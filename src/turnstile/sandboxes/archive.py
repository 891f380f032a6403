"""Archives of folders and of this Python's packages, sent into containers and to sandbox servers.

In a container `runner` unpacks them; on a sandbox server `unpack_tree` does.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from turnstile.errors import ConfigError
from turnstile.sandboxes.containers.runner.frames import HEAD
from turnstile.sandboxes.folder import CHECKED_HASH, is_inside, may_be_stale, walk_tree

IN_MEMORY = 16 << 20  # bytes; larger archives are kept in a temporary file
BLOCK = 4096  # bytes; the least that an entry takes, and the unit in which files grow
HEADER = 64 << 10  # bytes of an entry's JSON; the longest possible name and link target need 49,000


class TooLargeError(ValueError):
    """Raised when an archive needs more disk space than allowed."""


def pack_tree(source: Path) -> IO[bytes]:
    """Return an archive of what a copy of the folder would hold, positioned at its start.

    What copies leave out is skipped (`folder.walk_tree`, `folder.may_be_stale`). The caller closes the archive.
    """
    made = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115 - the caller closes it
    add_tree(made, source, "")
    made.seek(0)
    return made


def pack_modules(names: Sequence[str]) -> bytes:
    """Return an archive of the named modules and packages, laid out like a folder on the import path.

    Raises ConfigError if one of them cannot be imported here.
    """
    made = io.BytesIO()
    for name in names:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:
            raise ConfigError(f"sandbox.carry names {name!r}, and no such module can be imported here")
        if found.submodule_search_locations:
            add(made, {"kind": "folder", "name": name})
            add_tree(made, Path(found.origin).parent, f"{name}/", byte_code=True)
        else:
            add_file(made, found.origin, os.path.basename(found.origin))
    return made.getvalue()


def add_tree(made: IO[bytes], source: Path, prefix: str, *, byte_code: bool = False) -> None:
    """Add a folder's contents with `prefix` before their names, in a fixed order.

    With `byte_code`, also add byte code compiled by this Python, which saves compiling in the container.
    """
    for kind, path, inner in sorted(walk_tree(source), key=lambda found: found[2]):  # equal trees, equal archives
        name = prefix + inner
        if kind == "file":
            add_file(made, path, name, byte_code=byte_code)
        else:
            add(made, {"kind": kind, "name": name, **({"to": os.readlink(path)} if kind == "link" else {})})


def add_file(made: IO[bytes], path: str, name: str, *, byte_code: bool = False) -> None:
    """Add a file, unless it is byte code that may be stale.

    With `byte_code`, current byte code of this Python is added too, changed so that Python checks it by hash.
    """
    with open(path, "rb", buffering=0) as file:
        data = file.read()
        mode = os.fstat(file.fileno()).st_mode
    if byte_code and may_be_stale(path, data):
        data = checked_by_hash(path, data)
    if not may_be_stale(path, data):
        add(made, {"kind": "file", "name": name, "mode": mode}, data)


def checked_by_hash(path: str, data: bytes) -> bytes:
    """Return byte code, changed so that Python checks it by its source's hash and not by its modification time.

    A copy keeps the hash but not the time. Byte code of another Python, or without a matching source, is returned
    unchanged.
    """
    try:
        source = importlib.util.source_from_cache(path)
        status = os.stat(source)
    except (ValueError, FileNotFoundError):
        return data
    current = struct.pack("<III", 0, int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF)
    if data[:16] != importlib.util.MAGIC_NUMBER + current:
        return data
    with open(source, "rb") as file:
        return data[:4] + CHECKED_HASH + importlib.util.source_hash(file.read()) + data[16:]


def add(made: IO[bytes], entry: dict[str, Any], data: bytes = b"") -> None:
    """Append one entry and its data to the archive."""
    body = json.dumps(entry).encode()
    made.write(HEAD.pack(len(body), len(data)) + body)
    made.write(data)


def unpack_tree(archive: IO[bytes], folder: Path, *, max_bytes: int | None = None) -> int:
    """Unpack an archive into `folder`, which must be empty, and return the bytes that it takes on disk.

    The count includes at least one block for each entry and the unused part of each file's last block. Raises
    ValueError if the data is not an archive or an entry would leave the folder, and TooLargeError before the count
    exceeds `max_bytes`. Links are created last, so that no file is written through one.
    """
    made = {""}
    links: list[tuple[str, str]] = []
    taken = 0
    while head := archive.read(HEAD.size):
        size, data_size = HEAD.unpack(head) if len(head) == HEAD.size else (0, 0)
        if size > HEADER:
            raise ValueError(f"this is no archive of a template: an entry begins with {size} bytes of JSON")
        taken += BLOCK * (max(1, -(-size // BLOCK)) + -(-data_size // BLOCK))
        if max_bytes is not None and taken > max_bytes:
            raise TooLargeError("it takes more room than it may")
        try:
            entry = json.loads(archive.read(size))
            kind, name = entry["kind"], entry["name"]
            if name in made or os.path.dirname(name) not in made or os.path.basename(name) in ("", ".", ".."):
                raise ValueError("it is no plain name in a folder before it")
            if kind == "folder":
                (folder / name).mkdir()
                made.add(name)
            elif kind == "file":
                _unpack_file(archive, os.path.join(folder, name), int(entry["mode"]), data_size)
            elif kind == "link":
                links.append((os.path.join(folder, name), str(entry["to"])))
            else:
                raise ValueError(f"it has an entry of kind {kind!r:.40}")
        except (ValueError, KeyError, TypeError, FileExistsError, RecursionError) as error:
            raise ValueError(f"this is no archive of a template: {error}") from None
    top = os.path.realpath(folder)
    for path, to in links:
        if os.path.lexists(path):
            raise ValueError(f"{os.path.relpath(path, folder)!r} is twice in an archive")
        os.symlink(to, path)
    for path, to in links:
        if os.path.isabs(to) or not is_inside(top, os.path.realpath(path)):
            raise ValueError(f"the link {os.path.relpath(path, folder)!r} of an archive leaves it")
    return taken


def _unpack_file(archive: IO[bytes], path: str, mode: int, size: int) -> None:
    with open(path, "xb", opener=lambda path, flags: os.open(path, flags, mode & 0o777)) as file:
        while size:
            data = archive.read(min(size, IN_MEMORY))
            if not data:
                raise ValueError("it ends too soon")
            size -= len(data)
            file.write(data)
