"""Every kind of reward through the checker, under both compositions, and a bad one that it must catch."""

from __future__ import annotations

import pytest

from rewarded import KNOBS, RECORDED, TASK
from turnstile.lookup import KINDS, resolve
from turnstile.rewards.base import Term, Threshold
from turnstile.rewards.build import make_term
from turnstile.rewards.check import check_rewards
from turnstile.rewards.compose import failure_score, gated
from turnstile.types import Score, Task, Trajectory


@pytest.mark.parametrize("compose", sorted(KINDS["compose"]))
@pytest.mark.parametrize("kind", sorted(KINDS["reward"]))
@pytest.mark.parametrize("level", [0, 2])
def test_every_reward_keeps_the_invariants(kind: str, compose: str, level: int) -> None:
    terms = [
        make_term("x", kind, KNOBS.get(kind), level=level, gate=Threshold(value=0.5)),
        Term(name="other", function=lambda task, trajectory: -1.0, scope="episode", level=1),
    ]
    assert check_rewards(terms, TASK, RECORDED, resolve("compose", compose)) == {}


def _peeks(task: Task, trajectory: Trajectory) -> float:
    return float(sum(len(turn.context_ids) for turn in trajectory.turns) + trajectory.attempt)


def _forgets(terms: list[Term], task: Task, trajectory: Trajectory) -> Score:
    score = gated(terms, task, trajectory)
    if score.outcome is None:
        return Score(outcome={"agent": 0.0}, turn=failure_score(trajectory).turn, total=0.0)
    return Score(outcome=score.outcome, turn=score.turn[:-1], total=score.total)


def test_the_checker_finds_broken_invariants() -> None:
    peeking = [Term(name="peeks", function=_peeks, scope="episode", level=0)]
    assert set(check_rewards(peeking, TASK, RECORDED)) == {1, 2}
    falls_on_the_last = [
        Term(name="o", function=lambda t, x: 1.0, scope="episode", level=1),
        Term(name="b", function=lambda t, x: 1.0, scope="episode", level=0),
    ]
    assert set(check_rewards(falls_on_the_last, TASK, RECORDED, _forgets)) == {4, 5, 6}
