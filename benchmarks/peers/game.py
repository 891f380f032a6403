"""The game that both sides of `vs_trl.py` play, and what an episode of it is worth. Needs no torch.

Numbers of six digits, so that turns have equal lengths and no episode finds the secret and ends early.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from turnstile.envs.base import Start, Step
from turnstile.envs.guess import GuessEnv
from turnstile.types import JSON, Message, Task, ToolSpec

T = TypeVar("T")
LOW, HIGH = 100_000, 999_999
TURN_TOKENS = 64  # at most, of one turn
TEMPERATURE = 0.6  # at 1 one call in fifty is not a valid call, and ends its episode early; now one in two thousand
ATTEMPTS = 8  # episodes a group
WARM_UP_ROUNDS = 0  # of the step before the one that counts: a turn for each episode
LEARNING_RATE = 1e-6
TOOL = ToolSpec(
    name="guess",
    description="Guess a number from 100000 to 999999.",
    schema={
        "type": "object",
        "properties": {"number": {"type": "integer", "description": "The number."}},
        "required": ["number"],
    },
)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How much a step plays and what it trains. A round is a tool's answer: with `rounds` of them an episode has one
    turn more, whose call gets no answer."""

    episodes: int
    rounds: int
    train: str = "all"  # all weights, the last layers ("top") or adapters ("lora")
    top_layers: int = 6
    lora_rank: int = 16
    rows: int = 8  # trained at once by a side that takes them one by one
    budget: int = 4096  # tokens trained at once by a side that takes them as a tree

    @property
    def top(self) -> int:
        """The last layers, where they are all that learns."""
        return self.top_layers if self.train == "top" else 0

    @property
    def groups(self) -> int:
        return self.episodes // ATTEMPTS

    @property
    def turns(self) -> int:
        """Of a step whose episodes all come to their end."""
        return self.episodes * (self.rounds + 1)

    @property
    def long(self) -> bool:
        """Whether a step is so long that warming up with another one is not worth its minutes."""
        return self.episodes * self.rounds > 64

    @property
    def context(self) -> int:
        """Tokens that an episode fits into."""
        return 400 + self.rounds * (TURN_TOKENS + 32)


class Game(GuessEnv):
    """GuessEnv with the tool's schema as the other side writes it, and a worth measured at the end."""

    def __init__(self, *, rounds: int) -> None:
        super().__init__(low=LOW, high=HIGH, rounds=rounds + 1)
        self._consistent: list[bool] = []
        self._numbers: list[int] = []

    async def reset(self, task: Task) -> Start:
        self._consistent, self._numbers = [], []
        return replace(await super().reset(task), tools=(TOOL,))

    async def step(self, message: Message) -> Step:
        number = message.tool_calls[0].arguments.get("number") if message.tool_calls else None
        self._numbers.append(number if isinstance(number, int) else 0)
        step = await super().step(message)
        self._consistent.append(bool(step.signals["consistent"]))
        return step

    async def measure(self) -> Mapping[str, JSON]:
        return {**await super().measure(), "worth": self.worth}

    @property
    def worth(self) -> float:
        """The share of guesses that the answers allowed, and a last digit that only equal episodes have in common, so
        that no group of attempts is all of one worth and left out of the training."""
        share = sum(self._consistent) / max(1, len(self._consistent))
        return share + sum(place * number for place, number in enumerate(self._numbers, 1)) % 9973 / 1e6


def at_once(waiting: Coroutine[Any, Any, T]) -> T:
    """What a coroutine that waits for nothing returns, where there is no event loop."""
    try:
        waiting.send(None)
    except StopIteration as end:
        found: T = end.value
        return found
    raise RuntimeError("the game waited for something")
