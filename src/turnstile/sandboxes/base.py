"""Where code runs: the two protocols every isolation tier obeys, and what they exchange.

A *provider* (`Sandboxes`) starts sandboxes from a template folder; a *sandbox* is one private copy of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one command may use. Seconds are wall-clock; a breach kills the command's whole process group."""

    seconds: float = 10.0
    cpu_seconds: float = 10.0
    memory_mb: int = 2048
    processes: int = 128
    file_mb: int = 64
    output_chars: int = 10_000  # longer output keeps its head and tail and says how much was left out


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecResult:
    """What a command did. `exit_code` is 128 + signal for a killed command, 124 when it ran out of time."""

    exit_code: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False


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

    async def snapshot(self) -> Path:
        """A folder that `Sandboxes.start` takes as a template: the state of the files now."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class Sandboxes(Protocol):
    """Starts sandboxes of one tier. `close` leaves no process and no file behind."""

    async def start(self, template: Path) -> Sandbox: ...

    async def close(self) -> None: ...
