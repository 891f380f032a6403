"""Bad input to every estimator, at every set of knobs it declares: one clear error, or the documented nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from knobs import wrong_knobs
from turnstile.config import Kind
from turnstile.credit.base import GIVEN, Advantages, estimate
from turnstile.credit.check import DECLARED
from turnstile.credit.invariants import Declaration
from turnstile.credit.samples import sample_aux, sample_group, sample_score
from turnstile.errors import ConfigError, TrainingError
from turnstile.lookup import KINDS
from turnstile.types import Group, Score
from turnstile.wiring.kinds import bind

every = pytest.mark.parametrize("declared", DECLARED, ids=lambda d: f"{d.kind}-{'-'.join(map(str, d.knobs.values()))}")


def groups_of(*sizes: int) -> list[Group]:
    """Groups of so many attempts of two or three turns, none of them branched off another."""
    rng = np.random.default_rng(0)
    made = [sample_group(rng, f"g{g}", [2 + i % 2 for i in range(size + 1)]) for g, size in enumerate(sizes)]
    return [replace(group, trajectories=group.trajectories[:-1]) for group in made]


def scores_of(groups: list[Group], seed: int = 1) -> list[list[Score]]:
    rng = np.random.default_rng(seed)

    def one(turns: int) -> Score:
        return sample_score(float(rng.normal()), rng.normal(size=turns).astype(np.float32))

    return [[one(len(trajectory.turns)) for trajectory in group.trajectories] for group in groups]


def run(declared: Declaration, groups: list[Group], scores: list[list[Score]]) -> Advantages:
    estimator = bind("credit", Kind.model_validate({"kind": declared.kind, **declared.knobs}), given=GIVEN)
    advantages, _ = estimate(estimator, groups, scores, sample_aux(groups), {})
    everyone = [trajectory for group in groups for trajectory in group.trajectories]
    assert [[len(own) for own in turns] for turns in advantages] == [
        [len(turn.completion.token_ids) for turn in trajectory.turns] for trajectory in everyone
    ]
    assert all(np.isfinite(own).all() for turns in advantages for own in turns)
    return list(advantages)


def flat(advantages: Advantages) -> list[float]:
    return [float(value) for turns in advantages for own in turns for value in own]


OUTCOME_ALONE = {"tree", "threshold", "recalibrated"}
"""Kinds that read no step rewards unless a knob says so."""


def reads_steps(declared: Declaration) -> bool:
    return declared.knobs.get("of", "outcome" if declared.kind in OUTCOME_ALONE else "total") == "total"


@every
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_one_clear_error(declared: Declaration, bad: float) -> None:
    groups = groups_of(3, 3)
    scores = scores_of(groups)
    plain, whole = run(declared, groups, scores), scores[1][2]
    scores[1][2] = replace(whole, outcome={"agent": bad}, total=bad)
    with pytest.raises(TrainingError, match="finite") as caught:
        run(declared, groups, scores)
    assert "\n" not in str(caught.value)
    turn = whole.turn.copy()
    turn[1] = bad
    scores[1][2] = replace(whole, turn=turn, total=bad)
    if reads_steps(declared):
        with pytest.raises(TrainingError, match="finite"):
            run(declared, groups, scores)
    else:
        assert flat(run(declared, groups, scores)) == flat(plain)


@every
def test_no_groups_and_empty_groups_are_nothing(declared: Declaration) -> None:
    assert run(declared, [], []) == []
    groups = groups_of(3, 0, 2)
    scores = scores_of(groups)
    whole = run(declared, groups, scores)
    without = run(declared, [groups[0], groups[2]], [scores[0], scores[2]])
    assert flat(whole) == flat(without)
    assert run(declared, groups[1:2], [[]]) == []


@every
def test_a_group_of_one_is_finite(declared: Declaration) -> None:
    groups = groups_of(1)
    run(declared, groups, scores_of(groups))
    run(declared, groups_of(1, 1, 1), scores_of(groups_of(1, 1, 1)))


@every
def test_where_nobody_has_a_verdict_nobody_learns(declared: Declaration) -> None:
    groups = groups_of(3, 2)
    lost = [
        [Score(outcome=None, turn=0 * s.turn, total=0.0, in_baseline=False, in_gradient=False) for s in own]
        for own in scores_of(groups)
    ]
    assert not any(flat(run(declared, groups, lost)))
    some = scores_of(groups)
    some[0] = lost[0]
    found = run(declared, groups, some)
    assert not any(flat(found[:3]))


@every
def test_an_attempt_without_turns_is_nothing(declared: Declaration) -> None:
    groups = groups_of(3, 3)
    scores = scores_of(groups)
    first = groups[0].trajectories[0]
    groups[0] = replace(groups[0], trajectories=(replace(first, turns=()), *groups[0].trajectories[1:]))
    scores[0][0] = sample_score(0.5, np.zeros(0, np.float32))
    assert run(declared, groups, scores)[0] == []


@pytest.mark.parametrize(("kind", "knob", "value"), wrong_knobs("credit", GIVEN))
def test_a_knob_of_the_wrong_type_is_one_clear_error(kind: str, knob: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"credit kind '{kind}': {knob} = ") as caught:
        bind("credit", Kind.model_validate({"kind": kind, knob: value}), given=GIVEN)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", sorted(KINDS["credit"]))
def test_unknown_words_name_the_nearest(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown credit kind '{kind}x'; did you mean '"):
        bind("credit", Kind(kind=f"{kind}x"), given=GIVEN)
    with pytest.raises(ConfigError, match=f"credit kind '{kind}' has no knob 'zzz'; "):
        bind("credit", Kind.model_validate({"kind": kind, "zzz": 1}), given=GIVEN)
