"""Subgoals, continuations out of snapshots, and credit that knows what is usual, against numbers computed by hand."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from made_groups import attempt, by_turn, group_of, score
from turnstile.credit.aem import aem
from turnstile.credit.base import estimate
from turnstile.credit.empg import empg
from turnstile.credit.grpo import grpo
from turnstile.credit.lineage import snapshots
from turnstile.credit.normalised_process import normalised_process
from turnstile.credit.recalibrated import recalibrated
from turnstile.credit.rloo import rloo
from turnstile.credit.subgoal import subgoal
from turnstile.credit.turn_return import turn_return
from turnstile.credit.vine import vine
from turnstile.errors import ConfigError, TrainingError
from turnstile.types import Trajectory

FAILED = {"outcome": None, "in_baseline": False, "in_gradient": False}


def pair(*outcomes: float, name: str = "g") -> tuple[Any, list[Any]]:
    return group_of(*(attempt(i, [1], group=name) for i in range(len(outcomes))), name=name), [
        score(value) for value in outcomes
    ]


def test_recalibrated_remembers_means_of_groups() -> None:
    (one, first), (other, second) = pair(1.0, 0.0), pair(1.0, 1.0, name="h")
    found, state = recalibrated([one, other], [first, second], {"kept": 1})
    assert state == {"kept": 1, "recent": [0.5, 1.0]}  # median 3/4
    assert by_turn(found) == [[0.25], [0.0], [0.25], [0.25]]
    both, _ = recalibrated([one, other], [first, second], {}, positive=False)
    assert by_turn(both) == [[0.25], [-0.75], [0.25], [0.25]]
    again, later = recalibrated([one], [first], json.loads(json.dumps(state)), window=2)
    assert later["recent"] == [1.0, 0.5]
    assert by_turn(again) == [[0.25], [0.0]]
    assert state["recent"] == [0.5, 1.0]  # what was given is not written to


def test_recalibrated_compares_what_is_replayed_and_does_not_remember_it() -> None:
    group, scores = pair(3.0, 1.0, 0.0, 9.0)
    scores[3] = replace(scores[3], in_baseline=False)
    found, state = recalibrated([group], [scores], {}, over="trajectories")
    assert state["recent"] == [3.0, 1.0, 0.0]
    assert by_turn(found) == [[2.0], [0.0], [0.0], [8.0]]
    alone, nothing = recalibrated([group], [[replace(s, in_baseline=False) for s in scores]], {})
    assert by_turn(alone) == [[0.0]] * 4  # nobody to be compared with
    assert nothing["recent"] == []
    assert by_turn(recalibrated([group], [[replace(s, in_baseline=False) for s in scores]], state)[0])[0] == [2.0]


def test_recalibrated_leaves_what_is_played_now_to_its_group() -> None:
    group, scores = pair(3.0, 1.0, 2.0, 9.0)
    scores[3] = replace(scores[3], in_baseline=False)
    found, state = recalibrated([group], [scores], {}, over="trajectories", fresh="group")
    compared = grpo([group], [scores], of="outcome")
    assert by_turn(found)[:3] == by_turn(compared)[:3]
    assert by_turn(found)[3] == [7.0]  # against the median 2
    assert state["recent"] == [3.0, 1.0, 2.0]


def test_normalised_process_by_hand() -> None:
    # A solved: z = (r - 1/2) + 1/2 = .25, 1; B failed: z = r - 1 = -.5, 0
    g = group_of(attempt(0, [1, 1]), attempt(1, [1, 1]))
    scores = [[score(1.0, [0.25, 1.0]), score(0.0, [0.5, 1.0])]]
    own = {"baseline": "none", "gamma": 0.0}
    assert by_turn(normalised_process([g], scores, **own)) == [[0.25, 1.0], [-0.5, 0.0]]
    found = by_turn(normalised_process([g], scores, baseline="none", gamma=0.5))
    assert found == [[0.75, 1.0], [-0.5, 0.0]]
    found = by_turn(normalised_process([g], scores, gamma=0.5, scale="none"))  # means 1/8, 1/2
    assert found == [[0.625, 0.5], [-0.625, -0.5]]
    found = by_turn(normalised_process([g], scores, calibrate="product", baseline="none", gamma=0.5))
    assert found == [[0.25 + 0.5 * 2.0, 2.0], [0.0, 0.0]]
    assert by_turn(normalised_process([g], scores, middle=0.0, **own)) == [[1.25, 2.0], [0.5, 1.0]]


def test_without_calibration_it_is_the_turn_return() -> None:
    g = group_of(attempt(0, [2, 1]), attempt(1, [1, 1, 2]))
    scores = [[score(1.0, [0.25, 0.5]), score(0.0, [0.5, 0, 1])]]
    bare = normalised_process([g], scores, calibrate="none", gamma=0.9)
    assert by_turn(bare) == by_turn(turn_return([g], scores, gamma=0.9))


def pursuing(number: int, names: Sequence[str], *, done: Sequence[int] = ()) -> Trajectory:
    plain = attempt(number, [1] * len(names))
    signals = [{"subgoal": name, "subgoal_reached": t in done} for t, name in enumerate(names)]
    turns = [replace(turn, signals=own) for turn, own in zip(plain.turns, signals, strict=True)]
    return replace(plain, turns=tuple(turns))


def test_subgoal_by_hand() -> None:
    # A: find find mend, r = 1 0 2, R = 4, found it. B: find mend mend, r = 0 0 1, R = 0
    g = group_of(pursuing(0, ["find", "find", "mend"], done=[1]), pursuing(1, ["find", "mend", "mend"]))
    scores = [[score(4.0, [1, 0, 2]), score(0.0, [0, 0, 1])]]
    # high, gamma 1/2: A: 1 + 6/2 = 4, 6; B: 0 + 1/2, 1. Means 9/4, 7/2
    high = by_turn(subgoal([g], scores, omega=0.0, gamma=0.5, scale="none"))
    assert high == [[1.75, 1.75, 2.5], [-1.75, -2.5, -2.5]]
    # low, gamma 1/2: find: A 1 + 1/2, 1; B 0: mean 5/6. mend: A 2; B 1/2, 1: mean 7/6
    both = by_turn(subgoal([g], scores, omega=3.0, gamma=0.5, gamma_low=0.5, scale="none"))
    assert both[0] == pytest.approx([1.75 + 4.5 - 2.5, 1.75 + 3 - 2.5, 2.5 + 6 - 3.5])
    assert both[1] == pytest.approx([-1.75 - 2.5, -2.5 + 1.5 - 3.5, -2.5 + 3 - 3.5])


def test_subgoals_by_name_meet_wherever_they_stand() -> None:
    g = group_of(pursuing(0, ["find", "mend"]), pursuing(1, ["mend", "find", "mend"]))
    scores = [[score(1.0, [0, 0]), score(0.0, [0, 0, 0])]]
    # returns of segments: 1 1 | 0 0 0. find: 1, 0; mend: 1, 0, 0
    found = by_turn(subgoal([g], scores, among="name", scale="none"))
    assert found[0] == pytest.approx([1 / 2, 2 / 3])
    assert found[1] == pytest.approx([-1 / 3, -1 / 2, -1 / 3])


def test_without_subgoals_it_is_grpo() -> None:
    g = group_of(attempt(0, [2, 1]), attempt(1, [1, 1, 2]))
    scores = [[score(1.0, [0, 0.5]), score(0.0, [0, 0.25, 0])]]
    assert by_turn(subgoal([g], scores)) == by_turn(grpo([g], scores))


# 0 is a root of four turns. 1 and 2 left it before turn 2, 3 left 1 before turn 3. 4 is a root of its own.
FAMILY = group_of(
    attempt(0, [1, 1, 1, 1]),
    attempt(1, [1, 1, 1, 1], parent=(0, 2, 0)),
    attempt(2, [1, 1, 1], parent=(0, 2, 0)),
    attempt(3, [1, 1, 1, 1], parent=(1, 3, 0)),
    attempt(4, [1]),
)
PLAYED = [
    score(4.0, [1, 0, 0, 0]),
    score(2.0, [1, 0, 1, 0]),
    score(0.0, [1, 0, 0]),
    score(6.0, [1, 0, 1, 0]),
    score(2.0, [0]),
]


def test_snapshots_are_the_states_played_on_from() -> None:
    found = snapshots(FAMILY)
    assert found.begins == [0, 2, 2, 3, 0]
    assert [sorted(found.through(0, turn)) for turn in range(4)] == [[0, 4], [], [0, 1, 2], []]
    assert sorted(found.through(3, 2)) == [0, 1, 2]  # a shared turn is the parent's
    assert sorted(found.through(3, 3)) == [1, 3]
    assert found.through(2, 1) == ()


def test_a_child_of_a_shared_state_is_one_of_the_family() -> None:
    # 2 left 1 before the very turn at which 1 had left 0: it is the same state
    g = group_of(attempt(0, [1] * 3), attempt(1, [1] * 3, parent=(0, 1, 0)), attempt(2, [1] * 3, parent=(1, 1, 0)))
    assert sorted(snapshots(g).through(2, 1)) == [0, 1, 2]


def test_vine_by_hand() -> None:
    # from turn 2 on: 0 got 4, 1 got 3, 2 got 0. V(s_0) of 0 is the 2 of attempt 4, and 5 the other way round
    found = by_turn(vine([FAMILY], [PLAYED]))
    assert found[0] == [1 + 1.5 - 2] * 2 + [4 - 1.5] * 2
    assert found[1] == [0.0, 0.0, 1 + 6 - 2, 2 - 6]  # V(s_2) = (4 + 0) / 2; from turn 3 on attempt 3 got 6
    assert found[2] == [0.0, 0.0, 0 - 3.5]
    assert found[3] == [0.0, 0.0, 0.0, 6 - 2]
    assert found[4] == [2 - 5]


def test_vine_discounts_turns() -> None:
    # gamma 1/2. 0 from turn 0: 1 + 4/8 = 3/2, from turn 2: 4/2. Others from turn 2: 1 + 2/2 and 0; 4 had 2 at once
    found = by_turn(vine([FAMILY], [PLAYED], gamma=0.5))
    assert found[0] == [1 + 1 / 4 - 2] * 2 + [2 - 1] * 2


def test_vine_of_roots_takes_values_from_continuations_alone() -> None:
    found = by_turn(vine([FAMILY], [PLAYED], train="roots"))
    assert [found[0], found[4]] == [[0.5, 0.5, 2.5, 2.5], [-3.0]]
    assert not np.concatenate(found[1:4]).any()


def test_vine_without_continuations_is_rloo() -> None:
    g = group_of(attempt(0, [2, 1]), attempt(1, [1, 1, 2]), attempt(2, [1]))
    scores = [[score(1.0, [0, 0.5]), score(0.0, [0, 0.25, 0]), score(3.0)]]
    assert by_turn(vine([g], scores)) == by_turn(rloo([g], scores))


def test_vine_passes_over_what_does_not_count() -> None:
    lost = replace(PLAYED[1], outcome=None, in_baseline=False, in_gradient=False)
    found = by_turn(vine([FAMILY], [[PLAYED[0], lost, *PLAYED[2:4], PLAYED[4]]]))
    assert found[0] == [1 + 0 - 2] * 2 + [4 - 0] * 2
    assert found[1] == [0.0] * 4
    assert found[3] == [0.0] * 4  # nobody else played on from there
    ended = group_of(attempt(0, [1, 1]), attempt(1, [1], parent=(0, 1, 0)))  # left and did nothing
    assert by_turn(vine([ended], [[score(1.0, [0, 0]), score(0.0)]])) == [[0.0, 0.0], [0.0]]


def test_what_began_inside_a_turn_is_one_clear_error() -> None:
    torn = group_of(attempt(0, [2]), attempt(1, [2], parent=(0, 0, 1)))
    with pytest.raises(TrainingError, match="attempt 1: it left attempt 0 inside turn 0; only what begins with a turn"):
        vine([torn], [[score(1.0), score(0.0)]])


def test_aem_by_hand() -> None:
    # A: entropies 0, 2; B: 1. Scaled 0, 1, 1/2, by their own group; the second group's by its own
    g = group_of(attempt(0, [2, 1], entropies=[[0, 0], [2]]), attempt(1, [2], entropies=[[0.5, 1.5]]))
    h = group_of(*(attempt(i, [1], entropies=[[5 + i]], group="h") for i in range(2)), name="h")
    scores = [[score(1.0, [0, 0]), score(0.0)], [score(0.0), score(1.0)]]
    found = by_turn(aem([g, h], scores, strength=2.0, scale="none"))
    weights = [1.0, math.exp(-2), math.exp(-1)]
    mean = sum(weights) / 3
    assert [*found[0], *found[1]] == pytest.approx([w / mean / 2 * s for w, s in zip(weights, (1, 1, -1), strict=True)])
    mean = (1 + math.exp(-2)) / 2
    assert [*found[2], *found[3]] == pytest.approx([-0.5 / mean, 0.5 * math.exp(-2) / mean])


def test_aem_by_surprisal() -> None:
    def told(number: int, logprobs: Sequence[float]) -> Trajectory:
        plain = attempt(number, [len(logprobs)])
        (turn,) = plain.turns
        told = replace(turn.completion, logprobs=np.array(logprobs, dtype=np.float32))
        return replace(plain, turns=(replace(turn, completion=told),))

    g = group_of(told(0, [-1.0, -3.0]), told(1, [-0.5]))  # 2 and 1/2 nats a token
    scores = [[score(1.0), score(0.0)]]
    found = by_turn(aem([g], scores, measure="surprisal", scale="none"))
    mean = (1 + math.exp(-1)) / 2
    assert [*found[0], *found[1]] == pytest.approx([0.5 * math.exp(-1) / mean, -0.5 / mean])


def test_aem_over_the_step_weighs_as_empg_does() -> None:
    g = group_of(attempt(0, [1, 1], entropies=[[0], [1]]), attempt(1, [1, 1], entropies=[[0.25], [0.75]]))
    scores = [[score(1.0, [0, 0]), score(0.0, [0, 0])]]
    whole = by_turn(aem([g], scores, among="batch", scale="none"))
    theirs = by_turn(empg([g], scores, zeta=0.0, scale="none"))
    mean = np.mean(whole)
    assert np.array(theirs) == pytest.approx(np.array(whole) - mean)
    even = group_of(attempt(0, [1], entropies=[[1]]), attempt(1, [1], entropies=[[1]]))
    scores = [[score(1.0), score(0.0)]]
    assert by_turn(aem([even], scores)) == by_turn(grpo([even], scores))


@pytest.mark.parametrize("estimator", [recalibrated, normalised_process, subgoal, vine, aem])
def test_a_step_without_signal_or_data(estimator: Any) -> None:
    assert estimate(estimator, [], [], {}, {})[0] == []
    lone = group_of(attempt(0, [2], entropies=[[1, 2]]))
    assert by_turn(estimate(estimator, [lone], [[score(0.0)]], {}, {})[0]) == [[0.0]]
    assert by_turn(estimate(estimator, [lone], [[replace(score(0.0), **FAILED)]], {}, {})[0]) == [[0.0]]
    with pytest.raises(TrainingError, match="cannot be trained on"):
        estimate(estimator, [lone], [[score(float("nan"))]], {}, {})


@pytest.mark.parametrize(
    ("estimator", "knobs", "message"),
    [
        (recalibrated, {"window": 0}, "window = 0 must be at least 1"),
        (recalibrated, {"over": "group"}, "did you mean 'groups'"),
        (normalised_process, {"calibrate": "summ"}, "did you mean 'sum'"),
        (normalised_process, {"baseline": "indx"}, "did you mean 'index'"),
        (subgoal, {"among": "names"}, "did you mean 'name'"),
        (subgoal, {"gamma_low": 2.0}, r"gamma_low = 2.0 must be within \[0, 1\]"),
        (vine, {"train": "root"}, "did you mean 'roots'"),
        (aem, {"measure": "entropie"}, "did you mean 'entropy'"),
        (aem, {"strength": -1.0}, "strength = -1.0 must be at least 0"),
    ],
)
def test_bad_knobs(estimator: Any, knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        estimate(functools.partial(estimator, **knobs), [FAMILY], [PLAYED], {}, {})


def test_missing_entropies_are_one_clear_error() -> None:
    with pytest.raises(TrainingError, match=r"task 't', turn 0: credit 'aem' needs the entropies"):
        aem([group_of(attempt(0, [1]))], [[score(1.0)]])
