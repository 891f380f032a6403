"""Instances written by hand as the data sets have them, read, written and read again."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from turnstile.errors import TaskError
from turnstile.swe.formats import harbor, r2egym, swebench, swegym, swesmith
from turnstile.swe.formats.instance import Instance, reversed_patch
from turnstile.swe.formats.rows import read_instances

REPAIR = """diff --git a/shapes.py b/shapes.py
index 1234567..89abcde 100644
--- a/shapes.py
+++ b/shapes.py
@@ -1,2 +1,2 @@
 def area(width, height):
-    return width + height
+    return width * height
"""
SWE_BENCH = {
    "repo": "django/django",
    "instance_id": "django__django-11099",
    "base_commit": "d26b2424437dabeeca94d7900b37d2df4410da0c",
    "patch": REPAIR,
    "test_patch": "diff --git a/tests/test_shapes.py b/tests/test_shapes.py\n",
    "problem_statement": "area adds",
    "hints_text": "",
    "created_at": "2019-03-20T03:46:18Z",
    "version": "3.0",
    "FAIL_TO_PASS": '["test_ascii_validator (auth_tests.test_validators.UsernameValidatorsTests)"]',
    "PASS_TO_PASS": '["test_help_text (auth_tests.test_validators.UserAttributeSimilarityValidatorTest)"]',
    "environment_setup_commit": "419a78300f7cd27611196e1e464d50fd0385ff27",
}
SWE_GYM = {
    "instance_id": "getmoto__moto-7365",
    "hints_text": "",
    "patch": REPAIR,
    "test_patch": "diff --git a/tests/test_shapes.py b/tests/test_shapes.py\n",
    "created_at": "2024-02-19 20:29:03",
    "problem_statement": "area adds",
    "repo": "getmoto/moto",
    "base_commit": "7f6c9cb1deafb280fe7fcc7551c38e397f11a706",
    "version": "5.0",
    "PASS_TO_PASS": [],
    "FAIL_TO_PASS": ["tests/test_shapes.py::test_area"],
}
SWE_SMITH = {
    "instance_id": "oauthlib__oauthlib.1fd52536.combine_file__09vlzwgc",
    "repo": "swesmith/oauthlib__oauthlib.1fd52536",
    "patch": reversed_patch(REPAIR),
    "FAIL_TO_PASS": ["tests/test_shapes.py::test_area"],
    "PASS_TO_PASS": ["tests/test_shapes.py::test_other"],
    "image_name": "jyangballin/swesmith.x86_64.oauthlib_1776_oauthlib.1fd52536",
    "problem_statement": "area adds",
}
R2E_GYM = {
    "repo_name": "aiohttp",
    "docker_image": "namanjain12/aiohttp_final:f0d74880deec8fcd982bce639c93c5e130d41198",
    "commit_hash": "f0d74880deec8fcd982bce639c93c5e130d41198",
    "parsed_commit_content": '{"old_commit_hash": "f0d74880deec8fcd982bce639c93c5e130d41198^", "file_diffs": []}',
    "execution_result_content": "{}",
    "modified_files": ["aiohttp/web.py"],
    "problem_statement": "[ISSUE] ...",
    "expected_output_json": '{"TestWeb.test_a": "PASSED", "TestWeb.test_b": "FAILED"}',
}
ROWS: Mapping[str, tuple[Mapping[str, Any], Any]] = {
    "swe-bench": (SWE_BENCH, swebench),
    "swe-gym": (SWE_GYM, swegym),
    "swe-smith": (SWE_SMITH, swesmith),
    "r2e-gym": (R2E_GYM, r2egym),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("form", ["json", "jsonl", "parquet"])
def test_a_data_set_is_recognised_read_and_written(name: str, form: str, tmp_path: Path) -> None:
    row, format = ROWS[name]

    def written(rows: list[Mapping[str, Any]], file: Path) -> Path:
        if form == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), file)
        else:
            file.write_text("\n".join(map(json.dumps, rows)) if form == "jsonl" else json.dumps(rows))
        return file

    (told,) = read_instances(written([row], tmp_path / f"a.{form}"))
    assert told == format.from_row(row, "row")
    assert read_instances(written([format.to_row(told)], tmp_path / f"b.{form}"), name) == [told]
    assert read_instances(written([told.to_json()], tmp_path / f"c.{form}"), "turnstile") == [told]
    assert {key: value for key, value in format.to_row(told).items() if key in row} == {
        key: value for key, value in row.items() if value not in ("", None)
    }


def test_the_fields_of_each_data_set_are_read() -> None:
    bench = swebench.from_row(SWE_BENCH, "row")
    assert bench.image == "swebench/sweb.eval.x86_64.django_1776_django-11099:latest"
    assert bench.fail_to_pass == ("test_ascii_validator (auth_tests.test_validators.UsernameValidatorsTests)",)
    assert bench.extra["version"] == "3.0"
    assert swegym.from_row(SWE_GYM, "row").image == "xingyaoww/sweb.eval.x86_64.getmoto_s_moto-7365"
    smith = swesmith.from_row(SWE_SMITH, "row")
    assert (smith.base_commit, smith.bug_patch) == ("1fd52536", SWE_SMITH["patch"])
    assert smith.patch == REPAIR
    gym = r2egym.from_row(R2E_GYM, "row")
    assert gym.base_commit == f"{R2E_GYM['commit_hash']}^"
    assert gym.expected == {"TestWeb.test_a": "PASSED", "TestWeb.test_b": "FAILED"}


def test_an_instance_is_solved_by_the_right_statuses_alone() -> None:
    named = Instance(id="i", problem="", fail_to_pass=("a",), pass_to_pass=("b",))
    assert not named.unmet({"a": "PASSED", "b": "XFAIL"})
    for statuses in ({"a": "PASSED"}, {"a": "SKIPPED", "b": "PASSED"}, {"a": "PASSED", "b": "ERROR"}):
        assert named.unmet(statuses)
    mapped = Instance(id="i", problem="", expected={"a": "PASSED", "b": "FAILED"})
    assert not mapped.unmet({"a": "PASSED", "b": "FAILED", "c": "FAILED"})
    assert mapped.unmet({"a": "PASSED", "b": "PASSED"}) == ["b"]
    assert mapped.unmet({"b": "FAILED"}) == ["a"]


def test_a_run_that_names_none_of_the_tests_is_detected() -> None:
    named = Instance(id="i", problem="", fail_to_pass=("a",), pass_to_pass=("b[x",))
    assert [named.met_none(run) for run in ({}, {"c": "PASSED"}, {"a": "FAILED"}, {"b[x y]": "FAILED"})] == [
        True, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"instance_id": "x", "repo": "r", "FAIL_TO_PASS": "[]"}', "row 1: field 'problem_statement' is missing"),
        ('{"a": 1}', "row 1: the columns are of no known format"),
        ("[1]\n", "row 1: a row is an object with named fields, this is list"),
        ("{", "it cannot be read"),
        ("", "it holds no instance"),
        ('{"id": "x", "problem": "", "typo": 1}', "unknown field 'typo'"),
    ],
)
def test_an_unreadable_file_gives_a_clear_error(content: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(TaskError) as caught:
        read_instances(tmp_path / "x.jsonl")
    assert says in str(caught.value)


def test_an_unknown_source_or_format_is_refused() -> None:
    with pytest.raises(TaskError, match="a data set on the hub as OWNER/NAME"):
        read_instances("./nowhere.jsonl")
    with pytest.raises(TaskError, match="did you mean 'swe-smith'"):
        read_instances("x", "swe-smiths")


def test_a_data_set_comes_from_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read without a network, as the hub's client lays a data set down."""
    home = tmp_path / "hub" / "datasets--me--mine"
    snapshot = home / "snapshots" / ("0" * 40)
    (snapshot / "data").mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("0" * 40)
    for split, row in (("train", SWE_GYM), ("test", SWE_BENCH)):
        pq.write_table(pa.Table.from_pylist([row]), snapshot / "data" / f"{split}-00000-of-00001.parquet")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert [one.id for one in read_instances("me/mine", split="test")] == ["django__django-11099"]
    with pytest.raises(TaskError, match="file of the split 'dev'"):
        read_instances("me/mine", split="dev")
    with pytest.raises(TaskError, match="the hub does not give the data set"):
        read_instances("me/other")


PATCHES = {
    "change": ({"a.txt": "one\ntwo\nthree\n"}, {"a.txt": "one\n2\n2b\nthree\n"}),
    "no newline": ({"a.txt": "one\ntwo"}, {"a.txt": "one\ntwo\nthree"}),
    "new and gone": ({"gone.txt": "-- a\n++ b\n"}, {"new.txt": "--- c\n+++ d\n"}),
    "two hunks": (
        {"a.txt": "".join(f"{n}\n" for n in range(40))},
        {"a.txt": "".join(f"{n * (n % 30 > 1)}\n" for n in range(40))},
    ),
}


def git_in(folder: Path) -> Callable[..., str]:
    def run(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout

    run("init", "-q")
    return run


@pytest.mark.parametrize("name", PATCHES)
def test_a_reversed_patch_restores_the_files(name: str, tmp_path: Path) -> None:
    before, after = PATCHES[name]
    git = git_in(tmp_path)
    for files in (before, after):
        for old in tmp_path.glob("*.txt"):
            old.unlink()
        for path, text in files.items():
            (tmp_path / path).write_text(text)
        git("add", "-A")
        git("commit", "-qm", "x")
    patch = git("diff", "HEAD~", "HEAD")
    (tmp_path / "back.patch").write_text(reversed_patch(patch))
    git("apply", "back.patch")
    assert {path.name: path.read_text() for path in tmp_path.glob("*.txt")} == before
    assert reversed_patch(reversed_patch(patch)) == patch


def test_a_patch_that_renames_is_refused() -> None:
    with pytest.raises(TaskError, match="git apply -R"):
        reversed_patch("diff --git a/x b/y\nsimilarity index 100%\nrename from x\nrename to y\n")


TEST = "import shapes\n\n\ndef test_area():\n    assert shapes.area(2, 3) == 6\n\n\ndef test_other():\n    pass\n"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository without the bug, and without the test that tells it."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git = git_in(folder)
    (folder / "shapes.py").write_text("def area(width, height):\n    return width * height\n")
    (folder / "test_shapes.py").write_text(TEST.partition("def test_area")[0] + "def test_other():\n    pass\n")
    git("add", ".")
    git("commit", "-qm", "x")
    return folder


def instance_in(repository: Path) -> Instance:
    git = git_in(repository)
    (repository / "test_shapes.py").write_text(TEST)
    test_patch = git("diff")
    git("checkout", "--", ".")
    return Instance(
        id="me__shapes-1",
        problem="area adds",
        base_commit=git("rev-parse", "HEAD").strip(),
        bug_patch=reversed_patch(REPAIR),
        patch=REPAIR,
        test_patch=test_patch,
        fail_to_pass=("test_shapes.py::test_area",),
        pass_to_pass=("test_shapes.py::test_other",),
        image="me/shapes:1",
        workdir=str(repository),
    )


def test_a_harbor_folder_is_written_and_read_back(repository: Path, tmp_path: Path) -> None:
    instance = instance_in(repository)
    folder = harbor.write_folder(instance, tmp_path / "tasks" / "one")
    assert read_instances(tmp_path / "tasks") == [replace(instance, test_command=harbor.test_command(instance))]
    dockerfile = (folder / "environment" / "Dockerfile").read_text()
    assert dockerfile.startswith(f"FROM me/shapes:1\nWORKDIR {repository}\n")
    shown = (dockerfile, (folder / "instruction.md").read_text())
    assert not any("test_area" in text for text in shown)
    assert (folder / "instruction.md").read_text() == "area adds\n"


@pytest.mark.parametrize(("solved", "reward"), [(True, "1"), (False, "0")])
def test_the_scripts_of_a_harbor_folder_give_the_reward(
    repository: Path, tmp_path: Path, solved: bool, reward: str
) -> None:
    """Its scripts, with the folders they are mounted at replaced by those of this test."""
    folder = harbor.write_folder(instance_in(repository), tmp_path / "one")
    git = git_in(repository)
    git("tag", "v1")
    git("apply", str(folder / "environment" / "bug.patch"))
    cut = (folder / "environment" / "history.sh").read_text()
    (tmp_path / "history.sh").write_text(cut.replace("=/tmp/turnstile-git", f"={tmp_path}/cut"))
    (run,) = re.findall(r"^RUN (.*history.*)", (folder / "environment" / "Dockerfile").read_text(), re.MULTILINE)
    subprocess.run(["bash", "-c", run.replace("/tmp/history.sh", f"{tmp_path}/history.sh")], cwd=repository, check=True)
    assert (git("status", "--short"), git("tag")) == ("", "v1\n")
    assert git("rev-list", "--all", "--reflog", "--count") == "1\n"
    assert "width * height" not in git("log", "--all", "--patch")
    (repository / "test_shapes.py").write_text("def test_area(): pass\n")  # an agent's, and put back
    git("commit", "-qam", "work")
    scripts = ["solution/solve.sh"] * solved + ["tests/test.sh"]
    for script in scripts:
        text = (folder / script).read_text()
        for name in ("tests", "solution"):
            text = text.replace(f" /{name}/", f" {folder}/{name}/")
        text = text.replace("python3", sys.executable).replace("grade.py", f"grade.py {tmp_path}/logs")
        settings = json.loads((folder / "tests" / "instance.json").read_text())
        settings["test_command"] = settings["test_command"].replace("python3", sys.executable)
        (folder / "tests" / "instance.json").write_text(json.dumps(settings))
        (tmp_path / "run.sh").write_text(text)
        done = subprocess.run(["bash", str(tmp_path / "run.sh")], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "logs" / "reward.txt").read_text() == reward, done.stdout


def test_a_harbor_folder_by_others_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "hello"
    (folder / "environment").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "task.toml").write_text(
        'version = "1.0"\n[metadata]\ndifficulty = "easy"\n[agent]\ntimeout_sec = 120.0\n'
    )
    (folder / "instruction.md").write_text("Say hello.\n")
    (folder / "environment" / "Dockerfile").write_text("FROM ubuntu:24.04 AS x\nWORKDIR /app\n")
    with pytest.raises(TaskError, match=r"has tests/test\.sh, this one has not"):
        harbor.read_folder(folder)
    (folder / "tests" / "test.sh").write_text("#!/bin/bash\n")
    instance = harbor.read_folder(folder)
    assert (instance.id, instance.problem, instance.image) == ("hello", "Say hello.", "ubuntu:24.04")
    assert (instance.workdir, instance.test_command) == ("/app", "bash /tests/test.sh")
    assert instance.extra["settings"]["agent"] == {"timeout_sec": 120.0}


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"image": ""}, "needs an image"), ({"fail_to_pass": ()}, "names no test"), ({"log_parser": "my.log:x"}, "only")],
)
def test_an_instance_that_harbor_cannot_hold_is_refused(
    repository: Path, tmp_path: Path, changes: Any, says: str
) -> None:
    with pytest.raises(TaskError, match=says):
        harbor.write_folder(replace(instance_in(repository), **changes), tmp_path / "one")
