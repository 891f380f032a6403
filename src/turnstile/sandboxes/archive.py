"""A template folder as an archive, on its way into a container."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from pathlib import Path
from typing import IO

from turnstile.sandboxes.folder import may_be_stale, walk_tree

IN_MEMORY = 16 << 20  # bytes; larger archives are kept in a temporary file


def pack_tree(source: Path) -> IO[bytes]:
    """An archive, at its beginning, of what a copy of the folder holds (`folder.walk_tree`, `folder.may_be_stale`)."""
    made = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115 - the caller's to close
    with tarfile.open(
        fileobj=made, mode="w", format=tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape"
    ) as archive:
        for kind, path, inner in walk_tree(source):
            member = tarfile.TarInfo(inner)
            if kind == "folder":
                member.type, member.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(member)
            elif kind == "link":
                member.type, member.linkname = tarfile.SYMTYPE, os.readlink(path)
                archive.addfile(member)
            else:
                with open(path, "rb", buffering=0) as file:
                    data = file.read()
                    member.mode = os.fstat(file.fileno()).st_mode & 0o777
                if not may_be_stale(path, data):
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
    made.seek(0)
    return made
