"""What goes into a container as a whole: template folders, and packages of this Python."""

from __future__ import annotations

import importlib.util
import io
import os
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from turnstile.errors import ConfigError
from turnstile.sandboxes.folder import may_be_stale, walk_tree

IN_MEMORY = 16 << 20  # bytes; larger archives are kept in a temporary file


def pack_tree(source: Path) -> IO[bytes]:
    """An archive, at its beginning, of what a copy of the folder holds (`folder.walk_tree`, `folder.may_be_stale`)."""
    made = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115 - the caller's to close
    with open_archive(made) as archive:
        add_tree(archive, source, "")
    made.seek(0)
    return made


def pack_modules(names: Sequence[str]) -> bytes:
    """An archive of modules and packages by their names, as a folder of the import path would hold them.

    Raises ConfigError for one that cannot be imported here.
    """
    made = io.BytesIO()
    with open_archive(made) as archive:
        for name in names:
            found = importlib.util.find_spec(name)
            if found is None or found.origin is None:
                raise ConfigError(f"sandbox.carry names {name!r}, and no such module can be imported here")
            if found.submodule_search_locations:
                add_folder(archive, name)
                add_tree(archive, Path(found.origin).parent, f"{name}/")
            else:
                add_file(archive, found.origin, os.path.basename(found.origin))
    return made.getvalue()


def open_archive(made: IO[bytes]) -> tarfile.TarFile:
    return tarfile.open(fileobj=made, mode="w", format=tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape")


def add_tree(archive: tarfile.TarFile, source: Path, prefix: str) -> None:
    for kind, path, inner in walk_tree(source):
        if kind == "folder":
            add_folder(archive, prefix + inner)
        elif kind == "link":
            member = tarfile.TarInfo(prefix + inner)
            member.type, member.linkname = tarfile.SYMTYPE, os.readlink(path)
            archive.addfile(member)
        else:
            add_file(archive, path, prefix + inner)


def add_folder(archive: tarfile.TarFile, name: str) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.mode = tarfile.DIRTYPE, 0o755
    archive.addfile(member)


def add_file(archive: tarfile.TarFile, path: str, name: str) -> None:
    with open(path, "rb", buffering=0) as file:
        data = file.read()
        mode = os.fstat(file.fileno()).st_mode & 0o777
    if not may_be_stale(path, data):
        member = tarfile.TarInfo(name)
        member.mode, member.size = mode, len(data)
        archive.addfile(member, io.BytesIO(data))
