"""What the lab finds of estimators whose bias is known, exactly where a group's outcomes are listed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from turnstile.credit.base import to_tokens
from turnstile.lab.judge import Figures, surely
from turnstile.lab.measure import Bench, Subject, credit, enumerate_gradient, make_bench, measure
from turnstile.lab.play import branch_paths
from turnstile.lab.processes import make
from turnstile.lab.world import list_world, some_policy, truth
from turnstile.lookup import resolve

KEPT: dict[Any, Bench] = {}


def bench(process: str, *, size: int = 2, groups: int = 256, **knobs: int) -> Bench:
    key = (process, size, groups, *knobs.items())
    if key not in KEPT:
        world = list_world(make(process, **knobs))
        KEPT[key] = make_bench(world, some_policy(world), size=size, groups=groups)
    return KEPT[key]


def figures(kind: str, on: Bench, *, exact: bool | None = None, **knobs: Any) -> Figures:
    return measure(Subject(name=kind, estimator=resolve("credit", kind), knobs=knobs), on, exact=exact)


@pytest.mark.parametrize("process", ["delayed", "stopping", "lock"])
@pytest.mark.parametrize("exact", [True, False])
def test_leave_one_out_is_unbiased(process: str, exact: bool) -> None:
    on = bench(process, horizon=3) if process == "delayed" else bench(process)
    found = figures("rloo", on, exact=exact)
    assert found.exact is exact
    assert found.bias < 1e-6
    assert not found.biased


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_mean_that_holds_the_own_sample_shortens_the_gradient(size: int) -> None:
    found = figures("grpo", bench("stopping", size=size), scale="none", exact=size == 2)
    assert found.length == pytest.approx((size - 1) / size, abs=1e-6)
    assert found.bias_scaled < 1e-5
    assert found.bias == pytest.approx(1 / size, abs=1e-6)


def test_turns_compared_at_their_index_are_biased_where_the_policy_stops() -> None:
    """Fewer attempts reach a later turn, so its mean holds more of the own return: the shares differ by turn."""
    stopping, fixed = bench("stopping"), bench("delayed", horizon=3)
    found = figures("turn_return", stopping, scale="none", exact=True)
    assert found.biased
    assert found.bias_scaled > 0.05
    everyone = figures("turn_return", fixed, scale="none", exact=True)  # all attempts have as many turns
    assert not everyone.biased
    assert everyone.length == pytest.approx(0.5, abs=1e-6)


def test_dividing_by_the_deviation_turns_the_gradient() -> None:
    assert figures("grpo", bench("stopping", size=3, groups=64, horizon=2), exact=True).biased
    binary = figures("grpo", bench("walk", size=2, groups=64, horizon=2), exact=True)
    assert not binary.biased  # rewards of 0 and 1 on one task: only the length changes
    assert binary.bias > 0.1
    easy_and_hard = figures("grpo", bench("lock", size=4, groups=64, length=2), exact=True)
    assert easy_and_hard.biased  # tasks of other success rates weigh otherwise
    of_two = figures("grpo", bench("lock", length=2), exact=True)
    assert not of_two.biased  # two rewards of 0 and 1 that differ have one deviation only


def test_discounting_is_biased_where_rewards_come_late() -> None:
    late, at_once = bench("delayed", horizon=3, delay=2), bench("delayed", horizon=3, delay=0)
    knobs = {"scale": "none", "exact": True, "gamma": 0.5}
    assert figures("turn_return", late, **knobs).bias_scaled > 0.1
    assert figures("turn_return", at_once, **knobs).bias_scaled < 1e-5


def test_the_outcome_alone_follows_the_outcome() -> None:
    found = figures("rloo", bench("misaligned", horizon=3, needed=2), of="outcome", exact=True)
    assert found.cosine_outcome == pytest.approx(1.0, abs=1e-6)
    assert found.cosine < 0.99


def test_seats_that_are_added_up_leave_nothing_to_learn() -> None:
    found = figures("rloo", bench("two_seat", pile=3), exact=True)
    assert (found.length, found.aligned) == (0.0, 0.0)
    assert np.isnan(found.cosine)
    assert not found.biased


@pytest.mark.parametrize("process", ["stopping", "lock"])
@pytest.mark.parametrize("kind", ["grpo", "turn_return"])
def test_samples_agree_with_the_list(process: str, kind: str) -> None:
    """The sampled mean of a biased estimator lies within its own uncertainty of the exact one."""
    on = bench(process, groups=600)
    subject = Subject(name=kind, estimator=resolve("credit", kind))
    exact, noise = enumerate_gradient(lambda drawn: credit(subject, drawn)[0], on)
    gradients = on.drawn.gradients(credit(subject, on.drawn)[0])
    found = on.controls.mean(gradients)
    assert surely(found.mean - exact, found.covariance) < 3.5
    plain = gradients.mean(axis=0)
    assert surely(plain - exact, np.cov(gradients.T) / len(gradients)) < 3.5
    assert np.trace(found.covariance) < 0.5 * np.trace(np.cov(gradients.T)) / len(gradients)  # controls pay
    sampled = float(gradients.var(axis=0, ddof=1).sum()) * on.drawn.paths[0].size
    assert sampled == pytest.approx(noise, rel=0.2)


def test_an_estimator_that_remembers_and_one_of_whole_steps_are_sampled() -> None:
    def moving(groups, scores, state, *, decay=0.5):  # type: ignore[no-untyped-def]
        """The total less the mean of the step before, which does not depend on this one's samples."""
        before = state.get("mean", 0.0)
        totals = [score.total for group in scores for score in group]
        values = iter([total - before for total in totals])
        credit = [turns for group in groups for turns in to_tokens(group, [next(values) for _ in group.trajectories])]
        return credit, {"mean": decay * before + (1 - decay) * float(np.mean(totals))}

    found = measure(Subject(name="moving", estimator=moving), bench("stopping", groups=600))
    assert not found.exact
    assert abs(found.z) < 4
    assert not found.biased
    whole = Subject(name="grpo", estimator=resolve("credit", "grpo"), knobs={"scale": "batch_std"}, broken={3: "step"})
    assert not measure(whole, bench("stopping")).exact


def test_wrong_gradients_are_found_wrong() -> None:
    """The same advantages with one turn's sign turned must be seen at once."""

    def turned(groups, scores):  # type: ignore[no-untyped-def]
        credit = resolve("credit", "rloo")(groups, scores)
        return [[-values if t == 1 else values for t, values in enumerate(turns)] for turns in credit]

    for exact in (True, False):
        found = measure(Subject(name="turned", estimator=turned), bench("stopping"), exact=exact)
        assert found.biased
        assert found.cosine < 0.95


def test_branches_are_distributed_as_attempts_of_their_own() -> None:
    world = list_world(make("stopping"))
    true = truth(world, world.policy(some_policy(world)))
    paths, parents = branch_paths(world, true.probabilities, np.random.default_rng(0), 4000, 1, 4)
    counts = np.bincount(paths[:, 0, 2], minlength=len(world.paths))
    expected = 4000 * true.probabilities
    assert float((np.square(counts - expected) / expected).sum()) < 2 * len(world.paths)  # chi squared
    for row, of in zip(paths[:, 0].tolist(), parents, strict=True):
        for attempt, parent in enumerate(of[0]):
            if parent is not None:
                root, turn, _ = parent
                mine, theirs = world.paths[row[attempt]], world.paths[row[root]]
                assert mine.steps[:turn] == theirs.steps[:turn]
                assert mine.steps[turn].state == theirs.steps[turn].state
    assert sum(parent is not None for of in parents for parent in of[0]) > 1000


def test_a_mean_over_branches_shortens_the_trunk() -> None:
    """A branch shares its parent's first turns, so a mean that includes it is not a baseline for them."""
    world = list_world(make("delayed", horizon=3))
    branched = make_bench(world, some_policy(world), size=4, groups=600, branched=True)
    assert figures("rloo", branched).biased

    def bare(groups, scores):  # type: ignore[no-untyped-def]
        return [turns for g, s in zip(groups, scores, strict=True) for turns in to_tokens(g, [x.total for x in s])]

    plain = measure(Subject(name="bare", estimator=bare), branched)
    assert not plain.biased
    assert plain.length == pytest.approx(1.0, abs=1e-6)


def test_an_estimator_with_a_critic_gets_exact_values() -> None:
    """The return to go less the exact value is unbiased, and less noisy than any baseline of the whole attempt."""

    def critic(groups, scores, aux):  # type: ignore[no-untyped-def]
        flat = [score for group in scores for score in group]
        to_go = [np.cumsum(score.turn[::-1])[::-1] + score.outcome["agent"] for score in flat]
        return [
            [ahead - values for ahead, values in zip(own, turns, strict=True)]
            for own, turns in zip(to_go, aux["values"], strict=True)
        ]

    on = bench("stopping", size=8, groups=256)
    found = measure(Subject(name="critic", estimator=critic), on)
    assert not found.biased
    assert found.length == pytest.approx(1.0, abs=1e-3)
    assert found.episodes < figures("rloo", on).episodes


def test_intervals_hold_the_exact_figures() -> None:
    world = list_world(make("stopping"))
    theta = some_policy(world)
    subject = Subject(name="turn_return", estimator=resolve("credit", "turn_return"), knobs={"gamma": 0.9})
    benches = [make_bench(world, theta, size=2, groups=256, seed=seed) for seed in range(12)]
    exact = measure(subject, benches[0], exact=True)
    found = [measure(subject, each, exact=False) for each in benches]
    assert sum(abs(each.length - exact.length) < 1.96 * each.length_se for each in found) >= 10
    assert sum(each.cosine_low < exact.cosine < each.cosine_high for each in found) >= 10
    assert sum(each.biased for each in found) >= 10
