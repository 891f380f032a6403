"""Hints in the prompts of training."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers import byte_tokenizer
from modelserver import tiny_engine
from plays import SCAFFOLD, TASK, FakeEnv, player, tasks
from turnstile.agents.history import messages_before, with_hint
from turnstile.config import make_recipe
from turnstile.errors import ConfigError
from turnstile.records.codec import decode, encode
from turnstile.rollout.async_source import AsyncSource
from turnstile.rollout.hints import RubricHint
from turnstile.rollout.run_records import RunRecords
from turnstile.tasks.base import TaskSampler
from turnstile.types import Group, Message, Task, Trajectory
from turnstile.wiring.hints import make_hint

CRITERIA = {"a": "Is it short?", "b": "Is it right?", "c": "Is it kind?", "d": "Is it new?"}
RUBRIC = replace(TASK, data={"rubric": CRITERIA})


def hint(**knobs: Any) -> RubricHint:
    return RubricHint(**{"seed": 0, "steps": 11, **knobs})


def shown(text: str) -> list[str]:
    return text.splitlines()[1:]


def test_attempts_of_a_group_are_shown_different_amounts() -> None:
    found = [len(shown(hint()(RUBRIC, attempt, 5, 1))) for attempt in range(5)]
    assert found == [4, 3, 2, 1, 0]  # round(4 * (1, .75, .5, .25, 0)) at the beginning, where the sigmoid is 1
    assert [hint().shown_fraction(0, 1, 1), hint(within="none").shown_fraction(4, 5, 1)] == pytest.approx([1.0, 1.0])


def test_hint_fades_out() -> None:
    # a fifth of training is done at step 3 of 11: there the sigmoid is 1/2
    sigmoid = [hint().shown_fraction(0, 2, step) for step in (1, 2, 3, 4, 11)]
    far = 1 / (1 + math.exp(12.5))
    assert sigmoid == pytest.approx([1.0, 1 - far, 0.5, far, 0.0], abs=1e-9)
    assert [hint(decay="linear").shown_fraction(0, 2, step) for step in (1, 6, 11, 12)] == pytest.approx(
        [1.0, 0.5, 0.0, 0.0]
    )
    assert hint(decay="none").shown_fraction(0, 2, 11) == 1.0
    assert hint(steps=1).shown_fraction(1, 3, 1) == 0.5  # a run of one step: the group's share alone
    assert hint(steepness=1e6).shown_fraction(0, 2, 11) == 0.0


def test_criteria_depend_on_seed_task_attempt_and_step_alone() -> None:
    half = {"within": "none", "decay": "linear", "steps": 3}
    first = hint(**half)(RUBRIC, 0, 4, 2)
    assert first == hint(**half)(RUBRIC, 0, 4, 2)
    assert len(shown(first)) == 2
    assert shown(first) == [line for line in [f"- {text}" for text in CRITERIA.values()] if line in shown(first)]
    others = [hint(**half)(RUBRIC, attempt, 4, 2) for attempt in range(1, 9)] + [
        hint(**half, seed=seed)(RUBRIC, 0, 4, 2) for seed in range(1, 9)
    ]
    assert len({first, *others}) > 3


def test_the_tasks_criteria_come_before_the_recipes() -> None:
    own = hint(criteria={"x": "Is it the recipe's?"})
    assert shown(own(TASK, 0, 2, 1)) == ["- Is it the recipe's?"]
    assert len(shown(own(RUBRIC, 0, 2, 1))) == 4
    listed = replace(TASK, data={"wanted": ["Be brief."]})
    assert shown(hint(key="wanted", heading="Mind:")(listed, 0, 2, 1)) == ["- Be brief."]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: hint()(TASK, 0, 2, 1),
            "at least one criterion for task 't', but it has no 'rubric' in its data, and no",
        ),
        (lambda: hint()(replace(TASK, data={"rubric": [1]}), 0, 2, 1), "but 'rubric' in its data is \\[1\\]"),
        (lambda: hint()(replace(TASK, data={"rubric": {}}), 0, 2, 1), "but 'rubric' in its data is {}"),
        (lambda: hint(midpoint=2.0), "needs midpoint in \\[0, 1\\] and steepness above 0, got 2.0"),
        (lambda: hint(steepness=float("nan")), "steepness above 0, got 0.2 and nan"),
        (lambda: hint(decay="quick"), "decay sigmoid, linear or none; got 'linear' and 'quick'"),
    ],
)
def test_refuses_bad_knobs_and_tasks(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_hint_is_at_the_end_of_the_users_message() -> None:
    system, user = Message(role="system", content="Be good."), Message(role="user", content="Go.")
    assert with_hint([system, user], "Mind.") == (system, replace(user, content="Go.\n\nMind."))
    assert with_hint([system], "Mind.") == (system, Message(role="user", content="Mind."))
    assert with_hint([user], "") == (user,)


def prompt(trajectory: Trajectory) -> str:
    tokenizer: Any = SCAFFOLD.renderer
    return str(tokenizer.tokenizer.decode(trajectory.turns[0].context_ids.tolist()))


async def test_hint_is_shown_in_training_only() -> None:
    plays = player(FakeEnv, hint=hint(criteria={"x": "Be quick."}))
    (group,) = await plays.groups(tasks(1), 2, label="train/1", seed=0, step=1)
    first, last = group.trajectories
    assert "Go.\n\nYour work will be judged by these criteria:\n- Be quick." in prompt(first)
    assert first.hint.endswith("- Be quick.")
    assert first.opening == (Message(role="user", content="Go."),)  # what a judge reads is the environment's own
    assert "Be quick." not in prompt(last)
    assert last.hint == ""
    (evaluated,) = await plays.groups(tasks(1), 2, label="eval", seed=0)
    assert all("Be quick." not in prompt(one) for one in evaluated.trajectories)


class Hinting(FakeEnv):
    async def measure(self) -> dict[str, Any]:
        return {"hint": "It was 5."}


async def test_environment_may_have_a_signal_named_hint() -> None:
    (group,) = await player(Hinting, hint=hint(criteria={"x": "Be quick."})).groups(
        tasks(1), 2, label="train/1", seed=0, step=1
    )
    record = encode(group)
    for one, played in zip(group.trajectories, decode(record, Group).trajectories, strict=True):
        assert one.signals == played.signals == {"hint": "It was 5."}
        assert one.hint == played.hint
        (begun,) = messages_before(played, 0)
        assert f"{begun.content}\n" in prompt(one)
        assert "It was 5." not in begun.content
    assert ["Be quick." in one.hint for one in group.trajectories] == [True, False]
    for one in record["trajectories"]:
        del one["hint"]  # as it was recorded before there were hints
    assert [one.hint for one in decode(record, Group).trajectories] == ["", ""]


def test_episodes_played_ahead_are_shown_the_same(tmp_path: Path) -> None:
    records = RunRecords(tmp_path)
    source = AsyncSource(
        start=lambda: pytest.fail("nothing is played"),
        write=lambda version: tmp_path,
        engine=tiny_engine(byte_tokenizer()),
        records=records,
        sampler=TaskSampler(tasks(1)),
        groups=1,
        attempts=3,
        seed=0,
        max_staleness=1,
        last=11,
        hint=hint(criteria={"x": "Be quick.", "y": "Be kind."}),
    )
    drawn = [attempt.hint for _, attempt in source._issue_step(1).jobs.values()]
    assert [len(shown(text)) for text in drawn] == [2, 1, 0]
    assert drawn[1] == hint(criteria={"x": "Be quick.", "y": "Be kind."})(tasks(1)[0], 1, 3, 1)
    records.close()


def test_recipe_names_a_hint() -> None:
    recipe = make_recipe(
        {
            "seed": 3,
            "train": {"steps": 5},
            "hint": "rubric",
            "graders": [{"kind": "clock"}, {"kind": "checklist", "items": {"x": "Is it short?"}}],
        }
    )
    made = make_hint(recipe)
    assert made is not None
    assert shown(made(TASK, 0, 2, 1)) == ["- Is it short?"]
    assert make_hint(make_recipe({})) is None


def own(*, steps: int) -> Any:
    return lambda task, attempt, attempts, step: f"{steps - step} steps left"


def test_recipe_names_a_hint_of_ones_own() -> None:
    made = make_hint(make_recipe({"hint": f"{__name__}:own", "train": {"steps": 4}}))
    assert made is not None
    assert made(Task(id="t", env="e"), 0, 1, 3) == "1 steps left"


@pytest.mark.parametrize(
    ("hint", "message"),
    [
        ({"kind": "rubrik"}, "unknown hint kind 'rubrik'; did you mean 'rubric'"),
        ({"kind": "rubric", "decai": "none"}, "has no knob 'decai'; did you mean 'decay'"),
        ({"kind": "rubric", "midpoint": "late"}, "midpoint = 'late' is not a number"),
        ({"kind": "turnstile.rollout.hints:Hint"}, "hint kind 'turnstile.rollout.hints:Hint'"),
    ],
)
def test_bad_recipes(hint: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_hint(make_recipe({"hint": hint}))
