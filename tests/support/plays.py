"""Environments that do what they are told, and everything an episode needs beside one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from helpers import byte_tokenizer
from turnstile.agents.base import Scaffold
from turnstile.agents.parsing.lines import LineParser
from turnstile.agents.renderer import LinesRenderer
from turnstile.engines.scripted import ScriptedEngine
from turnstile.envs.base import Start, Step
from turnstile.rollout.episode import Limits
from turnstile.rollout.group import Player
from turnstile.types import JSON, Message, Sampling, Task, ToolSpec

TOOLS = (
    ToolSpec(name="look", description="Look.", schema={"type": "object", "properties": {}}),
    ToolSpec(name="submit", description="Be done.", schema={"type": "object", "properties": {}}),
)
SCAFFOLD = Scaffold(LinesRenderer(byte_tokenizer()), LineParser())
TASK = Task(id="t", env="fake")


@dataclass
class FakeEnv:
    """Answers "ok" to everything; `submit` ends the episode. `on` replaces what happens at reset, step, measure
    or close: an exception to raise, a Step to answer with, or an async function of the environment."""

    on: Mapping[str, Any] = field(default_factory=dict)
    did: list[str] = field(default_factory=list)

    async def reset(self, task: Task) -> Start:
        await self._do("reset")
        return Start(messages=(Message(role="user", content="Go."),), tools=TOOLS)

    async def step(self, message: Message) -> Step:
        answer = await self._do("step")
        if isinstance(answer, Step):
            return answer
        done = any(call.name == "submit" for call in message.tool_calls)
        said = (Message(role="tool", content="ok"),)
        return Step(messages=said, terminated=done, submitted=done, rewards={"bonus": 0.5}, signals={"seen": done})

    async def measure(self) -> Mapping[str, JSON]:
        await self._do("measure")
        return {"steps": self.did.count("step")}

    def state_key(self) -> str:
        return f"after {self.did.count('step')}"

    async def close(self) -> None:
        await self._do("close")

    async def _do(self, what: str) -> Any:
        self.did.append(what)
        order = self.on.get(what)
        if isinstance(order, BaseException):
            raise order
        return await order(self) if callable(order) else order


Speak = Callable[[str, int], str]
"""(session, turn) -> the action's line."""


def says(*lines: str) -> Speak:
    """The lines one after the other, the last for ever."""
    return lambda session, turn: lines[min(turn, len(lines) - 1)]


def scripted(speak: Speak) -> ScriptedEngine:
    return ScriptedEngine(SCAFFOLD.renderer, lambda session, turn, prompt: speak(session, turn))


LOOKS = says("look")


def player(make_env: Callable[[], Any], speak: Speak = LOOKS, **changes: Any) -> Player:
    plain = Player(
        make_env=make_env,
        engine=scripted(speak),
        scaffold=SCAFFOLD,
        sampling=Sampling(max_tokens=16),
        limits=Limits(turns=3),
    )
    return replace(plain, **changes)


def once_then(first: BaseException, then: Any = None) -> Callable[[FakeEnv], Awaitable[Any]]:
    """Raises `first` the first time, whichever environment it happens in."""
    times = iter([first])

    async def act(_: FakeEnv) -> Any:
        if error := next(times, None):
            raise error
        return then

    return act


async def hang(_: FakeEnv) -> None:
    await asyncio.Event().wait()


def tasks(count: int) -> Sequence[Task]:
    return [replace(TASK, id=f"t{i}") for i in range(count)]
