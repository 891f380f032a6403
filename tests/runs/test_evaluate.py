"""Evaluating a finished run once more: other tasks, other numbers, other policies."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import guess_run
import turnstile
from turnstile.config import Recipe, make_recipe
from turnstile.envs.guess import guess_tasks
from turnstile.errors import ConfigError
from turnstile.records.record import read_record
from turnstile.runs.evaluate import evaluate
from turnstile.runs.run_folder import open_run, read_recipe, read_results, write_results
from turnstile.runs.scripted import check_scripts
from turnstile.tasks.base import write_tasks

POLICIES = {"random": "guess_random", "oracle": "guess_oracle"}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    body = guess_run.recipe(tmp_path_factory.mktemp("inputs"), steps=1, epochs=1, minibatches=1).model_dump(mode="json")
    return make_recipe(body, ["sft.demos=0", "eval.before=false"])


@pytest.fixture(scope="module")
def finished(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    turnstile.train(recipe, run=run)
    return run


def test_the_last_weights_play_other_tasks(finished: Path, tmp_path: Path) -> None:
    others = guess_tasks(3, seed=9)
    write_tasks(tmp_path / "others.jsonl", others)
    before = read_results(finished)
    found = evaluate(read_recipe(finished, [f"tasks.heldout={tmp_path / 'others.jsonl'}"]), run=finished, samples=2)
    assert list(found) == ["step-000001"]
    played = [(result.task_id, result.sample) for result in found["step-000001"]]
    assert played == [(task.id, sample) for task in others for sample in (0, 1)]
    entries = list(read_record(finished, phase="eval", label="step-000001"))
    assert [(entry.step, entry.group.task.id) for entry in entries] == [(1, task.id) for task in others]
    assert read_results(finished) == before


def test_another_model_plays_fewer_tasks(finished: Path, recipe: Recipe) -> None:
    found = evaluate(read_recipe(finished), run=finished, model=recipe.model.id, limit=1)
    assert [len(results) for results in found.values()] == [1]
    (entry,) = read_record(finished, phase="eval", label=recipe.model.id)
    assert entry.step == 0


def drawn(run: Path, label: str) -> list[list[list[int]]]:
    """The tokens of each recorded episode's turns."""
    entries = read_record(run, phase="eval", label=label)
    episodes = [trajectory for entry in entries for trajectory in entry.group.trajectories]
    return [[turn.completion.token_ids.tolist() for turn in episode.turns] for episode in episodes]


def test_the_folder_of_a_model_does_not_change_its_episodes(finished: Path, recipe: Recipe, tmp_path: Path) -> None:
    moved = str(shutil.copytree(recipe.model.id, tmp_path / "moved"))
    for model in (recipe.model.id, moved):
        evaluate(read_recipe(finished), run=finished, model=model, samples=2)
    assert drawn(finished, moved) == drawn(finished, recipe.model.id)
    assert len(drawn(finished, moved)) == 4


def test_the_last_weights_play_as_they_did_at_the_end_of_the_run(finished: Path) -> None:
    found = evaluate(read_recipe(finished), run=finished, limit=1)
    (result,) = found["step-000001"]
    assert result in read_results(finished)["trained"]
    (episode,) = drawn(finished, "step-000001")
    assert episode in drawn(finished, "trained")


def test_an_evaluation_replaces_an_earlier_one(finished: Path, tmp_path: Path) -> None:
    others = guess_tasks(3, seed=9)
    write_tasks(tmp_path / "others.jsonl", others)
    evaluate(read_recipe(finished, [f"tasks.heldout={tmp_path / 'others.jsonl'}"]), run=finished)
    (result,) = evaluate(read_recipe(finished), run=finished, limit=1)["step-000001"]
    assert [entry.group.task.id for entry in read_record(finished, label="step-000001")] == [result.task_id]


def test_a_runs_own_evaluation_is_kept(finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    recipe = read_recipe(run, ["eval.policies.oracle=guess_oracle"])
    first = evaluate(recipe, run=run, policy="oracle")
    write_results(run, "oracle", first["oracle"])  # as a run does whose recipe names it
    assert list(evaluate(recipe, run=run, policy="oracle", limit=1)) == ["oracle.again"]
    assert len(drawn(run, "oracle")) == 2
    assert len(drawn(run, "oracle.again")) == 1


def test_a_policy_plays_each_task_once(finished: Path) -> None:
    recipe = read_recipe(finished, [f"eval.policies.{name}={kind}" for name, kind in POLICIES.items()])
    (oracle,) = evaluate(recipe, run=finished, policy="oracle").values()
    assert [result.rates for result in oracle] == [{"resolution": True}] * 2
    assert [entry.step for entry in read_record(finished, label="oracle")] == [0, 0]
    (chance,) = evaluate(recipe, policy="random").values()
    assert len(chance) == 2
    with pytest.raises(ConfigError, match="plays each task once"):
        evaluate(recipe, policy="random", samples=2)
    with pytest.raises(ConfigError, match="did you mean 'oracle'"):
        evaluate(recipe, policy="orcale")


def test_a_policys_knobs_are_those_of_its_function(recipe: Recipe) -> None:
    body = recipe.model_dump(mode="json")
    check_scripts(make_recipe(body, ['eval.policies.oracle={ kind = "guess_oracle", high = 15 }']))
    with pytest.raises(ConfigError, match="no knob 'hihg'; did you mean 'high'"):
        check_scripts(make_recipe(body, ['eval.policies.oracle={ kind = "guess_oracle", hihg = 15 }']))


@pytest.mark.parametrize("name", ["model", "trained", "step-0002", "step_0002", "a b", "../a"])
def test_a_policy_cannot_take_an_evaluations_name(recipe: Recipe, name: str) -> None:
    wrong = make_recipe({**recipe.model_dump(mode="json"), "eval": {"policies": {name: "guess_oracle"}}})
    with pytest.raises(ConfigError, match="cannot be a policy's name"):
        check_scripts(wrong)


def test_policies_of_one_label_are_refused(recipe: Recipe) -> None:
    policies = {"a-b": "guess_oracle", "a_b": "guess_random"}
    wrong = make_recipe({**recipe.model_dump(mode="json"), "eval": {"policies": policies}})
    for use in (check_scripts, lambda recipe: evaluate(recipe, policy="a-b")):
        with pytest.raises(ConfigError, match="'a-b' and 'a_b' would be recorded under one label, a_b"):
            use(wrong)


def test_a_run_without_a_checkpoint_cannot_be_evaluated(recipe: Recipe, tmp_path: Path) -> None:
    open_run(tmp_path / "run", recipe, fresh=False)
    with pytest.raises(ConfigError, match=r"no checkpoint to evaluate \(it was stopped before the first one\)"):
        evaluate(read_recipe(tmp_path / "run"), run=tmp_path / "run")


def test_a_run_is_recognised_from_another_working_folder(
    finished: Path, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert turnstile.train(recipe, run=finished)["step"] == 1
