from __future__ import annotations

from pathlib import Path

import pytest

import guess_run
from turnstile.cli.main import run as command


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return guess_run.recipe_file(tmp_path_factory.mktemp("inputs"), threads=2)


@pytest.fixture(scope="module")
def undisturbed(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the recipe that nothing interrupted, trained in this process."""
    return _trained(recipe, tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A shipped recipe, shortened, and a run of it that nothing interrupted."""
    recipe = guess_run.shipped_file(tmp_path_factory.mktemp("shipped"))
    return recipe, _trained(recipe, tmp_path_factory.mktemp("shipped-undisturbed"))


def _trained(recipe: Path, folder: Path) -> Path:
    run = folder / "run"
    assert command(["train", str(recipe), "--out", str(run)]) == 0
    return run


@pytest.fixture
def template(tmp_path: Path) -> Path:
    folder = tmp_path / "template"
    folder.mkdir()
    (folder / "name").write_text("template\n")
    return folder
