from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turnstile.cli import evaluate as eval_module
from turnstile.evaluation.metrics import EpisodeResult
from turnstile.runs import dry_run as dry_module
from turnstile.runs import train as module

Cli = Callable[..., Any]


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "mine.toml").write_text('name = "mine"\n[train]\nsteps = 2\n')
    return "mine.toml"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command asks the composition root for, which answers with one result."""
    seen: dict[str, Any] = {}

    def train(recipe: Any, **how: Any) -> dict[str, Any]:
        seen.update(how, recipe=recipe)
        result = EpisodeResult(
            task_id="t",
            sample=0,
            rates={"completion": True, "modification": True, "resolution": False},
            turns=3,
            outcome=0.0,
            total=0.1,
        )
        return {"results": {"warmstart": [result], "trained": [result]}}

    monkeypatch.setattr(module, "train", train)
    return seen


def test_strict_is_passed_on(cli: Cli, recipe: str, asked: dict[str, Any]) -> None:
    assert cli("train", recipe).code == 0
    assert asked["strict"] is False
    assert cli("train", recipe, "--strict").code == 0
    assert asked["strict"] is True


def test_a_recipe_goes_into_a_run_of_its_name(cli: Cli, recipe: str, asked: dict[str, Any]) -> None:
    done = cli("train", recipe)
    assert done.code == 0
    assert (asked["run"], asked["fresh"], asked["overfit"]) == (Path("runs/mine"), False, None)
    assert "after RL vs after warm start" in done.out
    assert "turnstile rollout show runs/mine --best" in done.out


@pytest.mark.parametrize(
    ("arguments", "folder"), [(["--run", "second"], "runs/second"), (["--out", "elsewhere/x"], "elsewhere/x")]
)
def test_the_run_goes_where_it_is_said(
    cli: Cli, recipe: str, asked: dict[str, Any], arguments: list[str], folder: str
) -> None:
    cli("train", recipe, *arguments, "train.steps=7", "--fresh", "--overfit", "t1")
    assert asked["run"] == Path(folder)
    assert (asked["recipe"].train.steps, asked["fresh"], asked["overfit"]) == (7, True, "t1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--run", "a", "--out", "b"], "--run and --out both say where the run goes"),
        (["--run", "../a"], "is a name below runs/, not a path; give a folder with --out"),
        (["--run", ".."], "is a name below runs/"),
        (["train.stepps=1"], "did you mean 'steps'?"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    cli: Cli, recipe: str, asked: dict[str, Any], arguments: list[str], said: str
) -> None:
    done = cli("train", recipe, *arguments)
    assert (done.code, said in done.error, asked) == (2, True, {})


def test_a_recipe_that_is_not_there(cli: Cli) -> None:
    done = cli("train", "none.toml")
    assert (done.code, done.error) == (2, "error: recipe 'none.toml' does not exist")


def test_config_prints_the_whole_recipe(cli: Cli, recipe: str) -> None:
    found = json.loads(cli("config", recipe, "train.lr=1e-3").out)
    assert (found["name"], found["train"]["steps"], found["train"]["lr"]) == ("mine", 2, 1e-3)
    assert found["episode"]["turns"] == 8


def test_eval_knows_a_recipe_from_a_run(cli: Cli, recipe: str) -> None:
    assert "recipe 'none.toml' does not exist" in cli("eval", "none.toml").error
    assert "there is no run 'none'; there is no run in runs/ yet" in cli("eval", "none").error
    Path("runs/half").mkdir(parents=True)
    assert "it has no resolved.json" in cli("eval", "half").error
    for text, said in (("{", "cannot be read"), ("[]", "holds no recipe"), ('{"recipe": {"nam": 1}}', "did you mean")):
        Path("runs/half/resolved.json").write_text(text)
        assert said in cli("eval", "half").error


def test_eval_changes_a_runs_recipe(cli: Cli, finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def evaluate(recipe: Any, **how: Any) -> dict[str, list[EpisodeResult]]:
        seen.append((recipe, how["run"]))
        return {"step-000002": []}

    monkeypatch.setattr(eval_module, "evaluate_policy", evaluate)
    done = cli("eval", "demo", "tasks.heldout=other.jsonl", "eval.samples=3")
    ((recipe, run),) = seen
    assert (recipe.tasks.heldout, recipe.eval.samples) == (str(Path.cwd() / "other.jsonl"), 3)
    assert run == Path("runs/demo")
    assert "turnstile rollout show runs/demo --label step_000002 --best" in done.out


def test_eval_asks_for_what_was_said_and_prints_the_table(
    cli: Cli, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def evaluate(recipe: Any, **how: Any) -> dict[str, list[EpisodeResult]]:
        seen.update(how, name=recipe.name)
        return {"oracle": [EpisodeResult(task_id="t", sample=0, rates={"completion": True, "resolution": True})]}

    monkeypatch.setattr(eval_module, "evaluate_policy", evaluate)
    done = cli("eval", recipe, "--policy", "oracle", "--samples", "2", "--limit", "5")
    asked = {
        "run": None,
        "model": None,
        "policy": "oracle",
        "samples": 2,
        "limit": 5,
        "predictions": None,
        "plain": False,
    }
    assert seen == {"name": "mine", **asked}
    assert "oracle" in done.out


def test_a_dry_run_prints_its_estimate_and_trains_nothing(
    cli: Cli, recipe: str, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        dry_module, "dry_run", lambda recipe: {"minutes of RL, at most": 12.345, "device, dtype": "cpu"}
    )
    done = cli("train", recipe, "--dry-run")
    assert [line.split() for line in done.out.splitlines()] == [
        ["dry", "run"],
        ["minutes", "of", "RL,", "at", "most", "12.35"],
        ["device,", "dtype", "cpu"],
    ]
    assert asked == {}
