"""The protocols that every sandbox provider implements, and the types they exchange.

A *provider* (`Sandboxes`) starts sandboxes from a template; a *sandbox* is one private copy of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from pydantic import PositiveFloat, PositiveInt


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits on one command.

    `seconds` is wall-clock time; a command that exceeds it or `processes` is killed with all processes that it started.
    `cpu_seconds` is processor time; a process that exceeds it is killed. `memory_mb` and `file_mb` bound, in MiB, the
    memory of each process and the size of each file.
    """

    seconds: PositiveFloat = 10.0
    cpu_seconds: PositiveFloat = 10.0
    memory_mb: PositiveInt = 2048
    processes: PositiveInt = 128
    file_mb: PositiveInt = 64
    output_chars: PositiveInt = (
        10_000  # of longer output the head and tail are kept, with a note of how much is left out
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecResult:
    """The result of a command.

    `exit_code` is 128 + signal if a signal killed the command, and 124 if the command ran out of time.
    """

    exit_code: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """A container image to start from unchanged; commands run in its folder `root`.

    Only providers of containers support it, on this machine or behind a sandbox server.
    """

    name: str
    root: str


Template = Path | Image
"""What a sandbox starts from: a folder to copy, an image, or a snapshot made by the same provider."""


@runtime_checkable
class Sandbox(Protocol):
    """A private working copy of a template. Paths are relative to its root.

    Methods raise ValueError for a path that leaves the root, and SandboxError if the sandbox itself is broken or its
    machine is out of space. A command that fails raises no error; its ExecResult reports the failure.
    """

    async def exec(
        self, argv: Sequence[str], *, limits: Limits | None = None, env: Mapping[str, str] | None = None
    ) -> ExecResult: ...

    async def read(self, path: str) -> bytes: ...

    async def write(self, path: str, data: bytes) -> None: ...

    async def snapshot(self) -> Template:
        """Return the current state of the files, as a template for `start` of this provider until it closes."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class Sandboxes(Protocol):
    """A provider of one kind of sandbox. `close` leaves no processes or files behind."""

    async def start(self, template: Template, *, deps: Path | None = None) -> Sandbox:
        """Start a sandbox with a private copy of the template.

        `deps` is a folder that commands may import from. A provider that hides this machine's files shows `deps` at its
        own path if it lies directly in the provider's `shelf`, and shows nothing else of the shelf.
        """
        ...

    async def close(self) -> None: ...
