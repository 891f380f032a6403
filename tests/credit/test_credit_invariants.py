"""Faulty estimators that the checker must catch; those of the tables go through it in conform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from turnstile.credit.base import Advantages, to_tokens
from turnstile.credit.check import DECLARED, check_estimator
from turnstile.credit.invariants import INVARIANTS
from turnstile.lookup import KINDS, resolve


def test_every_kind_declares_itself() -> None:
    assert {declared.kind for declared in DECLARED} == set(KINDS["credit"])
    assert all(set(declared.exempt) <= set(INVARIANTS) for declared in DECLARED)


def _uncentred_std(groups, scores):  # type: ignore[no-untyped-def]
    """Divides by a standard deviation that may be 0, and counts failures."""
    out: Advantages = []
    for group, group_scores in zip(groups, scores, strict=True):
        totals = np.array([score.total for score in group_scores])
        with np.errstate(all="ignore"):
            out += to_tokens(group, (totals - totals.mean()) / totals.std())
    return out


def _finds_turns_by_reward(groups, scores):  # type: ignore[no-untyped-def]
    out = resolve("credit", "grpo")(groups, scores)
    flat = [score for group_scores in scores for score in group_scores]
    return [
        [values * float(r != 0) for values, r in zip(turns, score.turn, strict=True)]
        for turns, score in zip(out, flat, strict=True)
    ]


def _over_all_tokens(groups, scores):  # type: ignore[no-untyped-def]
    """Takes the mean over all sampled tokens off, also over those that are not trained."""
    out: Advantages = []
    for group, group_scores in zip(groups, scores, strict=True):
        sizes = [sum(len(turn.completion.token_ids) for turn in t.turns) for t in group.trajectories]
        totals, weights = np.array([s.total for s in group_scores]), np.array([s.in_baseline for s in group_scores])
        learning = np.array([s.in_gradient for s in group_scores])
        out += to_tokens(group, (totals - np.average(totals, weights=weights * sizes)) * learning)
    return out


def _context_counts(groups, scores):  # type: ignore[no-untyped-def]
    """Looks at observations, at the order of the group, and loses the terminal reward."""
    out: Advantages = []
    for group in groups:
        out += to_tokens(
            group, [i + sum(len(turn.context_ids) for turn in t.turns) for i, t in enumerate(group.trajectories)]
        )
    return out


@pytest.mark.parametrize(
    ("estimator", "caught"),
    [(_uncentred_std, {4, 7}), (_finds_turns_by_reward, {6}), (_context_counts, {1, 2, 4, 5, 7})],
)
def test_the_checker_catches_faults(estimator: Callable[..., Any], caught: set[int]) -> None:
    assert caught <= set(check_estimator(estimator))


def test_the_checker_wants_one_array_for_each_turn() -> None:
    def too_short(groups, scores):  # type: ignore[no-untyped-def]
        out = resolve("credit", "grpo")(groups, scores)
        return [turns[:-1] for turns in out]

    with pytest.raises(AssertionError, match="trajectory"):
        check_estimator(too_short)


@pytest.mark.parametrize(
    ("estimator", "number", "seen"),
    [
        (
            _context_counts,
            1,
            "with 5 to 8 more observed tokens before every turn, the advantage of turn 0 of attempt 3",
        ),
        (_context_counts, 5, "the advantage of the last action is 6 at the outcome -10, and 6 at 10"),
        (_uncentred_std, 4, "an attempt that failed, without a reward, gets the advantage 0.1"),
        (_uncentred_std, 7, "the advantage of turn 0 of attempt 0 of g0 is -1 where all 3 outcomes are 0.1"),
        (
            _over_all_tokens,
            4,
            "with 5 more tokens in turn 1 of attempt 0 of g0, which is not trained, the advantage of",
        ),
        (_finds_turns_by_reward, 6, "turn 0 of attempt 0 of g0 gets no advantage"),
    ],
)
def test_what_is_broken_has_a_counterexample(estimator: Callable[..., Any], number: int, seen: str) -> None:
    assert seen in check_estimator(estimator)[number]


def test_what_is_not_finite_is_no_matter_of_invariants() -> None:
    def blind(groups, scores):  # type: ignore[no-untyped-def]
        return [
            [np.full(len(turn.completion.token_ids), np.nan) for turn in t.turns]
            for g in groups
            for t in g.trajectories
        ]

    with pytest.raises(AssertionError, match="the advantage of turn 0 of attempt 0 of g0 is nan"):
        check_estimator(blind)


def test_an_estimator_that_raises_on_what_is_unusual_has_that_as_its_counterexample() -> None:
    def never_flat(groups, scores):  # type: ignore[no-untyped-def]
        if any(len({score.total for score in found}) == 1 for found in scores):
            raise ZeroDivisionError("all the same")
        return resolve("credit", "grpo")(groups, scores)

    assert check_estimator(never_flat) == {7: "raises ZeroDivisionError: all the same"}
