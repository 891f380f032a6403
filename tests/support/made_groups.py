"""Groups with states, entropies, tags, agents and branches, written down in a line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from turnstile.credit.base import Advantages
from turnstile.credit.samples import sample_trajectory
from turnstile.types import Group, Message, Score, Task, Trajectory, Turn


def attempt(
    number: int,
    tokens: Sequence[int],
    *,
    states: Sequence[str] = (),
    said: Sequence[str] = (),
    tags: Sequence[str] = (),
    agents: Sequence[str] = (),
    entropies: Sequence[Sequence[float]] = (),
    parent: tuple[int, int, int] | None = None,
    group: str = "g",
) -> Trajectory:
    plain = sample_trajectory(tokens, group=group, attempt=number)

    def told(t: int, turn: Turn) -> Turn:
        found: dict[str, Any] = {}
        if states:
            found["state_key"] = states[t]
        if said:
            found["message"] = Message(role="assistant", content=said[t])
        if tags:
            found["signals"] = {"tag": tags[t]}
        if agents:
            found["agent"] = agents[t]
        if entropies:
            found["completion"] = replace(turn.completion, entropies=np.array(entropies[t], dtype=np.float32))
        return replace(turn, **found)

    return replace(plain, parent=parent, turns=tuple(told(t, turn) for t, turn in enumerate(plain.turns)))


def group_of(*trajectories: Trajectory, name: str = "g", env: str = "e") -> Group:
    return Group(id=name, task=Task(id="t", env=env), trajectories=trajectories)


def score(outcome: float | Mapping[str, float], steps: Sequence[float] = (0.0,), **flags: bool) -> Score:
    by_agent = outcome if isinstance(outcome, Mapping) else {"agent": outcome}
    turn = np.array(steps, dtype=np.float32)
    return Score(outcome=by_agent, turn=turn, total=sum(by_agent.values()) + float(turn.sum()), **flags)


def nested(advantages: Advantages) -> list[list[list[float]]]:
    """[trajectory][turn][token]"""
    return [[values.tolist() for values in turns] for turns in advantages]


def by_turn(advantages: Advantages) -> list[list[float]]:
    """[trajectory][turn], where all tokens of a turn have the same."""
    for turns in advantages:
        assert all((values == values[0]).all() for values in turns)
    return [[float(values[0]) for values in turns] for turns in advantages]
