"""Trajectories to rows and back, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from episodes import f32, i32, trajectory, turn
from turnstile.batching.rows import by_turn, rows_of

FIRST = turn(i32(1, 2, 3), i32(11, 12), version=4)
SECOND = turn(i32(4), i32(13), version=5)
THIRD = turn(i32(7, 8), i32(14, 15), fresh=True, version=6)


def test_one_row() -> None:
    (row,) = rows_of(trajectory(FIRST, SECOND), [f32(0.5, -0.5), f32(2.0)])
    assert row.token_ids.tolist() == [1, 2, 3, 11, 12, 4, 13]
    assert row.loss_mask.tolist() == [False, False, False, True, True, False, True]
    assert row.logprobs.tolist() == f32(0, 0, 0, -1.1, -1.2, 0, -1.3).tolist()
    assert row.advantages.tolist() == [0, 0, 0, 0.5, -0.5, 0, 2.0]
    assert row.turn_ids.tolist() == [-1, -1, -1, 0, 0, -1, 1]
    assert row.versions.tolist() == [0, 0, 0, 4, 4, 0, 5]
    assert row.origin == ("g", 0)
    assert row.temperature == 0.7
    dtypes = [getattr(row, name).dtype for name in ("token_ids", "loss_mask", "logprobs", "advantages", "turn_ids")]
    assert dtypes == [np.int32, np.bool_, np.float32, np.float32, np.int32]


def test_rewritten_context_starts_a_row() -> None:
    rows = rows_of(trajectory(FIRST, THIRD, SECOND), [f32(1, 1), f32(2, 2), f32(3)])
    assert [row.token_ids.tolist() for row in rows] == [[1, 2, 3, 11, 12], [7, 8, 14, 15, 4, 13]]
    assert [row.turn_ids.tolist() for row in rows] == [[-1, -1, -1, 0, 0], [-1, -1, 1, 1, -1, 2]]
    assert [row.origin for row in rows] == [("g", 0)] * 2


def test_first_turn_starts_a_row() -> None:
    assert len(rows_of(trajectory(THIRD, SECOND), [f32(0, 0), f32(0)])) == 1


def test_turns_that_are_not_trainable_are_masked() -> None:
    (row,) = rows_of(trajectory(replace(FIRST, trainable=False), SECOND), [f32(9, 9), f32(1)])
    assert row.loss_mask.tolist() == [False] * 6 + [True]
    assert row.turn_ids.tolist() == [-1, -1, -1, 0, 0, -1, 1]


def test_forced_tokens_are_masked() -> None:
    forced = replace(FIRST, completion=replace(FIRST.completion, forced=np.array([True, False])))
    (row,) = rows_of(trajectory(forced, SECOND), [f32(9, 8), f32(1)])
    assert row.loss_mask.tolist() == [False] * 4 + [True, False, True]
    (row,) = rows_of(trajectory(replace(forced, trainable=False), SECOND), [f32(9, 8), f32(1)])
    assert row.loss_mask.tolist() == [False] * 6 + [True]


def test_no_turns_no_rows() -> None:
    assert rows_of(trajectory(), []) == []


def test_rejects_mismatched_arrays() -> None:
    with pytest.raises(ValueError, match="2 turns but advantages for 1"):
        rows_of(trajectory(FIRST, SECOND), [f32(1, 1)])
    with pytest.raises(ValueError, match="row of 7 tokens has 6 advantages"):
        rows_of(trajectory(FIRST, SECOND), [f32(1), f32(1)])
    with pytest.raises(ValueError, match=r"several temperatures: \[0.7, 1.0\]"):
        rows_of(trajectory(FIRST, turn(i32(4), i32(13), temperature=1.0)), [f32(1, 1), f32(1)])


def test_by_turn_inverts_rows_of() -> None:
    played = trajectory(FIRST, THIRD, SECOND)
    advantages = [f32(1, 2), f32(3, 4), f32(5)]
    rows = rows_of(played, advantages)
    found = by_turn(played, rows, [row.advantages for row in rows])
    assert [values.tolist() for values in found] == [[1, 2], [3, 4], [5]]
    assert all(values.dtype == np.float32 for values in found)
    partly = by_turn(played, rows[1:], [rows[1].advantages])
    assert [values.tolist() for values in partly] == [[0, 0], [3, 4], [5]]
