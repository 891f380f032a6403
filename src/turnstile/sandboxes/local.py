"""Sandboxes for trusted code, with private folders and resource limits but no isolation from the machine.

Their code can read and write whatever this user can. For code written freely by a model, use `bubblewrap` or a
container.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from pathlib import Path

from pydantic import PositiveInt

from turnstile.errors import SandboxError
from turnstile.sandboxes.base import Limits, Template
from turnstile.sandboxes.folder import FolderSandbox, Home, copy_whole, remove_tree
from turnstile.sandboxes.forkserver import ForkServer


class LocalSandboxes:
    """A provider of private copies of a template, all served by one fork server.

    At most `workers` commands run at once. `preload` names modules that the server imports once, so that commands need
    not (`package.*` is every module of a package). `limits` apply to commands without their own; `root` is the parent
    folder of the copies (default: shared memory or the temporary folder). `limits.processes` is checked ten times a
    second, and only on Linux. Commands can use the network.
    """

    def __init__(
        self,
        *,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        preload: Sequence[str] = (),
        workers: PositiveInt = 2,
        root: Path | None = None,
    ) -> None:
        self._limits = limits
        self._home = Home(root)
        self._server = ForkServer(scratch=self._home.path, preload=preload, workers=workers)
        self._open: set[FolderSandbox] = set()
        self._finalizer = weakref.finalize(self, self._home.remove)

    async def start(self, template: Template, *, deps: Path | None = None) -> FolderSandbox:
        """Start a sandbox with a private copy of `template`. Commands can read `deps` like everything else.

        Raises SandboxError if there is no such folder, if space runs out or if the provider is closed.
        """
        if not self._finalizer.alive:
            raise SandboxError("these sandboxes were closed")
        self._server.start()
        folder = self._home.new_sandbox()
        sandbox = FolderSandbox(
            folder, self._server, limits=self._limits, snapshots=self._home.new_snapshot, on_close=self._discard
        )
        self._open.add(sandbox)
        try:
            await copy_whole(template, sandbox.root)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def close(self) -> None:
        """End all commands and remove all files."""
        for sandbox in tuple(self._open):
            await sandbox.close()
        await self._server.close()
        await asyncio.to_thread(self._finalizer)

    async def _discard(self, sandbox: FolderSandbox) -> None:
        self._open.discard(sandbox)
        await asyncio.to_thread(remove_tree, sandbox.folder)
