"""The environment protocol, which defines what an agent acts in.

An environment is made once per episode, by calling its kind with its knobs. It never sees tokens: it receives the
agent's `Message` (with the `tool_calls` that a parser found) and answers with messages. It only *measures*; rewards
judge later, from the measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from turnstile.types import JSON, Message, Stop, Task, ToolSpec, Trajectory

Rates = Mapping[str, Callable[[Trajectory], bool]]
"""Functions that say whether an episode reached a rate, by the rate's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The opening of an episode."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The answer to one action.

    `terminated`: the task reached its own end; `submitted`: the agent ended it by submitting; `truncated`: the
    environment cut the episode short. `rewards` are step rewards by term, if the environment has any of its own.
    `signals` is what it recorded in this turn, for rewards to judge.
    """

    messages: tuple[Message, ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)
    terminated: bool = False
    submitted: bool = False
    truncated: bool = False
    signals: Mapping[str, JSON] = field(default_factory=dict)


@runtime_checkable
class Env(Protocol):
    """The environment of one episode. All methods may raise InfrastructureError; other errors are program errors.

    Its class may also have three attributes:

    - `rates: Rates`, the shares of episodes that its runs log (as rate/NAME) and its evaluations compare, in the order
      in which an episode reaches them; the last one is the task's actual goal. They are evaluated once per episode,
      after `measure`. The default is `resolution`, if `measure` records the signal `resolved`;
    - `default_terms`, the [[rewards.terms]] of a recipe that has none, as tables;
    - `notes: tuple[str, ...]`, sentences without which a reader of a run's report would misread its figures.
    """

    async def reset(self, task: Task) -> Start: ...

    async def step(self, message: Message) -> Step: ...

    async def measure(self) -> Mapping[str, JSON]:
        """Return the measurements of the episode. Called once at its end, even if a limit stopped it."""
        ...

    def state_key(self) -> str:
        """Return a key for the current state: equal keys mean equal states, and "" means that it is unknown."""
        ...

    async def close(self) -> None: ...


def resolved(trajectory: Trajectory) -> bool:
    """Return whether the task reached its own end and was solved, according to the signal `resolved`."""
    return trajectory.stop in (Stop.SUBMITTED, Stop.DONE) and bool(trajectory.signals.get("resolved", False))


DEFAULT_RATES: Rates = {"resolution": resolved}


def rates_of(env: object) -> Rates:
    """Return the rates of an environment or its class, or `DEFAULT_RATES` if it defines none."""
    found: Rates | None = getattr(env, "rates", None)
    return DEFAULT_RATES if found is None else found


def reached_rates(env: object, trajectory: Trajectory) -> dict[str, bool]:
    """Return whether an episode reached each rate of its environment, by name.

    Empty if the environment defines no rates and did not record `resolved`.
    """
    rates = rates_of(env)
    if rates is DEFAULT_RATES and "resolved" not in trajectory.signals:
        return {}
    return {name: bool(holds(trajectory)) for name, holds in rates.items()}
