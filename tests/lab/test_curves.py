"""Learning with sampled groups, and gated against direct accumulation."""

from __future__ import annotations

import json

import numpy as np
import pytest

from turnstile.errors import TrainingError
from turnstile.lab.curves import Plan, Race, exact, learn, race, race_of, sampled
from turnstile.lab.figures import draw_races
from turnstile.lab.hacking import compose_scores, hack
from turnstile.lab.measure import Subject
from turnstile.lab.processes import make
from turnstile.lab.subjects import subject
from turnstile.lab.table import learning
from turnstile.lab.world import list_world
from turnstile.rewards.compose import direct, gated


def test_the_exact_gradient_solves_a_process() -> None:
    curve = learn(list_world(make("lock")), exact, Plan(steps=120), seed=0)
    assert curve.total[0] < 0.25
    assert curve.total[-1] > 0.99
    assert 0.3 < curve.area < 1.0


def test_sampled_learning_is_repeatable_and_improves() -> None:
    world, plan = list_world(make("stopping")), Plan(steps=40, rate=0.2)
    first, again, other = (learn(world, sampled(subject("rloo"), plan), plan, seed=seed) for seed in (0, 0, 1))
    assert first.total.tolist() == again.total.tolist()
    assert first.total.tolist() != other.total.tolist()
    assert first.total[-1] > first.total[0] + 0.2


def test_a_game_is_played_against_the_policy_it_began_with() -> None:
    world, plan = list_world(make("two_seat", pile=5)), Plan(steps=60, rate=0.2)
    curve = learn(world, exact, plan, seed=0)
    assert curve.total[0] == pytest.approx(0.0, abs=1e-12)  # the same policy in both seats
    assert curve.total[-1] > 0.5


def test_a_race_says_who_cannot_take_part() -> None:
    def no(groups, scores):  # type: ignore[no-untyped-def]
        raise TrainingError("it wants a critic's values")

    world = list_world(make("stopping", horizon=2))
    found = race([subject("rloo"), Subject(name="no", estimator=no)], [world], Plan(steps=10), seeds=2)
    assert [each.estimator for each in found] == ["rloo", "no"]
    assert found[0].interval[0] < found[0].share < found[0].interval[1]
    assert found[1].refused
    assert learning(found).rows[1] == ("no", "-")
    kept = [race_of(json.loads(json.dumps(each.to_json(), allow_nan=False))) for each in found]
    assert kept[0] == found[0]
    assert kept[1].refused == found[1].refused
    assert len(found[0].curve) == 11
    assert len(draw_races(found).axes[0].get_lines()) == 1


def test_the_interval_is_students() -> None:
    one = Race(estimator="e", process="p", rate=0.1, areas=(1.0, 2.0, 3.0, 4.0, 5.0), exact=4.0)
    assert one.share == pytest.approx(0.75)
    half = 2.776 * np.sqrt(2.5) / np.sqrt(5) / 4
    assert one.interval == pytest.approx((0.75 - half, 0.75 + half))


def test_farming_pays_only_where_rewards_are_added_up() -> None:
    world = list_world(make("misaligned"))
    added, behind = compose_scores(world, direct), compose_scores(world, gated)
    farms = [all(step.action == 2 for step in path.steps) for path in world.paths].index(True)
    assert (added[farms].total, behind[farms].total) == (2.0, 0.0)
    assert behind[farms].withheld["step"].sum() == 2.0
    assert max(score.total for score in behind) == 1.5  # three turns of work and one of farming


def test_the_published_signature_of_gated_and_direct_accumulation() -> None:
    found = hack(subject("grpo"), list_world(make("misaligned")), Plan(steps=80, size=8, rate=0.1), seeds=2)
    by = {each.composition: each for each in found}
    assert by["direct"].total[1] > by["direct"].total[0] + 0.5
    assert by["direct"].outcome[1] < by["direct"].outcome[0] - 0.1
    assert by["gated"].outcome[1] > by["gated"].outcome[0] + 0.3
    assert all(all(each.matches_paper) for each in found)
