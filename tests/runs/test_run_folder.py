"""What a run folder keeps of its recipe, wherever it is moved and wherever it is read."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from turnstile.config import Recipe, load_recipe
from turnstile.errors import ConfigError, RunFolderError
from turnstile.runs.run_folder import only_one, open_run, read_recipe, room_for, starting


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe, tasks and a model; one works in it."""
    folder = tmp_path / "project"
    (folder / "models" / "tiny").mkdir(parents=True)
    (folder / "mine.toml").write_text(
        '[model]\nid = "./models/tiny"\n[tasks]\ntrain = "train.jsonl"\nheldout = "/sets/heldout.jsonl"\n'
    )
    monkeypatch.chdir(folder)
    return folder


def written(run: Path) -> dict[str, dict[str, str]]:
    recipe: dict[str, dict[str, str]] = json.loads((run / "resolved.json").read_text())["recipe"]
    return recipe


def test_a_project_moves_as_a_whole(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not open_run(Path("runs/a"), load_recipe("mine.toml"), fresh=False)
    assert written(project / "runs" / "a")["tasks"]["train"] == "../../train.jsonl"
    assert written(project / "runs" / "a")["tasks"]["heldout"] == "/sets/heldout.jsonl"
    monkeypatch.chdir(tmp_path)
    assert open_run(Path("project/runs/a"), load_recipe("project/mine.toml"), fresh=False)
    shutil.move(project, tmp_path / "moved")
    assert open_run(Path("moved/runs/a"), load_recipe("moved/mine.toml"), fresh=False)
    found = read_recipe(Path("moved/runs/a"))
    assert found == load_recipe("moved/mine.toml")
    assert found.tasks.train == str(tmp_path / "moved" / "train.jsonl")
    assert found.model.id == str(tmp_path / "moved" / "models" / "tiny")
    Path("moved/runs/a/checkpoints/step-000000").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"tasks\.train changed"):
        open_run(Path("moved/runs/a"), load_recipe("moved/mine.toml", ["tasks.train=t.jsonl"]), fresh=False)


def test_a_run_can_be_moved_away_from_its_tasks(project: Path, tmp_path: Path) -> None:
    open_run(tmp_path / "run", load_recipe("mine.toml"), fresh=False)
    shutil.move(tmp_path / "run", project / "run")
    assert read_recipe(project / "run") == load_recipe("mine.toml")
    assert open_run(project / "run", load_recipe("mine.toml"), fresh=False)


def test_a_model_in_the_run_folder_is_written_as_a_path(project: Path) -> None:
    """What lies beside resolved.json is written with a dot, so that it is read as a path again."""
    recipe = load_recipe("mine.toml", ["model.id=./run/models/tiny"])
    open_run(Path("run"), recipe, fresh=False)
    assert written(project / "run")["model"]["id"] == "./models/tiny"
    assert read_recipe(Path("run")) == recipe


def test_a_folder_with_the_name_of_the_model_is_another_recipe(project: Path) -> None:
    """Loading the name from here would give the folder."""
    (project / "recipes").mkdir()
    (project / "recipes" / "named.toml").write_text('[model]\nid = "org/name"\n')
    open_run(Path("runs/a"), load_recipe("recipes/named.toml"), fresh=False)
    assert open_run(Path("runs/a"), load_recipe("recipes/named.toml"), fresh=False)
    (project / "org" / "name").mkdir(parents=True)
    Path("runs/a/checkpoints/step-000000").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"model\.id changed"):
        open_run(Path("runs/a"), load_recipe("recipes/named.toml"), fresh=False)
    assert read_recipe(Path("runs/a")).model.id == "org/name"


def test_relative_paths_in_overrides_start_at_the_current_folder(project: Path) -> None:
    open_run(Path("runs/a"), load_recipe("mine.toml"), fresh=False)
    found = read_recipe(Path("runs/a"), ["tasks.heldout=other.jsonl", "eval.samples=3"])
    assert (found.tasks.heldout, found.eval.samples) == (str(project / "other.jsonl"), 3)
    assert found.tasks.train == str(project / "train.jsonl")


def test_a_key_that_an_older_run_lacks_has_its_default(project: Path) -> None:
    open_run(Path("run"), Recipe(), fresh=False)
    body = json.loads(Path("run/resolved.json").read_text())
    del body["recipe"]["train"]["keep"]
    Path("run/resolved.json").write_text(json.dumps(body))
    assert open_run(Path("run"), Recipe(), fresh=False)
    body["recipe"]["train"]["gone"] = 1
    Path("run/resolved.json").write_text(json.dumps(body))
    with pytest.raises(ConfigError, match=r"unknown key 'train\.gone'.*--fresh to start run anew"):
        open_run(Path("run"), Recipe(), fresh=False)


HOLD = """
import sys
from pathlib import Path
from turnstile.runs.run_folder import only_one
with only_one(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_process_at_a_time_uses_a_run_folder(tmp_path: Path) -> None:
    """The second is refused; once the first was killed, it is not."""
    run = tmp_path / "run"
    command = [sys.executable, "-c", HOLD, str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with (
            pytest.raises(RunFolderError, match=f"run is in use by process {first.pid}; wait until it ends"),
            only_one(run),
        ):
            pass
        first.kill()
    with only_one(run), pytest.raises(RunFolderError, match=f"process {os.getpid()};"), only_one(run):
        pass


def test_a_fresh_start_keeps_the_lock(project: Path) -> None:
    with starting(Path("run")) as begin:
        open_run(Path("run"), Recipe(), fresh=False)
        Path("run/record").mkdir()
        assert not open_run(Path("run"), Recipe(seed=1), fresh=True)
        begin()
        assert sorted(path.name for path in Path("run").iterdir()) == [".lock", "resolved.json"]
        with pytest.raises(RunFolderError, match="is in use"), only_one(Path("run")):
            pass


def test_a_full_disk_is_a_one_line_error(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(RunFolderError, match=r"finished work is kept.* once there is room"), room_for(tmp_path):
            (tmp_path / "file").write_text("more than ten bytes")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
