"""The composition of reward terms into one score: direct and gated accumulation (D-RA and G-RA, arXiv 2508.10548)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from turnstile.errors import ConfigError
from turnstile.rewards.base import Term
from turnstile.types import F32, Score, Stop, Task, Trajectory


def gated(terms: Sequence[Term], task: Task, trajectory: Trajectory) -> Score:
    """Return the score by gated reward accumulation (G-RA, arXiv 2508.10548): R = sum_l m_l R_l.

    R_l is the weighted sum of the terms of level l, and m_l = 1 iff every term with a gate on a level above l passes
    its own threshold.

    The terms of the highest level are always granted; its episode terms are the outcome. All other terms are step
    rewards. A turn term of any level adds to r_t of its turn, and an episode term of a lower level adds to the last
    turn, so that total = outcome + sum_t r_t (in an episode without turns such a term is lost). A gate compares the
    reward before weighting; for a turn term it compares the sum over the turns.

    If infrastructure failed (`Stop.ERROR`, or a term without a verdict), the outcome is None and the trajectory counts
    neither in the baseline nor in the gradient.
    """
    return _compose(terms, task, trajectory, obey=True)


def direct(terms: Sequence[Term], task: Task, trajectory: Trajectory) -> Score:
    """Return the score by direct reward accumulation (D-RA, arXiv 2508.10548): R = sum_l R_l, with all gates open."""
    return _compose(terms, task, trajectory, obey=False)


def sum_terms(by_term: Mapping[str, F32], length: int) -> F32:
    """Return r_t of each of the `length` turns, which is the sum of the terms' rewards, f32[K]."""
    total = np.zeros(length, dtype=np.float64)
    for values in by_term.values():
        total += values
    return total.astype(np.float32)


def failure_score(trajectory: Trajectory) -> Score:
    """Return the score of an infrastructure failure, without reward and excluded from baseline and gradient."""
    turn = np.zeros(len(trajectory.turns), dtype=np.float32)
    return Score(outcome=None, turn=turn, total=0.0, in_baseline=False, in_gradient=False)


def _compose(terms: Sequence[Term], task: Task, trajectory: Trajectory, *, obey: bool) -> Score:
    if not terms:
        raise ConfigError("a reward needs at least one term; add one under [[rewards.terms]]")
    names = [term.name for term in terms]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ConfigError(f"reward terms must have different names, but {', '.join(map(repr, twice))} occurs twice")
    if trajectory.stop is Stop.ERROR:
        return failure_score(trajectory)
    values = {}
    for term in terms:
        value = term.values(task, trajectory)
        if value is None:
            return failure_score(trajectory)
        values[term.name] = value
    gates = {
        term.name: not obey or term.gate.passes(float(values[term.name].sum()))
        for term in terms
        if term.gate is not None
    }
    top = max(term.level for term in terms)
    length = len(trajectory.turns)
    outcome = 0.0
    stepwise = 0.0  # sum of granted rewards before rounding to float32, so that equal totals are equal
    granted: dict[str, F32] = {}
    withheld: dict[str, F32] = {}
    withheld_by: dict[str, tuple[str, ...]] = {}
    for term in terms:
        weighted = values[term.name] * term.weight
        if term.level == top and term.scope == "episode":
            outcome += float(weighted[0])
            continue
        steps = np.zeros(length, dtype=np.float32)
        if term.scope == "turn":
            steps[:] = weighted
        elif length:
            steps[-1] = weighted[0]
        closed = tuple(
            higher.name for higher in terms if higher.level > term.level and not gates.get(higher.name, True)
        )
        zeros = np.zeros_like(steps)
        granted[term.name], withheld[term.name] = (zeros, steps) if closed else (steps, zeros)
        if closed:
            withheld_by[term.name] = closed
        elif length:
            stepwise += float(weighted.sum())
    turn = sum_terms(granted, length)
    return Score(
        outcome={"agent": outcome},
        turn=turn,
        total=outcome + stepwise,
        granted=granted,
        withheld=withheld,
        gates=gates,
        withheld_by=withheld_by,
    )
