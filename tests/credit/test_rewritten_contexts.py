"""Episodes whose context was rewritten (summaries, folds): several training rows, one attempt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from made_groups import attempt, by_turn, group_of, score
from turnstile.batching import weights
from turnstile.batching.forest import pack_prefix_trees
from turnstile.batching.rows import by_turn as back_to_turns
from turnstile.batching.rows import rows_of
from turnstile.credit.base import Advantages
from turnstile.credit.samples import with_observations
from turnstile.credit.segments import segments
from turnstile.types import F32, Group, Row, Trajectory


def rewritten(trajectory: Trajectory, *at: int) -> Trajectory:
    """The same turns, the context being made anew before those at `at`: a task of three tokens and a summary."""

    def summary(turn: int) -> np.ndarray:
        return np.array([3, 3, 3, 50 + turn], dtype=np.int32)

    turns = [
        replace(turn, fresh=True, context_ids=summary(k)) if k in at else turn
        for k, turn in enumerate(trajectory.turns)
    ]
    return replace(trajectory, turns=tuple(turns))


# A is three segments, B one, C two of its one and two turns
PLAIN = (attempt(0, [2, 1, 1]), attempt(1, [1, 2]), attempt(2, [1, 1, 1]))
FOLDED = group_of(rewritten(PLAIN[0], 1, 2), PLAIN[1], rewritten(PLAIN[2], 1))
SCORES = [[score(1.0, [0, 0, 0]), score(0.0, [0, 0]), score(0.0, [0, 0, 0])]]


def rows(group: Group, advantages: Advantages) -> list[list[Row]]:
    return [rows_of(t, turns) for t, turns in zip(group.trajectories, advantages, strict=True)]


def test_an_episode_is_a_row_for_each_of_its_contexts() -> None:
    found = rows(FOLDED, segments([FOLDED], SCORES))
    assert [len(own) for own in found] == [3, 1, 2]
    assert [row.origin for row in found[0]] == [("g", 0)] * 3
    assert [np.unique(row.turn_ids[row.loss_mask]).tolist() for own in found for row in own] == [
        [0], [1], [2], [0, 1], [0], [1, 2],
    ]  # fmt: skip


def test_all_segments_share_their_trajectorys_advantage() -> None:
    """Mean and deviation are of three attempts, 1/3 and 1/sqrt(3); of six rows they would be 1/2 and sqrt(3/10)."""
    advantages = segments([FOLDED], SCORES, eps=0.0)
    expected = [2 / 3 * 3**0.5, -1 / 3 * 3**0.5, -1 / 3 * 3**0.5]
    for own, value in zip(rows(FOLDED, advantages), expected, strict=True):
        for row in own:
            assert row.advantages[row.loss_mask] == pytest.approx(value)
            assert not row.advantages[~row.loss_mask].any()


def test_a_rewritten_context_changes_no_advantage() -> None:
    plain = group_of(*PLAIN)
    longer = group_of(*(with_observations(t, extra=4) for t in FOLDED.trajectories))
    for knobs in ({}, {"process": 0.5, "low": -1.0, "high": 2.0}):
        scores = [[score(1.0, [0.5, 0, 1]), score(0.0, [0, 1]), score(0.0, [0, 0, 0.25])]]
        expected = by_turn(segments([plain], scores, **knobs))  # type: ignore[arg-type]
        for group in (FOLDED, longer):
            assert by_turn(segments([group], scores, **knobs)) == expected  # type: ignore[arg-type]


def test_folds_are_judged_turn_by_turn_across_rows() -> None:
    # with process rewards, cut to [0, 1]: 1 1/2 0 | 1/4 0 | 0 0 1. Outcomes 1, 0, 0: mean 1/3, deviation 1/sqrt(3)
    scores = [[score(1.0, [0, -0.5, -2]), score(0.0, [0.25, -1]), score(0.0, [0, 0, 3])]]
    advantages = segments([FOLDED], scores, process=1.0, eps=0.0)
    wanted = [[1, 0.5, 0], [0.25, 0], [0, 0, 1]]
    found = rows(FOLDED, advantages)
    assert by_turn(advantages) == [pytest.approx([(v - 1 / 3) * 3**0.5 for v in own]) for own in wanted]
    assert found[0][1].advantages[found[0][1].loss_mask] == pytest.approx((0.5 - 1 / 3) * 3**0.5)
    for trajectory, own in zip(FOLDED.trajectories, found, strict=True):  # and back from rows to turns
        again = back_to_turns(trajectory, own, [row.advantages for row in own])
        assert [values[0] for values in again] == pytest.approx([v[0] for v in advantages[trajectory.attempt]])


def gradient(group: Group, share: str) -> tuple[F32, list[int]]:
    """Of a step by each sampled token's log-probability, and the rows of each attempt."""
    owned = rows(group, segments([group], SCORES))
    flat = [row for own in owned for row in own]
    made: Sequence[F32] = {"trajectory": weights.trajectory, "token": weights.token, "turn": weights.turn}[share](flat)
    (batch,) = pack_prefix_trees(flat, made, budget=4096)
    logprobs = torch.zeros(len(batch.target), requires_grad=True)
    (-batch.advantages * logprobs * batch.weights).sum().backward()
    assert logprobs.grad is not None
    return logprobs.grad.numpy(), [len(own) for own in owned]


@pytest.mark.parametrize("share", ["trajectory", "token", "turn"])
def test_rewriting_gives_no_attempt_more_weight(share: str) -> None:
    """An attempt of three rows moves its tokens as far as the same attempt in one row."""
    folded, of_folded = gradient(FOLDED, share)
    plain, of_plain = gradient(group_of(*PLAIN), share)
    assert (of_folded, of_plain) == ([3, 1, 2], [1, 1, 1])
    np.testing.assert_allclose(folded, plain, rtol=1e-6)
    assert np.abs(plain).min() > 0
