"""Tabular decision processes: states, actions of one to three tokens, random transitions, rewards.

The policy only sees a state's `view`, so it cannot tell apart two states with the same view. `key` is the state that an
environment would report (`Turn.state_key`); it is never the history and need not be the full state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

State = tuple[Any, ...]
Menu = tuple[tuple[int, ...], ...]
"""The actions of a state, each as its tokens; none is a prefix of another."""

THREE: Menu = ((0,), (1, 0), (1, 1))
"""Three actions, with one, two and two tokens."""
SOLO = "agent"


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """One possible result of an action. If `state` is None, the episode is over, with `outcome` by agent."""

    chance: float = 1.0
    reward: float = 0.0  # the step reward of this turn
    state: State | None = None
    outcome: Mapping[str, float] | None = None


def goes_on(state: State, reward: float = 0.0, chance: float = 1.0) -> Branch:
    """Return a branch to `state` that has the probability `chance`."""
    return Branch(chance=chance, reward=reward, state=state)


def ends(outcome: float, reward: float = 0.0, chance: float = 1.0) -> Branch:
    """Return a branch that ends the episode with `outcome` and has the probability `chance`."""
    return Branch(chance=chance, reward=reward, outcome={SOLO: outcome})


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A process with a finite number of paths. Each start is one task.

    `step` takes a state and the index of an action in the state's menu.
    """

    name: str
    starts: tuple[State, ...]
    menu: Callable[[State], Menu]
    step: Callable[[State, int], tuple[Branch, ...]]
    view: Callable[[State], str]
    key: Callable[[State], str]
    seat: Callable[[State], str] = lambda state: SOLO
    tag: Callable[[State, int], str] = lambda state, action: "act"  # the kind of turn that an action makes
    potential: Callable[[State], float] = lambda state: 0.0  # how close a state is to success, for shaping rewards
    subgoal: Callable[[State], str] = lambda state: ""  # what a planning agent would name as its current subgoal
    knobs: Mapping[str, Any]
