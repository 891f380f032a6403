"""A checker of any estimator for the invariants of `credit/invariants.py`.

    broken = check_estimator(my_estimator, {"gamma": 0.9})
    assert not broken, broken

Each kind declares which invariants do not hold, and the reason (`credit.invariants.declare`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from turnstile.credit.base import Advantages, Estimator, Scores, estimate
from turnstile.credit.invariants import Finding, Part, broken, declarations, examine, format_change
from turnstile.credit.samples import (
    sample_aux,
    sample_group,
    sample_score,
    with_forced,
    with_observations,
    with_untrained,
)
from turnstile.types import F32, Group, Score, Stop, Trajectory

DECLARED = declarations("credit")
"""Every kind of the table with the knobs that it declares, and the invariants that cannot hold with them."""


def check_estimator(
    estimator: Estimator, knobs: Mapping[str, Any] | None = None, *, aux: Mapping[str, Any] | None = None, seed: int = 0
) -> dict[int, str]:
    """Return the invariants that an estimator breaks: number -> a counterexample.

    The inputs are read-only arrays, so an estimator that writes to them raises. The check takes milliseconds.
    """
    return broken(examine_estimator(functools.partial(estimator, **dict(knobs or {})), aux=aux, seed=seed))


def examine_estimator(
    estimator: Estimator,
    *,
    aux: Mapping[str, Any] | None = None,
    seed: int = 0,
    padded: Estimator | None = None,
    late_outcome: Estimator | None = None,
) -> dict[int, Finding]:
    """Return the finding for each invariant of an estimator whose knobs are bound.

    An adapter that lays tokens out as arrays passes two variants of the estimator: `padded` with more padding, and
    `late_outcome` with the outcome on the observation after the last action. Raises AssertionError if the result is not
    [trajectory][turn] -> f32[n], or not finite for ordinary input.
    """
    rng = np.random.default_rng(seed)
    groups = [sample_group(rng, f"g{g}", lengths) for g, lengths in enumerate(((3, 2, 4, 3), (2, 3, 3, 4)))]
    scores = [[_random_score(rng, trajectory) for trajectory in group.trajectories] for group in groups]

    def bound(estimator: Estimator) -> Run:
        def run(groups: Sequence[Group], scores: Scores) -> Advantages:
            given = {**sample_aux(groups), **dict(aux or {})}
            advantages, _ = estimate(estimator, groups, scores, given, {})
            return _well_formed(groups, advantages)

        return run

    run = bound(estimator)
    plain = run(groups, scores)
    for place, values in _named_turns(groups, plain):
        if not np.isfinite(values).all():
            raise AssertionError(f"the advantage of {place} is {values[~np.isfinite(values)][0]}, of finite rewards")
    sides: dict[int, list[Part]] = {
        1: [lambda: _observation(run, groups, scores)],
        2: [lambda: _permutation(run, groups, scores)],
        3: [lambda: _splitting(run, groups, scores)],
        4: [
            lambda: _failure(run, groups, scores),
            lambda: _masked(run, groups, scores),
            lambda: _untrained(run, groups, scores),
            lambda: _forced(run, groups, scores),
        ],
        5: [lambda: _terminal(run, groups, scores)],
        6: [lambda: _zero_turn(run, groups, scores)],
        7: [lambda: _all_equal(run, groups, scores)],
    }
    if padded is not None:
        wide = bound(padded)
        sides[3].insert(0, lambda: _describe_difference("with more padding", groups, plain, wide(groups, scores)))
    if late_outcome is not None:
        late = bound(late_outcome)
        sides[5].append(lambda: _terminal(late, groups, scores, where=", on the observation after it"))
    return examine(sides)


Run = Callable[[Sequence[Group], Scores], Advantages]


def _well_formed(groups: Sequence[Group], advantages: Advantages) -> Advantages:
    shapes = [[len(turn.completion.token_ids) for turn in t.turns] for g in groups for t in g.trajectories]
    if [[len(values) for values in turns] for turns in advantages] != shapes:
        raise AssertionError("advantages are not [trajectory][turn] -> f32[n] in the order of the groups")
    return advantages


def _observation(run: Run, groups: Sequence[Group], scores: Scores) -> str | None:
    longer = [
        replace(group, trajectories=tuple(with_observations(t, extra=5 + i) for i, t in enumerate(group.trajectories)))
        for group in groups
    ]
    what = "with 5 to 8 more observed tokens before every turn"
    return _describe_difference(what, groups, run(groups, scores), run(longer, scores))


def _permutation(run: Run, groups: Sequence[Group], scores: Scores) -> str | None:
    order = [2, 0, 3, 1]
    moved_groups = [replace(g, trajectories=tuple(g.trajectories[i] for i in order)) for g in groups]
    moved_scores = [[group_scores[i] for i in order] for group_scores in scores]
    plain = run(groups, scores)
    expected = [plain[4 * g + i] for g in range(len(groups)) for i in order]
    what = "with the attempts of each group in another order"
    return _describe_difference(what, moved_groups, expected, run(moved_groups, moved_scores))


def _splitting(run: Run, groups: Sequence[Group], scores: Scores) -> str | None:
    apart = [turns for g in range(len(groups)) for turns in run(groups[g : g + 1], scores[g : g + 1])]
    return _describe_difference("with each group given by itself", groups, run(groups, scores), apart)


def _failure(run: Run, groups: Sequence[Group], scores: Scores) -> str | None:
    failed = replace(groups[0].trajectories[0], attempt=99, stop=Stop.ERROR, signals={})
    nothing = np.zeros(len(failed.turns), dtype=np.float32)
    score = Score(outcome=None, turn=nothing, total=0.0, in_baseline=False, in_gradient=False)
    wider = [replace(groups[0], trajectories=(*groups[0].trajectories, failed)), *groups[1:]]
    result = run(wider, [[*scores[0], score], *scores[1:]])
    its_own = [values[0] for values in result.pop(len(groups[0].trajectories)) if values.any()]
    if its_own:
        return f"an attempt that failed, without a reward, gets the advantage {its_own[0]:.3g}"
    return _describe_difference("beside a fifth attempt that failed", groups, run(groups, scores), result)


def _masked(run: Run, groups: Sequence[Group], scores: Scores) -> str | None:
    result = run(groups, [[replace(scores[0][0], in_gradient=False), *scores[0][1:]], *scores[1:]])
    its_own = [values[0] for values in result[0] if values.any()]
    if its_own:
        return f"an attempt that counts but is not to be learned from gets the advantage {its_own[0]:.3g}"
    expected = [[np.zeros_like(values) for values in result[0]], *run(groups, scores)[1:]]
    return _describe_difference("where attempt 0 of g0 counts but is not to be learned from", groups, expected, result)


def _untrained(run: Run, groups: Sequence[Group], scores: Scores) -> str | None:
    """Return how the token count of an untrained turn changes the advantages of other turns; None if it does not."""
    place = 1

    def found(extra: int) -> Advantages:
        first = with_untrained(groups[0].trajectories[0], place, extra)
        shown = replace(groups[0], trajectories=(first, *groups[0].trajectories[1:]))
        result = run([shown, *groups[1:]], scores)
        result[0] = [*result[0][:place], np.zeros(0, dtype=np.float32), *result[0][place + 1 :]]
        return result

    what = f"with 5 more tokens in turn {place} of attempt 0 of g0, which is not trained"
    return _describe_difference(what, groups, found(0), found(5))


def _forced(run: Run, groups: Sequence[Group], scores: Scores) -> str | None:
    """Return how the number of grammar-forced tokens changes the advantages of chosen tokens; None if it does not."""
    place, first = 1, groups[0].trajectories[0]
    chosen = len(first.turns[place].completion.token_ids)
    shown = replace(groups[0], trajectories=(with_forced(first, place, 5), *groups[0].trajectories[1:]))
    result = run([shown, *groups[1:]], scores)
    result[0] = [*result[0][:place], result[0][place][:chosen], *result[0][place + 1 :]]
    what = f"with 5 more tokens in turn {place} of attempt 0 of g0, which a grammar forced"
    return _describe_difference(what, groups, run(groups, scores), result)


def _terminal(run: Run, groups: Sequence[Group], scores: Scores, where: str = "") -> str | None:
    def with_outcome(outcome: float) -> F32:
        changed = [[sample_score(outcome, scores[0][0].turn), *scores[0][1:]], *scores[1:]]
        return run(groups, changed)[0][-1]

    worst, best = with_outcome(-10.0), with_outcome(10.0)  # beyond all others, so that no std hides the change
    if not (best > worst).all():
        place = int(np.argmin(best - worst))
        seen = f"{worst[place]:.3g} at the outcome -10{where}, and {best[place]:.3g} at 10"
        return f"the advantage of the last action is {seen}"
    return None


def _zero_turn(run: Run, groups: Sequence[Group], scores: Scores) -> str | None:
    bare = [[sample_score(s.outcome_of(), np.zeros_like(s.turn)) for s in group_scores] for group_scores in scores]
    advantages = [turns[:2] for turns in run(groups, bare)]  # at later turns few trajectories are left to compare
    for place, values in _named_turns(groups, advantages):
        if not values.any():
            return f"{place} gets no advantage, its step reward being 0, though the outcomes differ"
    return None


def _all_equal(run: Run, groups: Sequence[Group], scores: Scores) -> str | None:
    for size in (3, 4):  # the floating-point mean of three times 0.1 is not 0.1
        fewer = [replace(group, trajectories=group.trajectories[:size]) for group in groups]
        equal = [[sample_score(0.1, np.zeros_like(s.turn)) for s in group_scores[:size]] for group_scores in scores]
        for place, values in _named_turns(fewer, run(fewer, equal)):
            if values.any():  # NaN is not zero either
                return f"the advantage of {place} is {values[values != 0][0]:.3g} where all {size} outcomes are 0.1"
    return None


def _named_turns(groups: Sequence[Group], advantages: Advantages) -> Iterator[tuple[str, F32]]:
    """Yield each turn's description and its advantages."""
    names = [f"attempt {t.attempt} of {group.id}" for group in groups for t in group.trajectories]
    for name, turns in zip(names, advantages, strict=True):
        for k, values in enumerate(turns):
            yield f"turn {k} of {name}", values


def _describe_difference(what: str, groups: Sequence[Group], expected: Advantages, actual: Advantages) -> str | None:
    """Return a phrase that describes the largest difference between two results; None if they are equal."""
    if all(
        np.allclose(x, y, rtol=1e-5, atol=1e-6)
        for a, b in zip(expected, actual, strict=True)
        for x, y in zip(a, b, strict=True)
    ):
        return None
    worst, found = -1.0, ""
    for (place, x), (_, y) in zip(_named_turns(groups, expected), _named_turns(groups, actual), strict=True):
        gap = np.nan_to_num(np.abs(x - y), nan=np.inf)
        if len(gap) and gap.max() > worst:
            worst, n = float(gap.max()), int(gap.argmax())
            found = f"{what}, the advantage of {place} {format_change(x[n], y[n])}"
    return found


def _random_score(rng: np.random.Generator, trajectory: Trajectory) -> Score:
    return sample_score(float(rng.normal()), rng.normal(size=len(trajectory.turns)).astype(np.float32))
