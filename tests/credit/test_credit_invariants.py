"""Every estimator through the checker, and faulty ones that the checker must catch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from turnstile.credit.base import Advantages, to_tokens
from turnstile.credit.check import DECLARED, INVARIANTS, Declaration, check_estimator
from turnstile.lookup import KINDS, resolve


def test_every_kind_declares_itself() -> None:
    assert {declared.kind for declared in DECLARED} == set(KINDS["credit"])
    assert all(set(declared.exempt) <= set(INVARIANTS) for declared in DECLARED)


@pytest.mark.parametrize("declared", DECLARED, ids=lambda d: f"{d.kind}-{'-'.join(map(str, d.knobs.values()))}")
@pytest.mark.parametrize("seed", [0, 1])
def test_invariants(declared: Declaration, seed: int) -> None:
    broken = check_estimator(resolve("credit", declared.kind), declared.knobs, seed=seed)
    assert set(broken) == set(declared.exempt), broken


def _uncentred_std(groups, scores, aux, state):  # type: ignore[no-untyped-def]
    """Divides by a standard deviation that may be 0, and counts failures."""
    out: Advantages = []
    for group, group_scores in zip(groups, scores, strict=True):
        totals = np.array([score.total for score in group_scores])
        with np.errstate(all="ignore"):
            out += to_tokens(group, (totals - totals.mean()) / totals.std())
    return out, state


def _finds_turns_by_reward(groups, scores, aux, state):  # type: ignore[no-untyped-def]
    out, _ = resolve("credit", "grpo")(groups, scores, aux, state)
    flat = [score for group_scores in scores for score in group_scores]
    return [
        [values * float(r != 0) for values, r in zip(turns, score.turn, strict=True)]
        for turns, score in zip(out, flat, strict=True)
    ], state


def _context_counts(groups, scores, aux, state):  # type: ignore[no-untyped-def]
    """Looks at observations, at the order of the group, and loses the terminal reward."""
    out: Advantages = []
    for group in groups:
        out += to_tokens(
            group, [i + sum(len(turn.context_ids) for turn in t.turns) for i, t in enumerate(group.trajectories)]
        )
    return out, state


@pytest.mark.parametrize(
    ("estimator", "caught"),
    [(_uncentred_std, {4, 7}), (_finds_turns_by_reward, {6}), (_context_counts, {1, 2, 4, 5, 7})],
)
def test_the_checker_catches_faults(estimator: Callable[..., Any], caught: set[int]) -> None:
    assert caught <= set(check_estimator(estimator))


def test_the_checker_wants_one_array_for_each_turn() -> None:
    def too_short(groups, scores, aux, state):  # type: ignore[no-untyped-def]
        out, state = resolve("credit", "grpo")(groups, scores, aux, state)
        return [turns[:-1] for turns in out], state

    with pytest.raises(AssertionError, match="trajectory"):
        check_estimator(too_short)
