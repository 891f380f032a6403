from __future__ import annotations

from pathlib import Path

import pytest

import guess_run
from turnstile.cli.main import run as command


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return guess_run.recipe_file(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def undisturbed(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained in one process, with nothing in its way."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    assert command(["train", str(recipe), "--out", str(run)]) == 0
    return run


@pytest.fixture
def template(tmp_path: Path) -> Path:
    folder = tmp_path / "template"
    folder.mkdir()
    (folder / "name").write_text("template\n")
    return folder
