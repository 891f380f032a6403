from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress as Bars

from helpers import bug_task
from turnstile.cli.check import print_checked, sections
from turnstile.cli.tasks import _MakeView
from turnstile.config import Kind
from turnstile.errors import ConfigError
from turnstile.swe.bugs.make import Progress
from turnstile.swe.grading.findings import CheckedTask
from turnstile.tasks.base import load_tasks, write_tasks
from turnstile.types import Task

Cli = Callable[..., Any]
DEMO = Path(__file__).parents[2] / "data" / "demo" / "heldout.jsonl"


def test_list_counts_by_package_and_kind(cli: Cli, tmp_path: Path) -> None:
    found = [("toolz", "int"), ("toolz", "int"), ("toolz", "not"), ("humanize", "not")]
    tasks = [Task(id=f"t{i}", env="swe", data={"package": p, "kind": k}) for i, (p, k) in enumerate(found)]
    write_tasks(tmp_path / "t.jsonl", [*tasks, Task(id="g", env="guess")])
    lines = [line.split() for line in cli("tasks", "list", "t.jsonl").out.splitlines()]
    assert lines[:2] == [["5", "tasks"], ["package", "-", "int", "not", "all"]]
    assert lines[2:] == [["toolz", "2", "1", "3"], ["humanize", "1", "1"], ["guess", "1", "1"]]


def test_list_ids(cli: Cli, tmp_path: Path) -> None:
    write_tasks(tmp_path / "t.jsonl", [Task(id="b", env="guess"), Task(id="a", env="guess")])
    assert cli("tasks", "list", "t.jsonl", "--ids").out == "b\na\n"


def test_a_task_file_that_is_not_there(cli: Cli) -> None:
    done = cli("tasks", "list", "none.jsonl")
    assert done.code == 1
    assert done.error.startswith("error: none.jsonl: the task file cannot be read")


@pytest.mark.parametrize(
    ("source", "said"),
    [("toolz", "write it as pypi:NAME==VERSION"), ("pypi:toolz", "one exact version"), ("pip:toolz==1", "'pypi'")],
)
def test_a_source_that_names_no_package(cli: Cli, source: str, said: str) -> None:
    done = cli("tasks", "make", source, "--out", "t.jsonl")
    assert done.code == 1
    assert said in done.error


def test_split_by_package(cli: Cli, tmp_path: Path) -> None:
    done = cli("tasks", "split", str(DEMO), "--train", "a.jsonl", "--heldout", "b.jsonl", "--package", "toolz")
    train, held = load_tasks(tmp_path / "a.jsonl"), load_tasks(tmp_path / "b.jsonl")
    assert {task.data["package"] for task in held} == {"toolz"}
    assert "toolz" not in {task.data["package"] for task in train}
    assert len(train) + len(held) == len(load_tasks(DEMO))
    assert done.out.splitlines() == [f"train: {len(train)} tasks in a.jsonl", f"held out: {len(held)} tasks in b.jsonl"]


def test_split_by_function_shares_no_function(cli: Cli, tmp_path: Path) -> None:
    cli("tasks", "split", str(DEMO), "--train", "a.jsonl", "--heldout", "b.jsonl", "--share", "0.3")
    sides = [
        {(task.data["package"], task.data["function"]) for task in load_tasks(tmp_path / name)}
        for name in ("a.jsonl", "b.jsonl")
    ]
    assert all(sides)
    assert not sides[0] & sides[1]


OTHER = "tests/test_clamp.py::test_other"


@pytest.fixture
def bug(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Task:
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("TURNSTILE_CACHE", str(cache))
    tests = {"f2p": [f"tests/test_clamp.py::test_{name}" for name in ("below", "inside", "above")], "p2p": [OTHER]}
    return Task(id="clamp", env="swe", data={**bug_task(cache).data, **tests})


def test_prepare_tries_a_task_of_each_package(cli: Cli, tmp_path: Path, bug: Task) -> None:
    write_tasks(tmp_path / "t.jsonl", [bug, Task(id="g", env="guess")])
    for _ in range(2):
        done = cli("tasks", "prepare", "t.jsonl")
        assert done.out.splitlines() == [
            "pypi:tinyrange==1.0: 1 test files, licence unknown",
            "1 package is ready; 1 task was tried: it fails with its bug and passes without",
        ]
        assert (done.code, done.err) == (0, "")
    assert cli("tasks", "prepare", "t.jsonl", "--sample", "0").out.splitlines()[-1] == "1 package is ready"


def test_prepare_names_the_task_that_is_off(cli: Cli, tmp_path: Path, bug: Task) -> None:
    off = Task(id="off", env="swe", data={**bug.data, "f2p": [OTHER], "p2p": []})
    write_tasks(tmp_path / "t.jsonl", [bug, off])
    done = cli("tasks", "prepare", "t.jsonl", "--all")
    assert done.code == 0
    assert done.out.splitlines()[-1] == "1 package is ready; 2 tasks were tried: 1 is as it should be, 1 is not"
    assert done.err.splitlines() == [
        f"warning: task off: no change scores 1: {OTHER} passes",
        "a task that is off can never be solved: remove its line from the file, or make it again",
    ]


def test_prepare_refuses_a_package_none_of_whose_tasks_behaves(cli: Cli, tmp_path: Path, bug: Task) -> None:
    f2p = ["tests/test_clamp.py::gone"]
    write_tasks(tmp_path / "t.jsonl", [Task(id=f"off{n}", env="swe", data={**bug.data, "f2p": f2p}) for n in range(5)])
    done = cli("tasks", "prepare", "t.jsonl")
    assert done.code == 1
    *warnings, error = done.err.splitlines()
    assert len(warnings) == 3
    assert error.startswith("error: pypi:tinyrange==1.0: every task that was tried is off here; make the tasks again")


def test_prepare_says_when_nothing_could_be_tried(
    cli: Cli, tmp_path: Path, bug: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnstile.swe.grading.grader.PRELOAD", ("there_is_no_such_module",))
    write_tasks(tmp_path / "t.jsonl", [bug])
    done = cli("tasks", "prepare", "t.jsonl")
    assert done.code == 1
    *_, error = done.err.splitlines()
    assert error.startswith("error: no task could be tried out: ")
    assert "No module named 'there_is_no_such_module'; see turnstile doctor" in error
    assert cli("tasks", "prepare", "t.jsonl", "--sample", "0").code == 0


def test_check_prints_a_table_and_keeps_what_passed(cli: Cli, tmp_path: Path, bug: Task) -> None:
    off = Task(id="off", env="swe", data={**bug.data, "f2p": [OTHER], "p2p": []})
    write_tasks(tmp_path / "t.jsonl", [bug, off, Task(id="g", env="guess")])
    done = cli("tasks", "check", "t.jsonl", "--repeats", "1", "--keep", "good.jsonl")
    assert done.code == 1
    head, row, *rest = [line.split() for line in done.out.splitlines()]
    assert head == ["package", "tasks", "gold", "empty", "flaky", "killed", "random", "cheats", "won", "unproven"]
    assert row[:6] == ["tinyrange-1.0", "2", "1.00", "0.50", "0", "0"]
    assert int(row[8]) > 0  # on the task that any change solves, which is none
    assert [" ".join(line) for line in rest[-3:]] == [  # after the names of the cheats
        f"failed: off: no change scores 1: {OTHER} passes",
        "t.jsonl: 1 of 2 tasks passed",
        "good.jsonl: 2 tasks",
    ]
    assert [task.id for task in load_tasks(tmp_path / "good.jsonl")] == ["clamp", "g"]
    again = cli("tasks", "check", "good.jsonl", "--repeats", "1", "--probes", "0")
    said = "good.jsonl: 1 of 1 tasks passed, 1 of them by what was found before"
    assert (again.code, again.out.splitlines()[-1]) == (0, said)
    anew = cli("tasks", "check", "good.jsonl", "--repeats", "1", "--probes", "0", "--again")
    assert (anew.code, anew.out.splitlines()[-1]) == (0, "good.jsonl: 1 of 1 tasks passed")


def test_check_wants_repository_tasks(cli: Cli, tmp_path: Path) -> None:
    write_tasks(tmp_path / "t.jsonl", [Task(id="g", env="guess")])
    assert "there is no repository task to check" in cli("tasks", "check", "t.jsonl").error


@pytest.mark.parametrize("how", [[], ["--package", "toolz", "--share", "0.5"]])
def test_split_needs_one_way_to_hold_out(cli: Cli, how: list[str]) -> None:
    done = cli("tasks", "split", str(DEMO), "--train", "a.jsonl", "--heldout", "b.jsonl", *how)
    assert done.code == 2
    assert "either --package (one or more) or --share" in done.error


def test_a_split_that_leaves_nothing_writes_nothing_for_it(cli: Cli, tmp_path: Path) -> None:
    done = cli("tasks", "split", str(DEMO), "--train", "a.jsonl", "--heldout", "b.jsonl", "--share", "1")
    assert "no task is left to be trained on" in done.error
    assert not list(tmp_path.iterdir())


def test_the_making_of_a_file_is_shown_stage_by_stage() -> None:
    out = io.StringIO()
    console = Console(file=out, width=100)
    with Bars(console=console, disable=True) as bars:
        view = _MakeView(bars, wanted=5)
        view(Progress(package="toolz", stage="fetch", message="unpacking"))
        for valid in (1, 2):
            view(Progress(package="toolz", stage="validate", valid=valid, wanted=5, judged=valid + 1, candidates=9))
        (bar,) = bars.tasks
        assert (bar.completed, bar.total, bar.description) == (2, 5, "validate toolz (3 of 9 candidates judged)")
    assert out.getvalue().splitlines() == ["toolz: unpacking", "toolz: fetch", "toolz: validate"]


def test_instances_are_imported_and_exported(cli: Cli, tmp_path: Path, bug: Task) -> None:
    row = {"instance_id": "a__b-1", "repo": "a/b", "base_commit": "c" * 40, "patch": "diff", "test_patch": "",
           "problem_statement": "It breaks.", "FAIL_TO_PASS": ["t.py::test_a"], "PASS_TO_PASS": []}  # fmt: skip
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    assert cli("tasks", "import", "rows.json", "--out", "in/one.jsonl").out == "in/one.jsonl: 1 tasks\n"
    assert cli("tasks", "export", "in/one.jsonl", "harbor").out == "harbor: 1 task folders\n"
    assert (tmp_path / "harbor" / "a__b-1" / "instruction.md").read_text() == "It breaks.\n"
    write_tasks(tmp_path / "t.jsonl", [bug])
    assert "give one with --image" in cli("tasks", "export", "t.jsonl", "made").error
    assert cli("tasks", "export", "t.jsonl", "made", "--image", "x:1").code == 0
    assert cli("tasks", "import", "made", "--out", "made.jsonl").out == "made.jsonl: 1 tasks\n"
    assert "no such file or folder" in cli("tasks", "export", "none.jsonl", "made").error


def test_knobs_are_of_the_sandboxes_that_are_used() -> None:
    made, instance = Task(id="m", env="swe"), Task(id="i", env="swe_shell")
    knobs = ["resources.memory_mb=8192", "resources.ulimits.nofile=1024"]
    of_both = {"kind": "container", "resources": {"memory_mb": 8192, "ulimits": {"nofile": 1024}}}
    assert sections([instance], None, knobs)[1] == Kind.model_validate(of_both)
    assert [one and one.model_dump() for one in sections([made, instance], "container", knobs)] == [of_both, of_both]
    of_local = {"kind": "local", "resources": {"memory_mb": 8192}}
    assert sections([made], None, knobs[:1]) == (Kind.model_validate(of_local), None)
    assert sections([made, instance], "local", knobs[:1])[1] is None
    with pytest.raises(ConfigError, match="say whose the knobs are"):
        sections([made, instance], None, knobs)
    with pytest.raises(ConfigError, match="instances are checked in containers"):
        sections([instance], "local", knobs)


def test_what_passes_without_a_repair_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    found = [
        CheckedTask(task=Task(id=name, env="swe_shell"), gold=gold, empty=(0,), trouble=trouble)
        for name, gold, trouble in (("a", (1,), None), ("b", (), None), ("c", (), "it is off"))
    ]
    print_checked(Console(), "t.jsonl", found)
    _, row, _, line = capsys.readouterr().out.splitlines()
    assert row.split() == ["-", "3", "1.00", "0.00", "0", "0", "-", "-", "-", "1"]
    assert line == "t.jsonl: 2 of 3 tasks passed, 1 of them without a known repair"
