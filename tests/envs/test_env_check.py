"""The checker of environments finds each way of breaking the contract."""

from __future__ import annotations

import itertools

import pytest

from turnstile.envs.base import Step
from turnstile.envs.check import check_env
from turnstile.envs.guess import GuessEnv
from turnstile.errors import SandboxError
from turnstile.types import Message, Task

TASK = Task(id="t", env="guess", data={"secret": 3})
COUNTER = itertools.count()


class Raises(GuessEnv):
    async def step(self, message):
        if not message.tool_calls:
            raise KeyError("tool_calls")
        return await super().step(message)


class Chance(GuessEnv):
    async def reset(self, task):
        self._start = await super().reset(task)
        self._number = next(COUNTER)
        return self._start

    async def step(self, message):
        step = await super().step(message)
        return Step(messages=step.messages, signals={"chance": self._number})


class Shared(GuessEnv):
    opened = 0

    async def reset(self, task):
        Shared.opened = 0
        return await super().reset(task)

    async def step(self, message):
        Shared.opened += 1
        await super().step(message)
        return Step(signals={"count": Shared.opened})

    def state_key(self):
        return ""


class ForgetsTheState(GuessEnv):
    def __init__(self):
        super().__init__(rounds=2)

    def state_key(self):
        return "always"


class NotJson(GuessEnv):
    async def measure(self):
        return {"resolved": {1, 2}}


class BadReward(GuessEnv):
    async def step(self, message):
        await super().step(message)
        return Step(rewards={"bonus": float("nan")})


class Mute(GuessEnv):
    async def reset(self, task):
        start = await super().reset(task)
        return type(start)(messages=(), tools=(*start.tools, *start.tools))


class TalksToItself(GuessEnv):
    async def step(self, message):
        await super().step(message)
        return Step(messages=(Message(role="assistant", content="me"),), submitted=True)


@pytest.mark.parametrize(
    ("env", "finding"),
    [
        (Raises, "raised KeyError: 'tool_calls'"),
        (Chance, "the same actions on the same task gave another episode"),
        (Shared, "two interleaved episodes disturb each other"),
        (ForgetsTheState, "state key 'always' stands for two states"),
        (NotJson, "measure's signals are not JSON"),
        (BadReward, "step reward 'bonus' is nan"),
        (Mute, "reset gives no message with content"),
        (Mute, "two tools share a name"),
        (TalksToItself, "step answers with a message of the assistant's"),
        (TalksToItself, "step says submitted but not terminated"),
    ],
)
async def test_the_checker_finds_each_problem(env, finding):
    problems = await check_env(env, TASK)
    assert any(problem.startswith(finding) for problem in problems), problems


async def test_infrastructure_is_not_the_environments_fault():
    class Dead(GuessEnv):
        async def step(self, message):
            raise SandboxError("gone")

    with pytest.raises(SandboxError, match="gone"):
        await check_env(Dead, TASK)
