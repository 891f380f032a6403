"""A sandbox that is a folder: private copies of a tree, and commands run in them by a fork server.

The tiers on one machine (`local`, `bubblewrap`) share this and differ in where their fork server runs.
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
"""Names never copied: history, which may hold the answer, and what tools leave behind."""
PLENTY = 4 << 30  # bytes free
MAKING = 300.0  # seconds; making a home takes a few milliseconds
SHORT = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EIO, errno.EROFS})
"""What a machine says that is short of something or broken, whatever was asked of it."""
CHECKED_HASH = b"\x03\0\0\0"  # the flags of byte code that Python checks against its source's hash (PEP 552)
_log = logging.getLogger(__name__)


class FolderSandbox:
    """One private copy of a template: `folder/work` is its root, `folder/scratch` its HOME and TMPDIR."""

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
        """Run a command in the root. `env` adds to a plain environment (nothing of the caller's)."""
        self._check()
        environment = {**self._environment, **(env or {})}
        return await self._server.run(argv, cwd=self.root, env=environment, limits=limits or self._limits)

    async def read(self, path: str) -> bytes:
        """A file's bytes. Raises ValueError outside the root, FileNotFoundError, IsADirectoryError."""
        self._check()
        return await asyncio.to_thread(read_inside, self.root, path)

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace a file, with its folders. Raises ValueError outside the root."""
        self._check()
        await asyncio.to_thread(write_inside, self.root, path, data)

    async def snapshot(self) -> Path:
        """A copy of the files now, kept until the provider closes."""
        self._check()
        target = self._snapshots()
        await copy_whole(self.root, target)
        return target

    async def close(self) -> None:
        """End what runs here and remove the files. Closing twice does nothing."""
        if not self._closed:
            self._closed = True
            await self._on_close(self)

    def _check(self) -> None:
        if self._closed:
            raise SandboxError("the sandbox was closed")
        if not self.root.is_dir():
            raise SandboxError(f"the sandbox's folder {self.root} is gone")


class Home:
    """The folder under which a provider keeps its sandboxes and snapshots.

    It is locked while its provider lives, so that a later one can tell and remove the leavings of a process
    that was killed.
    """

    def __init__(self, root: Path | str | None) -> None:
        parent = default_parent() if root is None else Path(root)  # from a recipe it is a string
        parent.mkdir(parents=True, exist_ok=True)
        sweep(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent)).resolve()
        self._lock: IO[str] | None = (self.path / "lock.new").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (self.path / "lock.new").rename(self.path / "lock")  # a sweep finds it locked or not at all
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
    """Shared memory where there is plenty and programs may run from it (copies cost a quarter), else the temporary
    folder."""
    memory = Path("/dev/shm")
    if os.access(memory, os.W_OK):
        found = os.statvfs(memory)
        if found.f_bavail * found.f_frsize >= PLENTY and not found.f_flag & getattr(os, "ST_NOEXEC", 0):
            return memory
    return Path(tempfile.gettempdir())


def sweep(parent: Path) -> int:
    """Remove the homes of providers that are no more; returns how many there were. What cannot be removed stays."""
    removed = 0
    for home in parent.glob(PREFIX + "*"):
        try:
            with _lock_of(home) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_tree(home)
                removed += 1
        except (BlockingIOError, FileNotFoundError, PermissionError, NotADirectoryError):
            continue  # in use, just being made or removed, another user's, or no home
        except OSError as error:
            _log.warning("%s, left by a process that is no more, cannot be removed: %s", home, error)
    return removed


def _lock_of(home: Path) -> IO[str]:
    """A home's lock, opened. One that has been without for a while gets one: its maker was killed before it had.

    Raises FileNotFoundError for a home that may be about to be locked by its maker.
    """
    try:
        return (home / "lock").open("r+")
    except FileNotFoundError:
        if time.time() - home.stat().st_mtime < MAKING:
            raise
        return (home / "lock.new").open("a+")


@contextmanager
def short_machine(folder: Path) -> Iterator[None]:
    """Writing to `folder`: what the machine is short of is no fault of a program, but a SandboxError."""
    try:
        yield
    except OSError as error:
        if error.errno not in SHORT:
            raise
        raise SandboxError(
            f"cannot write to {folder}: {error.strerror}; make room there, or give the sandboxes another root"
        ) from error


async def copy_whole(source: Template, target: Path) -> None:
    """`copy_tree` in a thread. Of one that fails or is cancelled nothing is left."""
    copying = asyncio.get_running_loop().run_in_executor(None, copy_tree, source, target)
    try:
        await asyncio.shield(copying)
    except BaseException:
        await asyncio.wait([copying])  # its thread goes on when this is cancelled
        await asyncio.to_thread(remove_tree, target)
        raise


def as_folder(template: Template) -> Path:
    """The template as a folder. Raises SandboxError when it is none."""
    if isinstance(template, Image):
        raise SandboxError(f"the image {template.name} cannot be started here; choose sandbox kind 'container'")
    if not template.is_dir():
        raise SandboxError(f"there is no template folder {template}")
    return template


def both_names(paths: Iterable[Path]) -> tuple[str, ...]:
    """Paths as they are named and as they are, links followed."""
    return tuple(dict.fromkeys(name for path in paths for name in (str(path), str(path.resolve()))))


def on_shelf(deps: Path | None, shelf: Path | None) -> Path | None:
    """`deps` where it is a folder that lies in `shelf` itself, None where it does not: nothing else is shown."""
    if deps is None or shelf is None or deps.name in ("", "..") or deps.parent != shelf:
        return None
    return deps if deps.is_dir() and not deps.is_symlink() else None


def walk_tree(source: Path) -> Iterator[tuple[str, str, str]]:
    """What of a folder is copied: (kind, path, path below `source`), a folder before what is in it.

    The kinds are folder, file and link (a symbolic one that stays inside). Left out: `NOT_COPIED`, links that leave the
    tree and what is no plain file.
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
    """Copy what `walk_tree` finds into `target`, which must not hold anything, less byte code that could be stale (all
    but that checked by hash). Raises SandboxError when `source` is no folder or the machine has no room."""
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
    """Copy content and permissions, leaving out byte code that is not checked against its source's hash.

    Files are small and many, so this makes few calls: a good third of what `shutil.copy` takes.
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
    """Whether it is byte code taken for current by its source's time of change, which copies do not keep."""
    return path.endswith(".pyc") and data[4:8] != CHECKED_HASH


def remove_tree(folder: Path) -> None:
    """Remove a tree, also one whose folders were made unwritable."""
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
    """Return whether a real path is `top` or lies below it."""
    return path == top or path.startswith(top + os.sep)


def resolve_inside(root: Path, path: str) -> str:
    """The real path of `path` below `root`. Raises ValueError when it leaves the root, links followed."""
    top = os.path.realpath(root)
    real = os.path.realpath(os.path.join(top, path))
    if os.path.isabs(path) or "\0" in path or not is_inside(top, real):
        raise ValueError(f"the path {path!r} leaves the sandbox; give one relative to its root")
    return real


def read_inside(root: Path, path: str) -> bytes:
    """Read a plain file below `root`. Raises ValueError outside it, and for what is no plain file."""
    descriptor = os.open(resolve_inside(root, path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # a pipe or a device would never end
            raise ValueError(f"{path!r} is no plain file")
        return file.read()


def write_inside(root: Path, path: str, data: bytes) -> None:
    """Replace rather than overwrite, so that no link made by the agent carries the write elsewhere.

    Raises ValueError outside the root, SandboxError when the machine has no room.
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
