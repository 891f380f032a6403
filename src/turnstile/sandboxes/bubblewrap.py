"""Sandboxes in namespaces of their own, by bubblewrap: quick, on one Linux machine, without a daemon.

Inside, the file system is read-only but for the sandbox's own folder and a private /tmp, there is no network,
and only the sandbox's own processes are there. Everything that this user may read can still be read. Run as
root, bubblewrap keeps root's user id, so it is no boundary against files that root owns should code find
a way out of its mount namespace; use an ordinary user, or a container, where that matters.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path

import turnstile
from turnstile.errors import ConfigError, SandboxError
from turnstile.sandboxes.base import Limits, Template
from turnstile.sandboxes.folder import FolderSandbox, Home, copy_whole, remove_tree
from turnstile.sandboxes.forkserver import ForkServer


def find_bubblewrap() -> str:
    """The path of `bwrap`. Raises ConfigError that says how to install it."""
    program = shutil.which("bwrap")
    if program is None:
        raise ConfigError(
            "sandbox kind 'bubblewrap' needs the program bwrap; install it (apt-get install bubblewrap, or "
            "dnf install bubblewrap) or choose sandbox kind 'local'"
        )
    return program


class BubblewrapSandboxes:
    """Private copies of a template, each with namespaces and a fork server of its own.

    At most `workers` commands run at once in one sandbox. `spare` sandboxes are started in advance, as a server
    takes a while to import what `preload` names. `limits` hold for commands that bring none; `root` is where
    the copies live (shared memory or the temporary folder by default). /tmp is empty inside but for this Python, if
    it lives there, and the folders of `readable`.
    """

    def __init__(
        self,
        *,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        preload: Sequence[str] = (),
        workers: int = 2,
        spare: int = 2,
        readable: Sequence[Path] = (),
        root: Path | None = None,
    ) -> None:
        self._bwrap = find_bubblewrap()
        self._limits = limits
        self._preload = tuple(preload)
        self._workers = workers
        self._spare = spare
        needed = (Path(sys.prefix), Path(sys.base_prefix), Path(turnstile.__file__).parent, *readable)
        self._readable = [str(path.resolve()) for path in needed if path.resolve().is_relative_to("/tmp")]
        self._home = Home(root)
        self._spares: list[tuple[Path, ForkServer]] = []
        self._open: dict[FolderSandbox, ForkServer] = {}
        self._finalizer = weakref.finalize(self, self._home.remove)

    async def start(self, template: Template) -> FolderSandbox:
        """A private copy of `template`. Raises SandboxError when there is no such folder, or no room."""
        if not self._finalizer.alive:
            raise SandboxError("these sandboxes were closed")
        while len(self._spares) <= self._spare:
            self._spares.append(self._cell())
        folder, server = self._spares.pop(0)
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
            await copy_whole(template, sandbox.root)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def close(self) -> None:
        """End every command and remove every file."""
        for sandbox in tuple(self._open):
            await sandbox.close()
        while self._spares:
            _, server = self._spares.pop()
            await server.close()
        await asyncio.to_thread(self._finalizer)

    def _cell(self) -> tuple[Path, ForkServer]:
        """A folder and a fork server that sees it, and of this provider's folders nothing else."""
        folder = self._home.new_sandbox()
        work = folder / "work"
        work.mkdir()
        wrapper = [self._bwrap, "--die-with-parent", "--new-session", "--unshare-all", "--cap-drop", "ALL"]
        wrapper += ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
        for path in self._readable:
            wrapper += ["--ro-bind", path, path]
        wrapper += ["--tmpfs", str(self._home.path), "--bind", str(work), str(work), "--chdir", "/", "--"]
        server = ForkServer(scratch="/tmp", preload=self._preload, workers=self._workers, wrapper=wrapper)
        server.start()
        return folder, server

    async def _discard(self, sandbox: FolderSandbox) -> None:
        server = self._open.pop(sandbox)
        await server.close()
        await asyncio.to_thread(remove_tree, sandbox.folder)
