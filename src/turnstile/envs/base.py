"""The environment protocol: what an agent acts in.

An environment is made once per episode, by calling its kind with its knobs. It never sees tokens: it takes
the agent's `Message` (whose `tool_calls` a parser has read) and answers with messages. It *measures*; rewards
judge, later, from what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from turnstile.types import JSON, Message, Stop, Task, ToolSpec, Trajectory

Rates = Mapping[str, Callable[[Trajectory], bool]]
"""Name -> whether an episode reached it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The opening of an episode."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The answer to one action.

    `terminated`: the task came to its own end; `submitted`: that end was the agent's own word; `truncated`:
    the environment cut the episode short. `rewards` are step rewards by term, if the environment has any of
    its own; `signals` is what it recorded of this turn, for rewards to judge.
    """

    messages: tuple[Message, ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)
    terminated: bool = False
    submitted: bool = False
    truncated: bool = False
    signals: Mapping[str, JSON] = field(default_factory=dict)


@runtime_checkable
class Env(Protocol):
    """One episode's world. All methods may raise InfrastructureError; nothing else is caught for them.

    Its class may also have three attributes:

    - `rates: Rates`, the shares of episodes that its runs log (as rate/NAME) and its evaluations compare, in the order
      in which an episode reaches them; the last one is what a task is about. They judge an episode once, after
      `measure`. The default is `resolution`, if `measure` records the signal `resolved`.
    - `default_terms`, the [[rewards.terms]] of a recipe that has none, as tables;
    - `notes: tuple[str, ...]`, sentences without which a reader of a run's report would misread its figures.
    """

    async def reset(self, task: Task) -> Start: ...

    async def step(self, message: Message) -> Step: ...

    async def measure(self) -> Mapping[str, JSON]:
        """Return the measurements of the episode; called once at its end, also if a limit stopped it."""
        ...

    def state_key(self) -> str:
        """Return a name for the state in which the next action is taken: equal keys, equal states; "" if unknown."""
        ...

    async def close(self) -> None: ...


def resolved(trajectory: Trajectory) -> bool:
    """Return whether the task came to its own end and was solved, by the signal `resolved`."""
    return trajectory.stop in (Stop.SUBMITTED, Stop.DONE) and bool(trajectory.signals.get("resolved", False))


DEFAULT_RATES: Rates = {"resolution": resolved}


def rates_of(env: object) -> Rates:
    """Return the rates of an environment or of its class, `DEFAULT_RATES` if it names none."""
    found: Rates | None = getattr(env, "rates", None)
    return DEFAULT_RATES if found is None else found


def reached_rates(env: object, trajectory: Trajectory) -> dict[str, bool]:
    """Return which rates of its environment an episode reached, by name."""
    rates = rates_of(env)
    if rates is DEFAULT_RATES and "resolved" not in trajectory.signals:
        return {}
    return {name: bool(holds(trajectory)) for name, holds in rates.items()}
