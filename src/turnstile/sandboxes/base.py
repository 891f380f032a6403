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
    """Limits of one command. Seconds are wall-clock; exceeding one kills the command's whole process group."""

    seconds: PositiveFloat = 10.0
    cpu_seconds: PositiveFloat = 10.0
    memory_mb: PositiveInt = 2048
    processes: PositiveInt = 128
    file_mb: PositiveInt = 64
    output_chars: PositiveInt = 10_000  # longer output keeps its head and tail and says how much was left out


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecResult:
    """The result of a command. `exit_code` is 128 + signal for a killed command, 124 for one that ran out of time."""

    exit_code: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """A container image to start from unchanged; commands run in its folder `root`. Only containers support it."""

    name: str
    root: str


Template = Path | Image
"""What a sandbox starts from: a folder that is copied, an image, or what `Sandbox.snapshot` of the provider gave."""


@runtime_checkable
class Sandbox(Protocol):
    """One private working copy. Paths are relative to its root; a path that leaves it raises ValueError.

    Raises SandboxError if the sandbox itself is broken or its machine is out of space; a command that fails is an
    ExecResult.
    """

    async def exec(
        self, argv: Sequence[str], *, limits: Limits | None = None, env: Mapping[str, str] | None = None
    ) -> ExecResult: ...

    async def read(self, path: str) -> bytes: ...

    async def write(self, path: str, data: bytes) -> None: ...

    async def snapshot(self) -> Template:
        """Return the current state of the files, to be passed to `start` of the same provider until that closes."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class Sandboxes(Protocol):
    """A provider of one kind of sandbox. `close` leaves no process and no file behind."""

    async def start(self, template: Template, *, deps: Path | None = None) -> Sandbox:
        """Start a sandbox with a private copy of the template.

        `deps` is a folder that its commands import from. A provider that hides this machine's files shows it at its own
        path, if it lies in the provider's `shelf`, and nothing else of that folder.
        """
        ...

    async def close(self) -> None: ...
