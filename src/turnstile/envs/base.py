"""What the agent acts in: the environment protocol.

An environment is made once per episode, by calling its kind with its knobs. It never sees tokens: it takes
the agent's `Message` (whose `tool_calls` a parser has read) and answers with messages. It *measures*; rewards
judge, later, from what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from turnstile.types import JSON, Message, Task, ToolSpec


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
    """One episode's world. All methods may raise InfrastructureError; nothing else is caught for them."""

    async def reset(self, task: Task) -> Start: ...

    async def step(self, message: Message) -> Step: ...

    async def measure(self) -> Mapping[str, JSON]:
        """What came of the episode, called once at its end, also when a limit stopped it."""
        ...

    def state_key(self) -> str:
        """A name for the state the next action is taken in: equal keys mean equal states. "" if unknown."""
        ...

    async def close(self) -> None: ...
