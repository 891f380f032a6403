"""Sandboxes in Linux namespaces, made by bubblewrap. They start quickly, on this machine, without a daemon.

A sandbox sees the system's folders, this Python and Turnstile (all read-only), its own folder, its dependencies and a
private /tmp, but no other file of this machine. It has no network and sees only its own processes. If this Python is
that of a virtual environment, the sandbox also sees the base Python, but not packages of the base that this Python does
not use. Run as root, bubblewrap keeps root's user id, so files that root owns are not protected from code that escapes
its mount namespace; where that matters, use an ordinary user or a container.
"""

from __future__ import annotations

import asyncio
import glob
import logging
import os
import shutil
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path

from pydantic import NonNegativeInt, PositiveInt

import turnstile
from turnstile.errors import ConfigError, SandboxError
from turnstile.sandboxes.base import Limits, Template
from turnstile.sandboxes.folder import (
    FolderSandbox,
    Home,
    both_names,
    copy_whole,
    is_inside,
    on_shelf,
    remove_tree,
    short_machine,
)
from turnstile.sandboxes.forkserver import ForkServer
from turnstile.sandboxes.spares import Spares

_log = logging.getLogger(__name__)

SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store"),
    *("/etc/alternatives", "/etc/group", "/etc/ld.so.cache", "/etc/localtime", "/etc/mime.types", "/etc/nsswitch.conf"),
    *("/etc/passwd", "/etc/pki", "/etc/protocols", "/etc/services", "/etc/ssl/certs"),
)
"""Paths of the system that programs need to run. They hold no secrets."""


def find_bubblewrap() -> str:
    """Return the path of `bwrap`. Raises ConfigError, which says how to install it, if there is none."""
    program = shutil.which("bwrap")
    if program is None:
        raise ConfigError(
            "sandbox kind 'bubblewrap' needs the program bwrap; install it (apt-get install bubblewrap, or "
            "dnf install bubblewrap) or choose sandbox kind 'local'"
        )
    return program


Cell = tuple[Path, ForkServer]


def bound(paths: Sequence[str]) -> list[str]:
    """Return bwrap arguments that show these paths read-only at the same place.

    A symbolic link is recreated as a link; missing paths are skipped.
    """
    found = []
    for path in paths:
        if os.path.islink(path):
            found += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            found += ["--ro-bind", path, path]
    return found


def unused_packages() -> list[str]:
    """Return the package folders of the virtual environment's base Python that this Python does not use.

    Packages installed there are not dependencies of a task, and may include the package that a task is made from. The
    system's own package folders (below /usr) stay visible, because its programs use them.
    """
    if sys.base_prefix == "/usr":
        return []
    used = {os.path.realpath(place) for place in sys.path}
    bases = map(glob.escape, both_names([Path(sys.base_prefix)]))
    found = [path for base in bases for path in glob.glob(base + "/lib/python3*/site-packages")]
    unused = [path for path in found if not any(is_inside(os.path.realpath(path), place) for place in used)]
    return [path for path in unused if not os.path.islink(path)]  # the folder behind a link is listed itself


def empty_folder_args(folders: Sequence[str]) -> list[str]:
    """Return bwrap arguments that show these folders as empty and read-only."""
    return [word for path in folders for word in ("--tmpfs", path, "--remount-ro", path)]


class BubblewrapSandboxes:
    """A provider of private copies of a template, each with its own namespaces and fork server.

    At most `workers` commands run at once in one sandbox. `spare` sandboxes are started in advance, since a fork server
    takes a while to import the modules of `preload`. `limits` apply to commands without their own; `root` is the parent
    folder of the copies (default: shared memory or the temporary folder). Of this machine's files, commands see those
    of the system, of this Python and of Turnstile, the folders of `readable`, and the folder of `shelf` that `start`
    gets as `deps`. Raises ConfigError if bwrap or a folder of `readable` does not exist.
    """

    def __init__(
        self,
        *,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        preload: Sequence[str] = (),
        workers: PositiveInt = 2,
        spare: NonNegativeInt = 2,
        readable: Sequence[Path] = (),
        shelf: Path | None = None,
        root: Path | None = None,
    ) -> None:
        self._bwrap = find_bubblewrap()
        self._limits = limits
        self._preload = tuple(preload)
        self._workers = workers
        for path in readable:
            if not Path(path).exists():
                raise ConfigError(f"sandbox.readable names {str(path)!r}, which is not there")
        python = both_names((Path(sys.prefix), Path(sys.base_prefix)))
        needed = both_names((Path(turnstile.__file__).parent, *map(Path, readable)))
        self._shown = [*bound(SYSTEM), *bound(python), *empty_folder_args(unused_packages()), *bound(needed)]
        self._shelf = None if shelf is None else Path(shelf)
        self._home = Home(root)
        self._spares: Spares[Path | None, Cell] = Spares(spare)
        self._open: dict[FolderSandbox, ForkServer] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._finalizer = weakref.finalize(self, self._home.remove)

    async def start(self, template: Template, *, deps: Path | None = None) -> FolderSandbox:
        """Start a sandbox with a private copy of `template`.

        Raises SandboxError if there is no such folder, if space runs out or if the provider is closed.
        """
        if not self._finalizer.alive:
            raise SandboxError("these sandboxes were closed")
        shown = on_shelf(deps, self._shelf)
        for cell in self._spares.ask(shown):
            self._end_in_background(cell)
        folder, server = self._spares.take(shown) or self._start_cell(shown)
        sandbox = FolderSandbox(
            folder,
            server,
            limits=self._limits,
            snapshots=self._home.new_snapshot,
            on_close=self._discard,
            scratch="/tmp",
        )
        self._open[sandbox] = server
        try:
            self._refill(shown)
            await copy_whole(template, sandbox.root)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def close(self) -> None:
        """End all commands and remove all files."""
        for sandbox in tuple(self._open):
            await sandbox.close()
        for cell in self._spares.empty():
            self._end_in_background(cell)
        await asyncio.gather(*self._ending)
        await asyncio.to_thread(self._finalizer)

    def _refill(self, deps: Path | None) -> None:
        """Start the missing spares. A failed start is only logged, since no request waits for it."""
        try:
            for _ in range(self._spares.missing):
                self._spares.put(deps, self._start_cell(deps))
        except SandboxError as error:
            _log.warning("no spare sandbox could be started: %s", error)

    def _end_in_background(self, cell: Cell) -> None:
        task = asyncio.ensure_future(end_spare(*cell))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _start_cell(self, deps: Path | None) -> Cell:
        """Create a sandbox's folder and start its fork server, which sees `deps` but no other sandbox."""
        folder = self._home.new_sandbox()
        work = folder / "work"
        wrapper = [self._bwrap, "--die-with-parent", "--new-session", "--unshare-all", "--cap-drop", "ALL"]
        wrapper += ["--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", *self._shown]
        wrapper += bound(() if deps is None else both_names([deps]))
        wrapper += ["--bind", str(work), str(work), "--chdir", "/", "--"]
        server = ForkServer(scratch="/tmp", preload=self._preload, workers=self._workers, wrapper=wrapper)
        try:
            with short_machine(folder):
                work.mkdir()
            server.start()
        except BaseException:
            remove_tree(folder)
            raise
        return folder, server

    async def _discard(self, sandbox: FolderSandbox) -> None:
        await end(sandbox.folder, self._open.pop(sandbox))


async def end(folder: Path, server: ForkServer) -> None:
    """Close a fork server and remove its sandbox's folder."""
    await server.close()
    await asyncio.to_thread(remove_tree, folder)


async def end_spare(folder: Path, server: ForkServer) -> None:
    """End a spare sandbox, logging a warning if its folder cannot be removed.

    Such a folder is removed together with the provider's home.
    """
    try:
        await end(folder, server)
    except OSError as error:
        _log.warning("the folder of a spare sandbox stays for now: %s", error)
