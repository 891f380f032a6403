"""A guessing game answered with "higher" and "lower", in which even a tiny model learns within seconds."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import PositiveInt

from turnstile.envs.base import Rates, Start, Step, resolved
from turnstile.errors import ConfigError
from turnstile.tasks.demonstration import Agent, DemoStep, call
from turnstile.types import JSON, Message, Task, ToolSpec


def guess_tasks(count: int, *, seed: int = 0) -> list[Task]:
    """Return `count` games, each with its own secret."""
    draw = random.Random(f"guess/{seed}")
    return [Task(id=f"guess-{seed}-{i}", env="guess", seed=draw.getrandbits(31)) for i in range(count)]


def demonstrate(
    task: Task, rng: random.Random, *, low: int = 1, high: int = 15, rounds: PositiveInt = 5
) -> list[DemoStep]:
    """Return a game whose guesses `rng` draws from the range that the answers still allow. It may end without a win."""
    secret = _secret(task, low, high)
    steps: list[DemoStep] = []
    while len(steps) < rounds:
        number = rng.randint(low, high)
        steps.append(DemoStep(message=call("guess", number=number)))
        if number == secret:
            break
        low, high = (number + 1, high) if number < secret else (low, number - 1)
    return steps


def oracle(task: Task, *, low: int = 1, high: int = 15) -> Agent:
    """Return an agent that always halves the remaining range, which finds the secret in the fewest guesses at worst."""
    secret = _secret(task, low, high)

    def act(observation: Sequence[Message]) -> Message:
        nonlocal low, high
        number = (low + high) // 2
        if number != secret:
            low, high = (number + 1, high) if number < secret else (low, number - 1)
        return call("guess", number=number)

    return act


def random_agent(task: Task, rng: random.Random, *, low: int = 1, high: int = 15) -> Agent:
    """Return an agent that guesses any number in the range, regardless of the answers."""
    return lambda observation: call("guess", number=rng.randint(low, high))


def _secret(task: Task, low: int, high: int) -> int:
    return int(task.data.get("secret", random.Random(task.seed).randint(low, high)))


class GuessEnv:
    """A game with a secret from `low` to `high`, drawn by the task's seed (or `data["secret"]`), and `rounds` tries.

    Anything but a guess in the range also costs a round. Turn signals: parsed, command, succeeded (a number in the
    range), consistent (a guess that the answers so far allow), answer. Episode signals: resolved and submitted (the
    secret was found), modified (a valid guess was made), rounds.
    """

    rates: ClassVar[Rates] = {"resolution": resolved}
    default_terms: ClassVar[Sequence[Mapping[str, Any]]] = ({"kind": "signal", "name": "resolved", "level": 1},)

    def __init__(self, *, low: int = 1, high: int = 15, rounds: PositiveInt = 5) -> None:
        if low > high or rounds < 1:
            raise ConfigError(f"guess needs low <= high and a round at least, got {low}, {high} and {rounds} rounds")
        self._low, self._high, self._rounds = low, high, rounds
        self._tools = (
            ToolSpec(
                name="guess",
                description=f"Guess a number from {low} to {high}.",
                schema={"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
            ),
        )

    async def reset(self, task: Task) -> Start:
        self._task = task
        self._secret = _secret(task, self._low, self._high)
        self._least, self._most = self._low, self._high  # the range that the answers so far allow
        self._used, self._guessed, self._found = 0, False, False
        prompt = f"Find the number from {self._low} to {self._high}."
        return Start(messages=(Message(role="user", content=prompt),), tools=self._tools)

    async def step(self, message: Message) -> Step:
        """Answer whether the secret is higher, lower or found. Only the first call of a message counts."""
        self._used += 1
        call = message.tool_calls[0] if message.tool_calls else None
        number = call.arguments.get("number") if call is not None and call.name == "guess" else None
        valid, consistent, answer = False, False, f"guess from {self._low} to {self._high}"
        if isinstance(number, int) and not isinstance(number, bool) and self._low <= number <= self._high:
            valid, consistent = True, self._least <= number <= self._most
            answer = self._answer(number)
        signals: dict[str, JSON] = {
            "parsed": call is not None,
            "command": "" if call is None else call.name,
            "succeeded": valid,
            "consistent": consistent,
            "answer": answer,
        }
        reply = Message(role="user", content=answer)
        if call is not None:
            reply = Message(role="tool", content=answer, tool_call_id=call.id)
        over = self._used >= self._rounds and not self._found
        return Step(messages=(reply,), terminated=self._found, submitted=self._found, truncated=over, signals=signals)

    async def measure(self) -> Mapping[str, JSON]:
        return {
            "resolved": self._found,
            "submitted": self._found,
            "modified": self._guessed,
            "rounds": self._used,
        }

    def state_key(self) -> str:
        """Return the task's id, the range that the answers leave, and the number of rounds used, as one string."""
        return f"{self._task.id}:{self._least}-{self._most}:{self._used}"

    async def close(self) -> None:
        """Do nothing, since there is nothing to release."""

    def _answer(self, number: int) -> str:
        self._guessed = True
        if number == self._secret:
            self._found, self._least, self._most = True, number, number
            return "right"
        if number < self._secret:
            self._least = max(self._least, number + 1)
            return "higher"
        self._most = min(self._most, number - 1)
        return "lower"
