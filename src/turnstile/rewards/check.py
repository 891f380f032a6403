"""A checker of any reward terms for the invariants of `credit.invariants.INVARIANTS`.

    broken = check_rewards(terms, task, trajectory)
    assert not broken, broken

Invariants 3 (packing) and 7 (equal rewards) concern tensors and groups, which a reward never sees. All others
hold for every built-in term under both compositions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from turnstile.credit.samples import with_observations
from turnstile.rewards.base import Term
from turnstile.rewards.build import Compose
from turnstile.rewards.compose import gated
from turnstile.types import Score, Stop, Task, Trajectory


def check_rewards(
    terms: Sequence[Term], task: Task, trajectory: Trajectory, compose: Compose = gated
) -> dict[int, str]:
    """Return which of the invariants 1, 2, 4, 5 and 6 the composed terms break, each with a counterexample.

    `trajectory` must have at least two turns, and must contain the signals that the terms read.
    """
    broken: dict[int, str] = {}
    plain = compose(terms, task, trajectory)
    if not _equal_scores(plain, compose(terms, task, with_observations(trajectory, extra=4))):
        broken[1] = "more observation tokens changed a reward"
    elsewhere = replace(trajectory, attempt=trajectory.attempt + 1)
    if not _equal_scores(plain, compose(terms, task, elsewhere)) or not _equal_scores(
        plain, compose(terms, task, trajectory)
    ):
        broken[2] = "a reward depends on the attempt's number or on when it is computed"
    failure = compose(terms, task, replace(trajectory, stop=Stop.ERROR, error="the sandbox died"))
    if failure.outcome is not None or failure.in_baseline or failure.in_gradient or failure.total != 0.0:
        broken[4] = "an infrastructure failure got a reward or a place in the statistics"
    if plain.outcome is not None:
        parts = sum(plain.outcome.values()) + float(plain.turn.sum(dtype=np.float64))
        if not np.isclose(plain.total, parts, rtol=1e-6, atol=1e-9):
            broken[5] = f"total {plain.total} is not outcome + step rewards {parts}: some reward reaches no turn"
    lengths = {len(plain.turn), *map(len, plain.granted.values()), *map(len, plain.withheld.values())}
    if lengths != {len(trajectory.turns)}:
        broken[6] = f"{len(trajectory.turns)} turns have step rewards for {sorted(lengths)}"
    return broken


def _equal_scores(a: Score, b: Score) -> bool:
    return (
        a.outcome == b.outcome
        and a.total == b.total
        and np.array_equal(a.turn, b.turn)
        and dict(a.gates) == dict(b.gates)
    )
