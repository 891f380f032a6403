"""Tabular decision processes: states, actions of one to three tokens, random transitions, rewards.

The policy only sees a state's `view`, so it cannot distinguish two states with one view; `key` is what the environment
would report as the state (`Turn.state_key`), which is never the history and need not be the full state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

State = tuple[Any, ...]
Menu = tuple[tuple[int, ...], ...]
"""The actions a state offers, each as its tokens; none is the beginning of another."""

THREE: Menu = ((0,), (1, 0), (1, 1))
"""Three actions, of one, two and two tokens."""
SOLO = "agent"


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """One possible result of an action. `state` None: the episode is over, with `outcome` by agent."""

    chance: float = 1.0
    reward: float = 0.0  # the step reward of this turn
    state: State | None = None
    outcome: Mapping[str, float] | None = None


def goes_on(state: State, reward: float = 0.0, chance: float = 1.0) -> Branch:
    """Return the branch that leads to `state`, taken with the probability `chance`."""
    return Branch(chance=chance, reward=reward, state=state)


def ends(outcome: float, reward: float = 0.0, chance: float = 1.0) -> Branch:
    """Return the branch that ends the episode with `outcome`, taken with the probability `chance`."""
    return Branch(chance=chance, reward=reward, outcome={SOLO: outcome})


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A process with a finite number of paths. One start is one task; `step` takes the index of an action."""

    name: str
    starts: tuple[State, ...]
    menu: Callable[[State], Menu]
    step: Callable[[State, int], tuple[Branch, ...]]
    view: Callable[[State], str]
    key: Callable[[State], str]
    seat: Callable[[State], str] = lambda state: SOLO
    tag: Callable[[State, int], str] = lambda state, action: "act"  # what kind of turn the action makes
    potential: Callable[[State], float] = lambda state: 0.0  # how near a state is to the end, for shaping rewards
    subgoal: Callable[[State], str] = lambda state: ""  # what is pursued there, as an agent that plans would name it
    knobs: Mapping[str, Any]
