"""Reading and writing single files, and packing and unpacking archives."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import time
from collections.abc import Iterator

from turnstile.sandboxes.containers.runner.frames import CHUNK, HEAD, Data, put, send

TYPE_CHECKING = False  # importing typing would take a tenth of a start
if TYPE_CHECKING:
    from typing import Any


class GoneError(Exception):
    """Raised if the working folder is gone, or if processes cannot be killed."""


def begin(request: dict[str, Any]) -> None:
    """Create the working folders, and empty those that a snapshot may have filled.

    Raises NotADirectoryError if there is no root folder then.
    """
    os.umask(0o022)
    for folder in request["empty"]:
        remove_inside(folder)
    for folder in request["make"]:
        os.makedirs(folder, mode=0o755, exist_ok=True)
    if not os.path.isdir(request["root"]):
        raise NotADirectoryError(errno.ENOTDIR, "there is no such root folder", request["root"])


def remove_inside(folder: str) -> None:
    """Remove everything in a folder, even from subfolders without permissions. Nothing happens if it is missing."""
    if os.path.isdir(folder) and not os.path.islink(folder):
        os.chmod(folder, 0o700)
    for top, folders, _ in os.walk(folder):
        for name in folders:
            path = os.path.join(top, name)
            if not os.path.islink(path):
                os.chmod(path, 0o700)
    for top, folders, files in os.walk(folder, topdown=False):
        for name in files:
            os.unlink(os.path.join(top, name))
        for name in folders:
            path = os.path.join(top, name)
            os.unlink(path) if os.path.islink(path) else os.rmdir(path)


def check_root(root: str) -> None:
    """Raise GoneError if the working folder is gone or replaced by a link."""
    if os.path.islink(root) or not os.path.isdir(root):
        raise GoneError(f"its folder {root} is gone")


def resolve(root: str, path: str) -> str:
    """Return the real path of `path`, which is relative to `root`.

    Raises ValueError if it is absolute or, after following links, leaves the root.
    """
    check_root(root)
    top = os.path.realpath(root)
    if not os.path.isabs(path) and "\0" not in path:
        real = os.path.realpath(os.path.join(top, path))
        if real == top or real.startswith(top.rstrip("/") + "/"):
            return real
    raise ValueError(f"the path {path!r} leaves the sandbox; give one relative to its root")


def send_file(request: dict[str, Any]) -> None:
    """Send a file's bytes as the data of an answer."""
    real = resolve(request["root"], request["path"])
    descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb", buffering=0, closefd=True) as file:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), real)
        if not stat.S_ISREG(status.st_mode):  # a pipe or a device would never end
            raise ValueError(f"{request['path']!r} is no plain file")
        body = b"{}"
        put(HEAD.pack(len(body), status.st_size) + body)
        for part in exactly(file, status.st_size):
            put(part)


def write(request: dict[str, Any], data: Data) -> None:
    """Write a file by replacing it, so that no link made by a command redirects the write."""
    real = resolve(request["root"], request["path"])
    folder = os.path.dirname(real)
    os.makedirs(folder, exist_ok=True)
    mode = stat.S_IMODE(os.stat(real).st_mode) if os.path.exists(real) else 0o644
    temporary = os.path.join(folder, f".being-written-{time.monotonic_ns()}")
    try:
        put_file(temporary, 0o600, data, data.left)
        os.chmod(temporary, mode)
        os.replace(temporary, real)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def put_file(path: str, mode: int, data: Data, size: int) -> None:
    """Create a file from the next `size` bytes of `data`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        while size:
            view = memoryview(data.read(min(CHUNK, size)))
            size -= len(view)
            while view:
                view = view[file.write(view) :]


# An archive is a sequence of entries, each a frame. Its JSON has `kind` (folder, file or link), `name` (relative to the
# root; a folder comes before its contents), the `mode` of a file and the target `to` of a link; its data is the content
# of a file.


def unpack(root: str, data: Data) -> None:
    """Unpack an archive into `root`, which must hold none of its files and links."""
    check_root(root)
    while data.left:
        size, data_size = HEAD.unpack(data.read(HEAD.size))
        entry = json.loads(data.read(size).decode())
        path = os.path.join(root, entry["name"])
        if entry["kind"] == "folder":
            os.makedirs(path, exist_ok=True)
        elif entry["kind"] == "link":
            os.symlink(entry["to"], path)
        else:
            put_file(path, entry["mode"] & 0o777, data, data_size)


def pack(root: str) -> None:
    """Send an archive of the folders, files and links in `root`, in answers with `more`."""
    check_root(root)
    pieces = Pieces()
    pending = [(root, "")]
    while pending:
        folder, inner = pending.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                name = inner + entry.name
                if entry.is_symlink():
                    pieces.add({"kind": "link", "name": name, "to": os.readlink(entry.path)}, 0)
                elif entry.is_dir():
                    pieces.add({"kind": "folder", "name": name}, 0)
                    pending.append((entry.path, name + "/"))
                elif entry.is_file():
                    with open(entry.path, "rb", buffering=0) as file:
                        status = os.fstat(file.fileno())
                        pieces.add({"kind": "file", "name": name, "mode": status.st_mode}, status.st_size)
                        for part in exactly(file, status.st_size):
                            pieces.put(part)
    pieces.flush()
    send({})


def exactly(file: Any, size: int) -> Iterator[bytes]:
    """Yield the next `size` bytes of a file in pieces.

    If the file ends early, zeros follow, since the size has already been announced.
    """
    while size:
        part = file.read(min(CHUNK, size)) or bytes(min(CHUNK, size))
        size -= len(part)
        yield part


class Pieces:
    """A buffer that sends its data in answers with `more`, each of about one chunk."""

    def __init__(self) -> None:
        self.held: list[bytes] = []
        self.size = 0

    def add(self, entry: dict[str, Any], size: int) -> None:
        body = json.dumps(entry).encode()
        self.put(HEAD.pack(len(body), size) + body)

    def put(self, data: bytes) -> None:
        self.held.append(data)
        self.size += len(data)
        if self.size >= CHUNK:
            self.flush()

    def flush(self) -> None:
        if self.held:
            send({"more": True}, b"".join(self.held))
            self.held, self.size = [], 0
