"""Synthetic groups, trajectories, scores and critic values, for checkers and tests. Arrays are read-only."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from turnstile.types import F32, Completion, Group, Message, Sampling, Score, Stop, Task, Trajectory, Turn


def sample_score(outcome: float, turn: F32) -> Score:
    """Return a synthetic score of one agent, whose total is the outcome plus the turn rewards."""
    turn.setflags(write=False)
    return Score(outcome={"agent": outcome}, turn=turn, total=outcome + float(turn.sum(dtype=np.float64)))


def sample_aux(groups: Sequence[Group]) -> dict[str, Any]:
    """Return synthetic predictions of auxiliary models for the groups, by name."""
    values = sample_values(groups)
    turns = [[turn.completion.chosen for turn in t.turns] for group in groups for t in group.trajectories]
    q, v = (
        [
            np.array([own[kept][end] for own, kept in zip(*each, strict=True)], dtype=np.float32)
            for each in zip(values, turns, strict=True)
        ]
        for end in (-1, 0)
    )
    return {"values": values, "implicit": values, "q": [1 + own for own in q], "v": v, "progress": v}


def sample_values(groups: Sequence[Group]) -> list[list[F32]]:
    """Return synthetic critic values, [trajectory][turn] -> f32[n].

    They depend only on group id, attempt, turn and token.
    """

    def one(group: Group, attempt: int, turn: int, n: int) -> F32:
        values = np.random.default_rng([zlib.crc32(group.id.encode()), attempt, turn]).normal(size=n).astype(np.float32)
        values.setflags(write=False)
        return values

    return [
        [one(g, t.attempt, k, len(turn.completion.token_ids)) for k, turn in enumerate(t.turns)]
        for g in groups
        for t in g.trajectories
    ]


def sample_group(rng: np.random.Generator, name: str, lengths: Sequence[int]) -> Group:
    """Return a synthetic group of trajectories with these numbers of turns.

    Each turn has one to four tokens, random entropies, and one of a few states and tags. The last trajectory shares its
    first turn with the first trajectory, from which it branches.
    """
    task = Task(id=f"task-{name}", env="check")
    trajectories = [_sample_signalled(rng, task, name, attempt, turns) for attempt, turns in enumerate(lengths)]
    shared = trajectories[0].turns[:1]
    trajectories[-1] = replace(trajectories[-1], turns=(*shared, *trajectories[-1].turns[1:]), parent=(0, 1, 0))
    return Group(id=name, task=task, trajectories=tuple(trajectories))


def _sample_signalled(rng: np.random.Generator, task: Task, group: str, attempt: int, turns: int) -> Trajectory:
    tokens = [int(n) for n in rng.integers(1, 5, size=turns)]
    plain = sample_trajectory(tokens, task=task.id, group=group, attempt=attempt)

    def with_signals(t: int, turn: Turn) -> Turn:
        entropies = rng.uniform(0.1, 2.0, size=tokens[t]).astype(np.float32)
        logprobs = -entropies[::-1]
        for array in (entropies, logprobs):
            array.setflags(write=False)
        return replace(
            turn,
            completion=replace(turn.completion, entropies=entropies, logprobs=logprobs),
            message=Message(role="assistant", content=f"act {rng.integers(2)}"),
            state_key=f"state {rng.integers(3) if t else 'first'}",
            signals={"tag": "plan" if rng.random() < 0.5 else "act", "subgoal": "find" if t < 2 else "mend"},
        )

    return replace(plain, turns=tuple(with_signals(t, turn) for t, turn in enumerate(plain.turns)))


def sample_trajectory(
    tokens: Sequence[int],
    *,
    task: str = "task",
    group: str = "g",
    attempt: int = 0,
    stop: Stop = Stop.DONE,
    signals: Mapping[str, Any] | None = None,
    turn_signals: Sequence[Mapping[str, Any]] | None = None,
) -> Trajectory:
    """Return a synthetic trajectory whose turn t has two context tokens and `tokens[t]` sampled tokens.

    Its arrays are read-only.
    """

    def turn(t: int, n: int) -> Turn:
        arrays = (
            np.full(2, 7, dtype=np.int32),
            np.arange(10 * t, 10 * t + n, dtype=np.int32),
            np.full(n, -0.5, dtype=np.float32),
            np.zeros(n, dtype=np.int32),
        )
        for array in arrays:
            array.setflags(write=False)
        context, ids, logprobs, versions = arrays
        return Turn(
            context_ids=context,
            completion=Completion(
                token_ids=ids,
                logprobs=logprobs,
                versions=versions,
                sampling=Sampling(),
                finish="stop",
                seconds=0.0,
            ),
            message=Message(role="assistant", content="act"),
            observation=(Message(role="user", content="seen"),),
            signals=dict(turn_signals[t]) if turn_signals else {},
        )

    return Trajectory(
        task_id=task,
        group=group,
        attempt=attempt,
        turns=tuple(turn(t, n) for t, n in enumerate(tokens)),
        stop=stop,
        signals=dict(signals or {}),
    )


def with_observations(trajectory: Trajectory, extra: int) -> Trajectory:
    """Return the trajectory with `extra` more context tokens before each turn, and one more message after it."""
    more = Message(role="user", content="more was seen")
    return replace(
        trajectory,
        turns=tuple(
            replace(
                turn,
                context_ids=np.concatenate([turn.context_ids, np.full(extra, 3, dtype=np.int32)]),
                observation=(*turn.observation, more),
            )
            for turn in trajectory.turns
        ),
    )


def with_untrained(trajectory: Trajectory, place: int, extra: int = 0) -> Trajectory:
    """Return the trajectory with turn `place` made untrained and `extra` tokens longer."""
    turn = trajectory.turns[place]
    return _with_turn(trajectory, place, replace(turn, completion=_longer(turn.completion, extra), trainable=False))


def with_forced(trajectory: Trajectory, place: int, extra: int) -> Trajectory:
    """Return the trajectory with `extra` more grammar-forced tokens at the end of turn `place`."""
    turn = trajectory.turns[place]
    completion = _longer(turn.completion, extra)
    forced = np.arange(len(completion.token_ids)) >= len(turn.completion.token_ids)
    return _with_turn(trajectory, place, replace(turn, completion=replace(completion, forced=forced)))


def _longer(completion: Completion, extra: int) -> Completion:
    """Return the completion with `extra` more tokens at its end."""

    def longer(array: Any, value: float) -> Any:
        return None if array is None else np.concatenate([array, np.full(extra, value, dtype=array.dtype)])

    return replace(
        completion,
        token_ids=longer(completion.token_ids, 5),
        logprobs=longer(completion.logprobs, -3.0),
        versions=longer(completion.versions, 0),
        entropies=longer(completion.entropies, 3.0),
    )


def _with_turn(trajectory: Trajectory, place: int, turn: Turn) -> Trajectory:
    return replace(trajectory, turns=(*trajectory.turns[:place], turn, *trajectory.turns[place + 1 :]))
