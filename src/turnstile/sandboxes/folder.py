"""Sandboxes that are folders, each a private copy of a tree in which a fork server runs commands.

The providers `local` and `bubblewrap` share this code and differ in where their fork servers run.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import itertools
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from turnstile.errors import SandboxError
from turnstile.sandboxes.base import ExecResult, Image, Limits, Template
from turnstile.sandboxes.forkserver import ForkServer, base_environment

PREFIX = "turnstile-sandboxes-"
NOT_COPIED = frozenset({".git", ".hg", ".tox", ".venv", ".pytest_cache", ".mypy_cache"})
"""Names that are never copied: version history, which may hold the answer, and what tools leave behind."""
PLENTY = 4 << 30  # bytes that must be free in shared memory for it to be used
MAKING = 300.0  # seconds after which a home without a lock is abandoned; making one takes a few milliseconds
SHORT = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EIO, errno.EROFS})
"""Errors of a machine that has run out of something or is broken, whatever the request."""
CHECKED_HASH = b"\x03\0\0\0"  # header flags of byte code that Python checks by its source's hash (PEP 552)
_log = logging.getLogger(__name__)


class FolderSandbox:
    """A private copy of a template in `folder/work`, which is its root.

    HOME and TMPDIR of its commands are `scratch` (default: `folder/scratch`).
    """

    def __init__(
        self,
        folder: Path,
        server: ForkServer,
        *,
        limits: Limits,
        snapshots: Callable[[], Path],
        on_close: Callable[[FolderSandbox], Awaitable[None]],
        scratch: str | None = None,
    ) -> None:
        self.folder = folder
        self.root = folder / "work"
        self._server = server
        self._limits = limits
        self._snapshots = snapshots
        self._on_close = on_close
        self._environment = base_environment(scratch or folder / "scratch")
        self._closed = False

    async def exec(
        self, argv: Sequence[str], *, limits: Limits | None = None, env: Mapping[str, str] | None = None
    ) -> ExecResult:
        """Run a command in the root. Its environment is `env` added to a plain one that inherits only PATH."""
        self._check()
        environment = {**self._environment, **(env or {})}
        return await self._server.run(argv, cwd=self.root, env=environment, limits=limits or self._limits)

    async def read(self, path: str) -> bytes:
        """Return a file's bytes.

        Raises FileNotFoundError, IsADirectoryError, and ValueError if the path leaves the root or is not a plain file.
        """
        self._check()
        return await asyncio.to_thread(read_inside, self.root, path)

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace a file, and create its folders if needed. Raises ValueError if the path leaves the root."""
        self._check()
        await asyncio.to_thread(write_inside, self.root, path, data)

    async def snapshot(self) -> Path:
        """Return a folder with a copy of the current files, kept until the provider closes."""
        self._check()
        target = self._snapshots()
        await copy_whole(self.root, target)
        return target

    async def close(self) -> None:
        """End the sandbox's commands and remove its files. Closing twice does nothing."""
        if not self._closed:
            self._closed = True
            await self._on_close(self)

    def _check(self) -> None:
        if self._closed:
            raise SandboxError("the sandbox was closed")
        if not self.root.is_dir():
            raise SandboxError(f"the sandbox's folder {self.root} is gone")


class Home:
    """The folder that holds a provider's sandboxes and snapshots.

    It stays locked while the provider lives, so that a later process can detect and remove what a killed process left.
    """

    def __init__(self, root: Path | str | None) -> None:
        parent = default_parent() if root is None else Path(root)  # a recipe gives a string
        parent.mkdir(parents=True, exist_ok=True)
        sweep(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent)).resolve()
        self._lock: IO[str] | None = (self.path / "lock.new").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (self.path / "lock.new").rename(self.path / "lock")  # so that a sweep finds it locked or not at all
        self._numbers = itertools.count()

    def new_sandbox(self) -> Path:
        folder = self.path / f"sandbox-{next(self._numbers)}"
        with short_machine(self.path):
            (folder / "scratch").mkdir(parents=True)
        return folder

    def new_snapshot(self) -> Path:
        return self.path / f"snapshot-{next(self._numbers)}"

    def remove(self) -> None:
        if self._lock is not None:
            remove_tree(self.path)
            self._lock.close()
            self._lock = None


def default_parent() -> Path:
    """Return /dev/shm if it has enough free space and programs may run from it, else the temporary folder.

    Copying into shared memory takes a quarter of the time.
    """
    memory = Path("/dev/shm")
    if os.access(memory, os.W_OK):
        found = os.statvfs(memory)
        if found.f_bavail * found.f_frsize >= PLENTY and not found.f_flag & getattr(os, "ST_NOEXEC", 0):
            return memory
    return Path(tempfile.gettempdir())


def sweep(parent: Path) -> int:
    """Remove the homes of dead providers and return how many were removed.

    A home that cannot be removed stays.
    """
    removed = 0
    for home in parent.glob(PREFIX + "*"):
        try:
            with _open_lock(home) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_tree(home)
                removed += 1
        except (BlockingIOError, FileNotFoundError, PermissionError, NotADirectoryError):
            continue  # in use, being made or removed, another user's, or not a home
        except OSError as error:
            _log.warning("%s, left by a process that is no more, cannot be removed: %s", home, error)
    return removed


def _open_lock(home: Path) -> IO[str]:
    """Open a home's lock file, creating it if the home's maker was evidently killed before it did.

    Raises FileNotFoundError for a new home without a lock file, since its maker may be about to create it.
    """
    try:
        return (home / "lock").open("r+")
    except FileNotFoundError:
        if time.time() - home.stat().st_mtime < MAKING:
            raise
        return (home / "lock.new").open("a+")


@contextmanager
def short_machine(folder: Path) -> Iterator[None]:
    """Turn an OSError that means a full or failing machine into SandboxError; `folder` is being written to."""
    try:
        yield
    except OSError as error:
        if error.errno not in SHORT:
            raise
        raise SandboxError(
            f"cannot write to {folder}: {error.strerror}; make room there, or give the sandboxes another root"
        ) from error


async def copy_whole(source: Template, target: Path) -> None:
    """Copy a tree in a thread (see `copy_tree`), and remove the copy if copying fails or is cancelled."""
    copying = asyncio.get_running_loop().run_in_executor(None, copy_tree, source, target)
    try:
        await asyncio.shield(copying)
    except BaseException:
        await asyncio.wait([copying])  # cancelling this does not stop the thread
        await asyncio.to_thread(remove_tree, target)
        raise


def as_folder(template: Template) -> Path:
    """Return the template as a folder. Raises SandboxError if it is an image or there is no such folder."""
    if isinstance(template, Image):
        raise SandboxError(f"the image {template.name} cannot be started here; choose sandbox kind 'container'")
    if not template.is_dir():
        raise SandboxError(f"there is no template folder {template}")
    return template


def both_names(paths: Iterable[Path]) -> tuple[str, ...]:
    """Return the paths as given and with links resolved, without repetitions."""
    return tuple(dict.fromkeys(name for path in paths for name in (str(path), str(path.resolve()))))


def on_shelf(deps: Path | None, shelf: Path | None) -> Path | None:
    """Return `deps` if it is a folder directly in `shelf`, else None. A link does not count as a folder."""
    if deps is None or shelf is None or deps.name in ("", "..") or deps.parent != shelf:
        return None
    return deps if deps.is_dir() and not deps.is_symlink() else None


def walk_tree(source: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, path, path below `source`) for everything that a copy of a folder holds.

    A folder comes before its contents. The kinds are folder, file and link (a relative symbolic link that stays
    inside). Names in `NOT_COPIED`, other links and special files are left out.
    """
    top = os.path.realpath(source)
    pending = [(top, "")]
    while pending:
        folder, inner = pending.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                name = inner + entry.name
                if entry.name in NOT_COPIED:
                    continue
                if entry.is_symlink():
                    link = os.readlink(entry.path)
                    if not os.path.isabs(link) and is_inside(top, os.path.realpath(entry.path)):
                        yield "link", entry.path, name
                elif entry.is_dir():
                    yield "folder", entry.path, name
                    pending.append((entry.path, name + os.sep))
                elif entry.is_file():
                    yield "file", entry.path, name


def copy_tree(source: Template, target: Path) -> None:
    """Copy what `walk_tree` yields into `target`, which must be empty or missing.

    Byte code that is not checked by hash is left out, since it could be stale. Raises SandboxError if `source` is not a
    folder or the machine is out of space.
    """
    source = as_folder(source)
    with short_machine(target):
        target.mkdir(parents=True, exist_ok=True)
        for kind, path, inner in walk_tree(source):
            name = os.path.join(target, inner)
            if kind == "folder":
                os.mkdir(name)
            elif kind == "link":
                os.symlink(os.readlink(path), name)
            else:
                copy_file(path, name)


def copy_file(source: str, target: str) -> None:
    """Copy a file's content and permissions, but skip byte code that may be stale.

    Templates hold many small files, so this makes few system calls: it takes about a third of the time of
    `shutil.copy`.
    """
    with open(source, "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        data = file.read()
    if may_be_stale(source, data):
        return
    with open(
        target, "xb", buffering=0, opener=lambda path, flags: os.open(path, flags, status.st_mode & 0o777)
    ) as file:
        left = memoryview(data)
        while left:
            left = left[file.write(left) :]


def may_be_stale(path: str, data: bytes) -> bool:
    """Return whether a file is byte code that Python does not check against its source's hash.

    Python usually checks it by the source's modification time, which copies do not keep.
    """
    return path.endswith(".pyc") and data[4:8] != CHECKED_HASH


def remove_tree(folder: Path) -> None:
    """Remove a tree if it exists, even if its folders are not writable."""
    if not folder.exists():
        return
    try:
        shutil.rmtree(folder)
    except PermissionError:
        os.chmod(folder, stat.S_IRWXU)
        for parent, inner, _ in os.walk(folder):
            for name in inner:
                path = os.path.join(parent, name)
                if not os.path.islink(path):
                    os.chmod(path, stat.S_IRWXU)
        shutil.rmtree(folder)


def is_inside(top: str, path: str) -> bool:
    """Return whether `path`, a real path, is `top` or lies below it."""
    return path == top or path.startswith(top + os.sep)


def resolve_inside(root: Path, path: str) -> str:
    """Return the real path of `path`, which is relative to `root`.

    Raises ValueError if it is absolute or, after following links, leaves the root.
    """
    top = os.path.realpath(root)
    real = os.path.realpath(os.path.join(top, path))
    if os.path.isabs(path) or "\0" in path or not is_inside(top, real):
        raise ValueError(f"the path {path!r} leaves the sandbox; give one relative to its root")
    return real


def read_inside(root: Path, path: str) -> bytes:
    """Return the bytes of a plain file below `root`.

    Raises ValueError if the path leaves the root or is not a plain file.
    """
    descriptor = os.open(resolve_inside(root, path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # a pipe or a device would never end
            raise ValueError(f"{path!r} is no plain file")
        return file.read()


def write_inside(root: Path, path: str, data: bytes) -> None:
    """Write a file below `root` by replacing it, so that no link made by the agent redirects the write.

    Raises ValueError if the path leaves the root, and SandboxError if the machine is out of space.
    """
    real = resolve_inside(root, path)
    with short_machine(root):
        _replace(real, data)


def _replace(real: str, data: bytes) -> None:
    folder = os.path.dirname(real)
    os.makedirs(folder, exist_ok=True)
    mode = stat.S_IMODE(os.stat(real).st_mode) if os.path.exists(real) else 0o644
    descriptor, temporary = tempfile.mkstemp(dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.chmod(temporary, mode)
        os.replace(temporary, real)
    except BaseException:
        os.unlink(temporary)
        raise
