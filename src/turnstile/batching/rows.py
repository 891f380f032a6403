"""Turn trajectories into training rows, which hold exactly the token ids of the episode and mark the trained ones."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from turnstile.types import F32, I32, Row, Trajectory, Turn


def rows_of(trajectory: Trajectory, advantages: Sequence[F32]) -> list[Row]:
    """Return the rows of a trajectory; a new row begins at each turn whose context was rewritten.

    `advantages` holds one f32[n] for each turn, for its sampled tokens. The loss mask excludes prompt and observation
    tokens (whose advantages are zero), the tokens of untrainable turns, and tokens that a regex or a grammar forced. A
    trajectory without turns has no rows. Raises ValueError if there is not one array of advantages for each turn, or if
    a row was sampled at several temperatures.
    """
    if len(advantages) != len(trajectory.turns):
        raise ValueError(f"{len(trajectory.turns)} turns but advantages for {len(advantages)}")
    starts = [k for k, turn in enumerate(trajectory.turns) if k == 0 or turn.fresh]
    spans = itertools.pairwise([*starts, len(trajectory.turns)])
    return [_build_row(trajectory, advantages, begin, end) for begin, end in spans]


def _build_row(trajectory: Trajectory, advantages: Sequence[F32], begin: int, end: int) -> Row:
    """Return the row of turns begin..end-1, of which only the first may have a rewritten context."""
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
        temperature=_shared_temperature(turns),
    )


def _fill(like: I32, value: float | bool) -> np.ndarray:
    return np.full(len(like), value)


def _trained_mask(turn: Turn) -> np.ndarray:
    """Return the mask bool[n] of the sampled tokens that are trained."""
    return turn.completion.chosen & turn.trainable


def _concat(pieces: Sequence[tuple[np.ndarray, np.ndarray]], dtype: type) -> np.ndarray:
    """Return the context and sampled parts of all turns in one array of the given dtype."""
    return np.concatenate([part for piece in pieces for part in piece]).astype(dtype)


def _shared_temperature(turns: Sequence[Turn]) -> float:
    """Return the temperature at which all turns of a row were sampled. Raises ValueError if they differ."""
    temperatures = {turn.completion.sampling.temperature for turn in turns}
    if len(temperatures) != 1:
        raise ValueError(f"one row was sampled at several temperatures: {sorted(temperatures)}")
    return temperatures.pop()


def by_turn(trajectory: Trajectory, rows: Sequence[Row], values: Sequence[F32]) -> list[F32]:
    """Split the rows' per-token `values` f32[L] into one f32[n] for each turn of the trajectory.

    This is the inverse of `rows_of`. Turns that are in none of the rows get zeros.
    """
    turns = [np.zeros(len(turn.completion.token_ids), np.float32) for turn in trajectory.turns]
    for row, array in zip(rows, values, strict=True):
        for k in np.unique(row.turn_ids[row.turn_ids >= 0]):
            turns[k] = array[row.turn_ids == k].astype(np.float32)
    return turns
