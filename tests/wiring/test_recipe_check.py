"""A table of what a recipe can get wrong, each with the one line that says it, before anything is loaded or made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

import guess_run
from turnstile.cli.main import run as command
from turnstile.config import load_recipe, make_recipe
from turnstile.envs.guess import GuessEnv
from turnstile.errors import ConfigError
from turnstile.knobs import table
from turnstile.models.load import check_model
from turnstile.runs.train import train
from turnstile.wiring.recipe_check import check_recipe

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
BAD = dict(
    line.split("\t")
    for line in Path(__file__).with_name("bad_recipes.tsv").read_text(encoding="utf-8").splitlines()[1:]
)
"""Overrides of an empty recipe -> what is said of them."""


@pytest.mark.parametrize("overrides", BAD)
def test_what_is_wrong_is_one_line(overrides: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_recipe(make_recipe({}, overrides.split(" ")))
    assert str(caught.value) == BAD[overrides]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_that_ship_are_right(path: Path) -> None:
    assert check_recipe(load_recipe(path)) == []


def test_kinds_of_ones_own_are_checked_at_start() -> None:
    mine = {
        "credit": {"kind": "mine:credit", "heat": 3},
        "rewards": {"terms": [{"kind": "mine.rewards:brief", "level": 1}]},
    }
    assert check_recipe(make_recipe(mine)) == [
        "rewards.terms[0].kind = 'mine.rewards:brief' is checked at start",
        "credit.kind = 'mine:credit' is checked at start",
    ]


def test_credit_that_our_environments_do_not_feed_is_taken_with_ones_own() -> None:
    for kind in ("rlvmr", "subgoal"):
        assert check_recipe(make_recipe({"env": "mine:Env", "credit": kind}))
        assert check_recipe(make_recipe({"credit": kind}), env=True) == []


def test_every_kind_of_a_recipe_is_in_the_table() -> None:
    """And a default is a value that its knob takes."""
    for room, kinds in table().items():
        for kind, entry in kinds.items():
            assert all("type" in knob for knob in entry["knobs"].values()), (room, kind)


def test_the_command_answers_without_torch(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('credit = "grpo"\n')
    script = (
        "import sys; from turnstile.cli.main import run; code = run(sys.argv[1:]); "
        "print([name for name in ('torch', 'transformers') if name in sys.modules]); sys.exit(code)"
    )
    for overrides, code, said in (
        ([], 0, "mine.toml: nothing is wrong with it"),
        (
            ["credit.gamma=0.9"],
            2,
            "credit kind 'grpo' has no knob 'gamma'; kinds that have it: bilevel_gae, gae, gigpo",
        ),
        (["credit=mine:credit"], 0, "nothing is wrong with it, as far as can be said before"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", script, "config", "--check", str(file), *overrides],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert said in done.stdout + done.stderr
        assert "[]" in done.stdout


@pytest.mark.parametrize(
    ("key", "what"),
    [
        ("tasks.train", "file; check the path"),
        ("tasks.heldout", "file; check the path"),
        ("sft.conversations", "file; check the path"),
        ("train.teacher", "folder; give a folder, or a hub id"),
        ("model.id", "folder; give a folder, or a hub id"),
    ],
)
def test_a_path_that_leads_nowhere_is_found_first(key: str, what: str, tmp_path: Path) -> None:
    path = str(tmp_path / "nowhere")
    with pytest.raises(ConfigError) as caught:
        check_recipe(make_recipe({}, [f"{key}={path}"]))
    assert str(caught.value) == f"{key} = {path!r}: there is no such {what}"


def test_config_prints_no_recipe_that_training_would_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('credit = "grppo"\n')
    assert command(["config", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "did you mean 'grpo'?" in err


def test_a_knob_may_be_set_of_a_kind_that_is_written_as_its_name() -> None:
    found = make_recipe({"loss": "gspo"}, ["loss.unit=turn"])
    assert (found.loss.kind, found.loss.knobs) == ("gspo", {"unit": "turn"})


def test_a_start_that_fails_takes_nobodys_name(tmp_path: Path) -> None:
    """Whether it fails before the run's folder is made, or when it is there already."""
    recipe, run = guess_run.recipe(tmp_path, steps=1, epochs=1, minibatches=1), tmp_path / "run"
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text((tmp_path / "model" / "config.json").read_text())
    for name, said in ((tmp_path / "nowhere", "no such folder"), (empty, "cannot be loaded")):
        wrong = make_recipe(recipe.model_dump(mode="json"), [f"model.id={name}"])
        with pytest.raises(ConfigError, match=said):
            train(wrong, run=run, env=GuessEnv)
        assert not run.exists()
    train(recipe, run=run, env=GuessEnv)
    before = sorted(path.name for path in run.iterdir())
    with pytest.raises(ConfigError, match="was made with another recipe"):
        train(wrong, run=run, env=GuessEnv)
    assert sorted(path.name for path in run.iterdir()) == before


def test_a_start_anew_that_fails_costs_no_run(tmp_path: Path) -> None:
    recipe, run = guess_run.recipe(tmp_path, steps=1, epochs=1, minibatches=1), tmp_path / "run"
    train(recipe, run=run, env=GuessEnv)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    wrong = make_recipe(recipe.model_dump(mode="json"), ["model.device=cuda:9"])
    with pytest.raises(ConfigError):
        train(wrong, run=run, env=GuessEnv, fresh=True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_start_that_fails_in_a_folder_that_was_there_takes_no_name(tmp_path: Path) -> None:
    recipe, run = guess_run.recipe(tmp_path, steps=1, epochs=1, minibatches=1), tmp_path / "run"
    run.mkdir()
    with pytest.raises(ConfigError):
        train(make_recipe(recipe.model_dump(mode="json"), ["model.device=cuda:9"]), run=run, env=GuessEnv)
    assert train(recipe, run=run, env=GuessEnv)["step"] == 1


@pytest.mark.parametrize("name", ["nobody/typo", "no such/name", "typo"])
def test_a_hub_id_that_leads_nowhere_is_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"model\.id = '{name}'.*give a folder, an existing hub id") as caught:
        check_model(name, "model.id")
    assert "\n" not in str(caught.value)
