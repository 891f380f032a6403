"""Step rewards for what happened: declared intentions, states met for the first time, and automata over events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from turnstile.errors import ConfigError
from turnstile.lookup import nearest
from turnstile.rewards.recorded import turn_signal
from turnstile.types import F32, Task, Trajectory


def tags(task: Task, trajectory: Trajectory, *, rewards: Mapping[str, float], signal: str = "tag") -> F32:
    """The reward of each turn's declared tag, f32[K]; 0 for a tag that is not in `rewards` (RLVMR, arXiv 2507.22844).

    The tag (planning, exploring, reflecting ...) is what the environment or the parser recorded as the turn's `signal`.
    Raises ConfigError if a turn did not record one.
    """
    found = [rewards.get(str(turn_signal(turn, signal, "tags")), 0.0) for turn in trajectory.turns]
    return np.array(found, dtype=np.float32)


def novelty(task: Task, trajectory: Trajectory, *, form: Literal["first", "count"] = "first") -> F32:
    """A reward for turns that lead to states new to the episode, f32[K].

    `first`: 1 if the state is met for the first time, else 0. `count`: 1/sqrt(n) if it is met for the nth time (the
    episodic count of RIDE, arXiv 2002.12292). The state is the environment's `state_key`. No turn led to the first one;
    the one after the last turn is unknown and gives 0, as does a state without a key.
    """
    if form not in ("first", "count"):
        raise ConfigError(f"reward 'novelty': form = {form!r} is not known; {nearest(str(form), ('first', 'count'))}")
    result = np.zeros(len(trajectory.turns), dtype=np.float32)
    met: Counter[str] = Counter(turn.state_key for turn in trajectory.turns[:1])
    for t, (_, reached) in enumerate(pairwise(trajectory.turns)):
        met[reached.state_key] += 1
        times = met[reached.state_key]
        if reached.state_key:
            result[t] = times**-0.5 if form == "count" else float(times == 1)
    return result


def reward_machine(
    task: Task,
    trajectory: Trajectory,
    *,
    states: Mapping[str, Mapping[str, Sequence[Any]]],
    start: str = "start",
    signal: str = "command",
) -> F32:
    """The rewards of an automaton that reads one event per turn, f32[K] (reward machines, Toro Icarte et al. 2018).

    `states[state][event] = [next state, reward]`; an event that a state does not name changes nothing and gives 0. The
    event is the turn's `signal`. So a reward can require an order of events, and pays for each transition as often as
    the automaton takes it. In a recipe:

        [rewards.terms.states]
        start = { tests = ["seen", 0.1] }
        seen = { edit = ["edited", 0.1] }
        edited = { tests = ["done", 0.3] }

    Raises ConfigError for a table of another shape, and if a turn did not record the signal.
    """
    for state, events in states.items():
        moves = events.items() if isinstance(events, Mapping) else [("", events)]
        for event, move in moves:
            if not event or not _is_move(move):
                raise ConfigError(
                    f"reward 'reward_machine': {state}.{event or 'EVENT'} = {move!r} is not [next state, reward]"
                )
    if states and start not in states:
        raise ConfigError(f"reward 'reward_machine': there is no state start = {start!r}; {nearest(start, states)}")
    result = np.zeros(len(trajectory.turns), dtype=np.float32)
    state = start
    for t, turn in enumerate(trajectory.turns):
        event = str(turn_signal(turn, signal, "reward_machine"))
        if event in states.get(state, {}):
            state, result[t] = states[state][event]
    return result


def _is_move(value: object) -> bool:
    return (
        isinstance(value, Sequence)
        and len(value) == 2
        and isinstance(value[0], str)
        and isinstance(value[1], int | float)
    )
