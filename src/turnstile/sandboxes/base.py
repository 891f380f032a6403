"""Where code runs: the two protocols every isolation tier obeys, and what they exchange.

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
    """What one command may use. Seconds are wall-clock; a breach kills the command's whole process group."""

    seconds: PositiveFloat = 10.0
    cpu_seconds: PositiveFloat = 10.0
    memory_mb: PositiveInt = 2048
    processes: PositiveInt = 128
    file_mb: PositiveInt = 64
    output_chars: PositiveInt = 10_000  # longer output keeps its head and tail and says how much was left out


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecResult:
    """What a command did. `exit_code` is 128 + signal for a killed command, 124 when it ran out of time."""

    exit_code: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """A container image to start from as it is, where commands run in its folder `root`. Containers alone take one."""

    name: str
    root: str


Template = Path | Image
"""What a sandbox starts from: a folder that is copied, an image, or what `Sandbox.snapshot` of the provider gave."""


@runtime_checkable
class Sandbox(Protocol):
    """One private working copy. Paths are relative to its root; leaving the root raises ValueError.

    Raises SandboxError when the sandbox itself is broken or its machine has no room left; a command that fails is an
    ExecResult.
    """

    async def exec(
        self, argv: Sequence[str], *, limits: Limits | None = None, env: Mapping[str, str] | None = None
    ) -> ExecResult: ...

    async def read(self, path: str) -> bytes: ...

    async def write(self, path: str, data: bytes) -> None: ...

    async def snapshot(self) -> Template:
        """The state of the files now, for `start` of the provider that this sandbox is of, until that closes."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class Sandboxes(Protocol):
    """Starts sandboxes of one tier. `close` leaves no process and no file behind."""

    async def start(self, template: Template, *, deps: Path | None = None) -> Sandbox:
        """A private copy of the template. `deps` is a folder that its commands import from, which a tier that hides
        this machine's files shows at its place where it lies in what was given as its `shelf`, and no other of that."""
        ...

    async def close(self) -> None: ...
