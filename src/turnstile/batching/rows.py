"""Turn trajectories into training rows: exactly the sampled tokens, with the trained ones marked."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from turnstile.types import F32, I32, Row, Trajectory, Turn


def rows_of(trajectory: Trajectory, advantages: Sequence[F32]) -> list[Row]:
    """Return the rows of one trajectory: one, plus one for each later turn whose context was rewritten.

    `advantages` is [turn] -> f32[n], for the sampled tokens. Prompt and observation tokens carry zeros and are masked,
    as are the tokens of turns that are not trainable, and those that a regex or a grammar forced. A trajectory without
    turns has no row. Raises ValueError if turns and advantages do not match.
    """
    if len(advantages) != len(trajectory.turns):
        raise ValueError(f"{len(trajectory.turns)} turns but advantages for {len(advantages)}")
    starts = [k for k, turn in enumerate(trajectory.turns) if k == 0 or turn.fresh]
    spans = itertools.pairwise([*starts, len(trajectory.turns)])
    return [_row(trajectory, advantages, begin, end) for begin, end in spans]


def _row(trajectory: Trajectory, advantages: Sequence[F32], begin: int, end: int) -> Row:
    """Return the row of turns begin..end-1, between which the context was never rewritten."""
    turns = trajectory.turns[begin:end]
    pieces = list(zip(range(begin, end), turns, advantages[begin:end], strict=True))
    return Row(
        token_ids=_concat([(t.context_ids, t.completion.token_ids) for t in turns], np.int32),
        loss_mask=_concat([(_fill(t.context_ids, False), _trained_mask(t)) for t in turns], bool),
        logprobs=_concat([(_fill(t.context_ids, 0), t.completion.logprobs) for t in turns], np.float32),
        advantages=_concat([(_fill(t.context_ids, 0), a) for _, t, a in pieces], np.float32),
        turn_ids=_concat(
            [(_fill(t.context_ids, -1), _fill(t.completion.token_ids, k)) for k, t, _ in pieces], np.int32
        ),
        versions=_concat([(_fill(t.context_ids, 0), t.completion.versions) for t in turns], np.int32),
        origin=trajectory.key,
        temperature=_temperature(turns),
    )


def _fill(like: I32, value: float | bool) -> np.ndarray:
    return np.full(len(like), value)


def _trained_mask(turn: Turn) -> np.ndarray:
    """Return which of the sampled tokens are trained, bool[n]."""
    return turn.completion.chosen & turn.trainable


def _concat(pieces: Sequence[tuple[np.ndarray, np.ndarray]], dtype: type) -> np.ndarray:
    """Concatenate the context and sampled parts of all turns."""
    return np.concatenate([part for piece in pieces for part in piece]).astype(dtype)


def _temperature(turns: Sequence[Turn]) -> float:
    """Return the temperature of all turns of a row. Raises ValueError if they differ."""
    temperatures = {turn.completion.sampling.temperature for turn in turns}
    if len(temperatures) != 1:
        raise ValueError(f"one row was sampled at several temperatures: {sorted(temperatures)}")
    return temperatures.pop()


def by_turn(trajectory: Trajectory, rows: Sequence[Row], values: Sequence[F32]) -> list[F32]:
    """Split per-token arrays f32[L] of rows into [turn] -> f32[n]; the inverse of `rows_of`.

    Turns that are in none of the rows get zeros.
    """
    turns = [np.zeros(len(turn.completion.token_ids), np.float32) for turn in trajectory.turns]
    for row, array in zip(rows, values, strict=True):
        for k in np.unique(row.turn_ids[row.turn_ids >= 0]):
            turns[k] = array[row.turn_ids == k].astype(np.float32)
    return turns
