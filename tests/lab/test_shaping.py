"""Potential-based shaping keeps the best policy and the gradient; behind a gate it is not such a shaping."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from turnstile.lab.measure import make_bench, measure
from turnstile.lab.processes import make
from turnstile.lab.shaping import Shape, best_policy, shaped_scores, study_shapes
from turnstile.lab.subjects import subject
from turnstile.lab.world import World, list_world, some_policy

WORLDS = {"lock": {"length": 2}, "walk": {"horizon": 3}, "key_door": {"distractors": 1}}
BY_TURN = {"scale": "none"}


def world(name: str) -> World:
    return list_world(make(name, **WORLDS[name]))


def totals(of: World, shape: Shape) -> np.ndarray:
    return np.array([score.total for score in shaped_scores(of, shape)])


@pytest.mark.parametrize("name", list(WORLDS))
def test_it_adds_the_same_to_every_episode(name: str) -> None:
    here = world(name)
    added = totals(here, "potential") - totals(here, "none")
    assert added == pytest.approx(-here.process.potential(here.process.starts[0]))
    scores = shaped_scores(here, "potential")
    assert any(np.ptp(score.turn) > 0 for score in scores)  # and yet turns differ


@pytest.mark.parametrize("name", list(WORLDS))
def test_the_best_policy_is_the_same(name: str) -> None:
    here = world(name)
    best = {shape: best_policy(here, totals(here, shape)) for shape in ("none", "potential")}
    assert best["potential"] == pytest.approx(best["none"])


@pytest.mark.parametrize("name", list(WORLDS))
@pytest.mark.parametrize("kind", ["rloo", "turn_return"])
def test_the_gradient_is_that_of_the_return_without_it(name: str, kind: str) -> None:
    """All outcomes of a group are listed: what is unbiased without it is unbiased with it, exactly."""
    here = world(name)
    knobs = BY_TURN if kind == "turn_return" else {}
    plain, with_it = (
        measure(
            subject(kind, knobs),
            make_bench(here, some_policy(here), size=2, groups=32, scores=shaped_scores(here, shape)),
            exact=True,
        )
        for shape in ("none", "potential")
    )
    assert not plain.biased or name == "walk"  # which the policy ends itself
    assert with_it.biased == plain.biased
    if not plain.biased:
        assert with_it.length == pytest.approx(plain.length, abs=1e-5)
        assert with_it.bias_scaled < 1e-5


def test_behind_a_gate_it_turns_the_best_policy() -> None:
    """Who solves the walk pays the potential that it began with, 2; who fails does not, since the gate withholds it."""
    here = world("walk")
    plain, gated = totals(here, "none"), totals(here, "gated")
    assert sorted(set((gated - plain).tolist())) == [-2.0, 0.0]
    assert best_policy(here, plain) @ plain == pytest.approx(1.0)
    assert best_policy(here, gated) @ plain == pytest.approx(0.0)
    bench = make_bench(here, some_policy(here), size=2, groups=32, scores=shaped_scores(here, "gated"))
    found = measure(subject("rloo"), bench, exact=True)
    assert found.cosine == pytest.approx(-1.0)  # 1 - 2 where it was 1, and 0 where it was 0


def test_behind_a_gate_it_biases_turns_also_where_episodes_keep_their_sum() -> None:
    """`key_door` begins with a potential of 0, so the gate changes no total; what a turn still gets it does change."""
    here = world("key_door")
    assert totals(here, "gated") == pytest.approx(totals(here, "none"))
    bench = make_bench(here, some_policy(here), size=2, groups=32, scores=shaped_scores(here, "gated"))
    assert not measure(subject("rloo"), bench, exact=True).biased
    assert measure(subject("turn_return", BY_TURN), bench, exact=True).biased


def test_the_best_policy_is_found_among_all() -> None:
    here = world("lock")
    plain = totals(here, "none")
    best = best_policy(here, plain)
    assert best @ plain == pytest.approx(1.0)  # both tasks solved
    assert sorted(best[best > 0]) == pytest.approx([0.5, 0.5])


def test_the_study_has_every_shape() -> None:
    found = study_shapes(world("walk"), [subject("rloo")], size=2, groups=32)
    assert [each.shape for each in found] == ["none", "potential", "gated"]
    assert [each.best for each in found] == pytest.approx([1.0, 1.0, 0.0])
    assert [each.added for each in found] == [(0.0, 0.0), (-2.0, -2.0), (-2.0, 0.0)]
    names = list(itertools.chain.from_iterable(dict(each.figures) for each in found))
    assert names == ["rloo"] * 3
