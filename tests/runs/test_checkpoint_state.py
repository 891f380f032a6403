"""Which checkpoints stay, and a run whose ledger is gone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import guess_run
from turnstile.config import Recipe
from turnstile.errors import ConfigError, LedgerError
from turnstile.runs.run_folder import read_results
from turnstile.runs.train import train
from turnstile.tracking.jsonl import read_metrics


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return guess_run.recipe(tmp_path_factory.mktemp("inputs"), keep=1, steps=5)


def changed(recipe: Recipe, keep_best: str) -> Recipe:
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"keep_best": keep_best})})


def standing(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir())


def test_the_best_checkpoint_by_a_metric_is_kept(recipe: Recipe, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(changed(recipe, "tokens/trained"), run=run)
    logged = {int(step["step"]): step["tokens/trained"] for step in read_metrics(run)}
    best = min(step for step, value in logged.items() if value == max(logged.values()))
    assert standing(run) == sorted({best, 5})
    assert best < 5  # or this shows nothing


@pytest.mark.slow
def test_the_best_checkpoint_by_an_evaluation_is_kept(recipe: Recipe, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(changed(recipe, "heldout/total"), run=run)
    totals = {name: [float(each.total or 0.0) for each in found] for name, found in read_results(run).items()}
    best = 2 if sum(totals["step-0002"]) >= sum(totals["step-0004"]) else 4
    assert standing(run) == [best, 5]


def test_keeping_the_best_by_an_unknown_metric_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'heldout/resolved': evaluations have no 'resolved'; did you mean"):
        train(changed(recipe, "heldout/resolved"), run=tmp_path / "a")
    with pytest.raises(ConfigError, match=r"'reward/totl' is no metric; did you mean 'reward/total'"):
        train(changed(recipe, "reward/totl"), run=tmp_path / "b")


@pytest.mark.slow
def test_a_run_without_its_ledger_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    """Nobody could say what was trained on."""
    run = tmp_path / "run"
    short = recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": 1})})
    train(short, run=run)
    (run / "ledger.db").unlink()
    with pytest.raises(LedgerError, match=r"has step-000001 but no ledger\.db.*put it back, or .* --fresh"):
        train(short, run=run)
    train(short, run=run, fresh=True)
    shutil.rmtree(run / "checkpoints")  # all of them are gone, so it begins again
    assert train(short, run=run)["step"] == 1
