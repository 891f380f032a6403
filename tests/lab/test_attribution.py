"""Contributions of turns by least squares: what a progress estimator that has learned all there is would say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from turnstile.credit.progress_attribution import progress_attribution
from turnstile.lab.attribution import contributions
from turnstile.lab.judge import Figures
from turnstile.lab.measure import Bench, Subject, make_bench, measure
from turnstile.lab.processes import make
from turnstile.lab.world import World, list_world, some_policy, truth


def listed(name: str, **knobs: int) -> tuple[World, np.ndarray]:
    world = list_world(make(name, **knobs))
    return world, truth(world, world.policy(some_policy(world))).probabilities


def test_they_add_up_where_the_outcome_does() -> None:
    """`delayed` with everything at the end pays 0, 1/4 or 1 for each turn: those are the contributions, up to what
    turns can give one another."""
    world, p = listed("delayed", horizon=3, delay=3)
    found = contributions(world, p)
    outcomes = [sum(path.outcome.values()) for path in world.paths]
    assert [own.sum() for own in found] == pytest.approx(outcomes)
    by_action: dict[tuple[int, int], float] = {}
    for path, own in zip(world.paths, found, strict=True):
        by_action |= {(t, step.action): float(c) for t, (step, c) in enumerate(zip(path.steps, own, strict=True))}
    for t in range(3):
        assert by_action[t, 1] - by_action[t, 0] == pytest.approx(0.25)
        assert by_action[t, 2] - by_action[t, 0] == pytest.approx(1.0)


def test_no_others_come_nearer() -> None:
    """The error is at right angles to every contribution: of all paths that took an action somewhere, the mean error
    is 0."""
    world, p = listed("lock")
    found = contributions(world, p)
    errors = np.array([own.sum() - sum(path.outcome.values()) for path, own in zip(world.paths, found, strict=True)])
    assert np.abs(errors).max() > 0.05  # a lock is not a sum
    seen = {(world.process.view(step.state), step.tokens) for path in world.paths for step in path.steps}
    for view, tokens in seen:
        took = [(world.process.view(s.state), s.tokens) for path in world.paths for s in path.steps]
        lengths = [len(path.steps) for path in world.paths]
        count = np.add.reduceat(
            np.array([each == (view, tokens) for each in took]) * 1.0, np.cumsum([0, *lengths[:-1]])
        )
        assert float((p * count * errors).sum()) == pytest.approx(0.0, abs=1e-9)


def progress(on: Bench, **knobs: Any) -> Figures:
    return measure(Subject(name="progress", estimator=progress_attribution, knobs={"scale": "none", **knobs}), on)


def small(name: str) -> Bench:
    world = list_world(make(name, length=2) if name == "lock" else make(name, horizon=2))
    return make_bench(world, some_policy(world), size=2, groups=64)


@pytest.mark.parametrize("rest", ["last", "none"])
@pytest.mark.parametrize("process", ["delayed", "lock", "walk"])
def test_the_direction_is_that_of_turn_returns(process: str, rest: str) -> None:
    """Also without what they leave of an outcome: what is left is at right angles to every log-probability's gradient,
    which is a sum over the same views and actions (compatible function approximation, Sutton and others 1999)."""
    found = progress(small(process), rest=rest)
    assert found.exact
    assert not found.biased
    assert found.length == pytest.approx(0.5, abs=1e-5)


def test_what_an_estimator_does_not_know_is_a_bias_unless_it_falls_on_the_last_turn() -> None:
    def ignorant(groups, scores, **knobs):  # type: ignore[no-untyped-def]
        """Contributions by nothing but a turn's length in tokens."""
        turns = [[len(turn.completion.token_ids) for turn in t.turns] for group in groups for t in group.trajectories]
        said = {"progress": [np.array(own, dtype=np.float32) / 3 for own in turns]}
        return progress_attribution(groups, scores, said, scale="none", **knobs)

    on = small("lock")
    assert not measure(Subject(name="mine", estimator=ignorant), on).biased
    assert measure(Subject(name="mine", estimator=ignorant, knobs={"rest": "none"}), on).biased
