"""Rows and mini-batches of judged groups, against hand-computed ones."""

from __future__ import annotations

import numpy as np
import pytest

from episodes import f32, group, i32, score, turn
from turnstile.batching.weights import token as token_weights
from turnstile.losses.reinforce import reinforce
from turnstile.trainer.learner import Learner, Objective
from turnstile.trainer.prepare import TrainingRows, prepare, split
from turnstile.trainer.step import per_group, update
from turnstile.types import F32, Row

ONE = turn(i32(1, 2), i32(11, 12))
TWO = turn(i32(3), i32(13))
MUTE = turn(i32(1, 2), i32(11), trainable=False)
FRESH = turn(i32(7, 8), i32(14), fresh=True)

GROUPS = [
    group("a", [ONE, TWO], [ONE]),
    group("b", [ONE], [ONE]),  # all advantages are 0
    group("c", [MUTE], [ONE, FRESH], [ONE]),  # the first has no trained token, the third is not in the gradient
]
SCORES = [[score(), score()], [score(), score()], [score(), score(), score(in_gradient=False)]]
ADVANTAGES = [
    [f32(1, 1), f32(1)],
    [f32(-1, -1)],
    [f32(0, 0)],
    [f32(0, 0)],
    [f32(3)],
    [f32(2, 2), f32(2)],
    [f32(0, 0)],
]


def origins(rows: list[Row]) -> list[tuple[str, int]]:
    return [row.origin for row in rows]


def test_drops_groups_without_advantages() -> None:
    prepared = prepare(GROUPS, SCORES, ADVANTAGES, drop_zero_advantage=True)
    assert [origins(rows) for rows in prepared.rows] == [[("a", 0), ("a", 1)], [("c", 1), ("c", 1)]]
    assert (prepared.groups, prepared.zero_advantage) == ([0, 2], 1)
    assert prepared.rows[0][0].advantages.tolist() == [0, 0, 1, 1, 0, 1]


def test_keeps_zero_advantage_groups_if_asked() -> None:
    prepared = prepare(GROUPS, SCORES, ADVANTAGES, drop_zero_advantage=False)
    assert [len(rows) for rows in prepared.rows] == [2, 2, 2]
    assert (prepared.groups, prepared.zero_advantage) == ([0, 1, 2], 0)


def test_groups_with_nothing_to_train() -> None:
    masked = [[score(in_gradient=False)] * 2]
    assert prepare(GROUPS[:1], masked, ADVANTAGES[:2], drop_zero_advantage=False) == TrainingRows([], [], 0)
    assert prepare(GROUPS[:1], masked, ADVANTAGES[:2], drop_zero_advantage=True).zero_advantage == 1


def test_skips_an_episode_without_turns() -> None:
    """A prompt that exceeds the context gives a graded episode without trained tokens."""
    groups = [group("a", [], [ONE])]
    prepared = prepare(groups, [[score(turns=0), score()]], [[], [f32(1, 1)]], drop_zero_advantage=True)
    assert [origins(rows) for rows in prepared.rows] == [[("a", 1)]]


def many(count: int) -> TrainingRows:
    """Groups of 1, 2, 3, 1, 2 ... rows."""
    groups = [group(str(g), *([[ONE]] * (g % 3 + 1))) for g in range(count)]
    scores = [[score() for _ in each.trajectories] for each in groups]
    advantages = [[f32(1, 2)] for each in groups for _ in each.trajectories]
    return prepare(groups, scores, advantages, drop_zero_advantage=True)


@pytest.mark.parametrize(
    ("groups", "parts", "sizes"),
    [(4, 1, [7]), (4, 2, [3, 4]), (4, 4, [1, 2, 3, 1]), (4, 9, [1, 2, 3, 1]), (5, 2, [3, 6]), (0, 3, [])],
)
def test_mini_batches_keep_groups_whole(groups: int, parts: int, sizes: list[int]) -> None:
    prepared = many(groups)
    batches = split(prepared, parts)
    assert [len(rows) for rows in batches] == sizes
    assert [row.origin for rows in batches for row in rows] == [row.origin for rows in prepared.rows for row in rows]
    homes = [{row.origin[0] for row in rows} for rows in batches]
    assert all(not one & other for i, one in enumerate(homes) for other in homes[:i])


OBJECTIVE = Objective(loss=reinforce, aggregation=token_weights)


class RecordingLearner(Learner):
    """A learner that records its calls; its weights and log-probabilities number them."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[str, int]]] = []
        self.frozen = 0

    def update(
        self, rows: list[Row], objective: Objective, activations: object = None, stored: object = None
    ) -> tuple[dict[str, float], list[F32], list[F32]]:
        self.calls.append(origins(rows))
        n = len(self.calls)
        report = {"loss/total": float(n), "tokens/rows": 10.0, "optim/grad_norm": 5.0 - n, "optim/skipped": n % 2.0}
        report["policy/logprob_gap"] = n / 10
        marks = [row.loss_mask * np.float32(n) for row in rows]
        return report, marks, [-mark for mark in marks]


def test_epochs_and_mini_batches() -> None:
    learner = RecordingLearner()
    prepared = prepare(GROUPS, SCORES, ADVANTAGES, drop_zero_advantage=True)
    trained = update(GROUPS, prepared, learner, OBJECTIVE, epochs=2, minibatches=2)
    first, second = [("a", 0), ("a", 1)], [("c", 1), ("c", 1)]
    assert learner.calls == [first, second, first, second]
    assert trained.metrics == {
        "loss/total": 2.5,
        "tokens/rows": 40.0,
        "optim/grad_norm": 4.0,
        "optim/skipped": 2.0,
        "policy/logprob_gap": 0.1,
    }
    # the arrays are those of the first epoch, by group, trajectory and turn; 0 for tokens that were not trained
    weights = [[[values.tolist() for values in turns] for turns in each] for each in trained.weights]
    assert weights == [[[[1, 1], [1]], [[1, 1]]], [[[0, 0]], [[0, 0]]], [[[0]], [[2, 2], [2]], [[0, 0]]]]
    assert trained.logprobs[2][1][1].tolist() == [-2]


def test_a_step_without_signal_updates_nothing() -> None:
    learner = RecordingLearner()
    trained = update(GROUPS[1:2], TrainingRows([], [], 1), learner, OBJECTIVE, epochs=1, minibatches=1)
    assert (learner.calls, trained.metrics) == ([], {})
    assert [len(turns) for turns in trained.weights[0]] == [1, 1]


def test_advantages_by_group() -> None:
    found = per_group(GROUPS, ADVANTAGES)
    assert [len(each) for each in found] == [2, 2, 3]
    assert found[2][1] is ADVANTAGES[5]
