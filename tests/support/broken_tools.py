"""The guessing game with a tool in a real sandbox, which now and then does not do what tools do."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

from played_ahead import first_time
from turnstile.envs.base import Start, Step
from turnstile.envs.guess import GuessEnv
from turnstile.errors import SandboxError
from turnstile.sandboxes.base import Limits, Sandbox, Sandboxes
from turnstile.types import Message, Task

COMMANDS = {
    "hangs": ["sleep", "1000"],
    "floods": ["sh", "-c", "head -c 20000000 /dev/zero | tr '\\0' x"],
    "crashes": ["sh", "-c", "kill -SEGV $$"],
}
FAULTS = ("loses its sandbox", "raises")
LIMITS = Limits(seconds=1.0, output_chars=1000)


class ToolEnv(GuessEnv):
    """Uses the tool at each turn; each `every`-th time in its process that is as `how` says. The turn's signals say
    what came of it: tool, the exit code, and printed, the characters."""

    turns = itertools.count(1)

    def __init__(self, *, template: str, sandboxes: Sandboxes, how: str = "", every: int = 7) -> None:
        super().__init__()
        self._sandboxes, self._template = sandboxes, Path(template)
        self._how, self._every = how, every
        self._sandbox: Sandbox | None = None

    async def reset(self, task: Task) -> Start:
        self._sandbox = await self._sandboxes.start(self._template)
        return await super().reset(task)

    async def step(self, message: Message) -> Step:
        assert self._sandbox is not None
        now = next(ToolEnv.turns) % self._every == 0
        if now and self._how == "loses its sandbox":
            raise SandboxError("the sandbox is gone")
        if now and self._how == "raises" and first_time():
            raise ValueError("a rollout that raises")
        command = COMMANDS.get(self._how, ["true"]) if now else ["true"]
        result = await self._sandbox.exec(command, limits=LIMITS)
        step = await super().step(message)
        return replace(step, signals={**step.signals, "tool": result.exit_code, "printed": len(result.stdout)})

    async def close(self) -> None:
        if self._sandbox is not None:
            await self._sandbox.close()
        await super().close()
