"""Digests that identify the contents of images, and archives that carry the contents to the engine."""

from __future__ import annotations

import hashlib
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

import docker.utils

from turnstile.sandboxes.folder import walk_tree

IGNORED = ".dockerignore"


def digest_of(*parts: str) -> str:
    """Return one SHA-256 digest of several texts, which also depends on where each text ends."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part.encode(errors="surrogateescape")).to_bytes(8, "big"))
        total.update(part.encode(errors="surrogateescape"))
    return total.hexdigest()


def file_digest(path: Path | str) -> str:
    """Return the SHA-256 digest of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tree_digest(tree: Path) -> str:
    """Return a digest of the names, modes, links and contents that a copy of a source tree holds.

    Byte code does not count.
    """
    found = sorted(entry for entry in walk_tree(tree) if not entry[1].endswith(".pyc"))
    return digest_of(*(part for _, path, name in found for part in (name, entry_digest(path))))


def context_digest(folder: Path, dockerfile: str) -> str:
    """Return a digest of a Dockerfile's build context: its folder, without what .dockerignore excludes."""
    ignored = folder / IGNORED
    lines = ignored.read_text().splitlines() if ignored.is_file() else []
    patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    names = sorted(docker.utils.exclude_paths(str(folder), patterns, dockerfile=dockerfile))
    return digest_of("context", dockerfile, *(part for name in names for part in (name, entry_digest(folder / name))))


def root_digest(root: Path) -> str:
    """Return a digest of a root file system, including the owners of its files."""
    parts = []
    for path, status in walk_root(root):
        parts += [os.path.relpath(path, root), f"{status.st_uid}:{status.st_gid}", entry_digest(path)]
    return digest_of("root", *parts)


def entry_digest(path: Path | str) -> str:
    """Return a text that identifies a file, link, folder or device by its mode and content.

    The content is that of a file as a digest, the target of a link, or the number of a device.
    """
    status = os.lstat(path)
    mode = f"{status.st_mode:o}"
    if stat.S_ISLNK(status.st_mode):
        return f"{mode} {os.readlink(path)}"
    if stat.S_ISREG(status.st_mode):
        return f"{mode} {file_digest(path)}"
    return f"{mode} {status.st_rdev}"


def walk_root(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the path and status of everything below a folder, in a fixed order.

    Sockets and the contents of mounted file systems are left out.
    """
    device = os.lstat(root).st_dev
    for folder, folders, files in os.walk(root):
        folders.sort()
        kept = []
        for name in sorted((*folders, *files)):
            path = os.path.join(folder, name)
            status = os.lstat(path)
            if stat.S_ISSOCK(status.st_mode):
                continue
            yield path, status
            if status.st_dev == device and name in folders:
                kept.append(name)
        folders[:] = [name for name in kept if not os.path.islink(os.path.join(folder, name))]


def write_root(root: Path, archive: Path) -> None:
    """Write a tar archive of a root file system, including owners and devices."""
    with tarfile.open(archive, "w") as made:
        for path, _ in walk_root(root):
            made.add(path, arcname=os.path.relpath(path, root), recursive=False)
