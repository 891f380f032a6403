"""Step rewards for events: declared intentions, states visited for the first time, and automata over events."""

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
    """Return the reward of each turn's declared tag, f32[K], 0 if it is not in `rewards` (RLVMR, arXiv 2507.22844).

    The tag (planning, exploring, reflecting ...) is what the environment or the parser recorded as the turn's `signal`.
    Raises ConfigError if a turn did not record one.
    """
    found = [rewards.get(str(turn_signal(turn, signal, "tags")), 0.0) for turn in trajectory.turns]
    return np.array(found, dtype=np.float32)


def novelty(task: Task, trajectory: Trajectory, *, form: Literal["first", "count"] = "first") -> F32:
    """Return a reward for each turn that leads to a state new to the episode, f32[K].

    With `first` it is 1 if the state is visited for the first time, else 0. With `count` it is 1/sqrt(n) at the nth
    visit (the episodic count of RIDE, arXiv 2002.12292). States are identified by the environment's `state_key`. The
    initial state counts as visited before the first turn. A turn gets 0 if the state after it has no key or, like that
    after the last turn, is unknown.
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
    """Return the rewards of an automaton that reads one event per turn, f32[K] (Toro Icarte et al. 2018).

    `states[state][event] = [next state, reward]`. The event is the turn's `signal`; one that the state does not name
    changes nothing and gives 0. The automaton can require an order of events, and pays for a transition each time it
    is taken. In a recipe:

        [rewards.terms.states]
        start = { tests = ["seen", 0.1] }
        seen = { edit = ["edited", 0.1] }
        edited = { tests = ["done", 0.3] }

    Raises ConfigError for a table of another form, or if a turn did not record the signal.
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
