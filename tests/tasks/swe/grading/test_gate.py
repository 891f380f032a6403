from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turnstile.errors import TaskError
from turnstile.sandboxes.base import Sandbox
from turnstile.sandboxes.local import LocalSandboxes
from turnstile.tasks.swe.bug import Bug, package_of
from turnstile.tasks.swe.bugs.make import make
from turnstile.tasks.swe.grading.bench import Files
from turnstile.tasks.swe.grading.gate import CheckedTask, check, failed_before, record_of, write_record
from turnstile.tasks.swe.grading.grader import Grader
from turnstile.tasks.swe.grading.judge import judge_files
from turnstile.tasks.swe.grading.probes import PROBES, Probe, Scene, read_history
from turnstile.types import Task

CASES = """
    import unittest
    from tiny import clamp, digits

    class ClampTest(unittest.TestCase):
        def test_above(self):
            self.assertEqual(clamp(12, 0, 10), 10)

        def test_below(self):
            self.assertEqual(clamp(-1, 0, 10), 0)

    def test_digits():
        assert digits(123) == 3
"""


@pytest.fixture
def task(reference: Any, monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.setenv("TURNSTILE_CACHE", str(reference.cache))
    return next(task for task in reference.made.tasks if task.id.endswith("l9-minmax-0"))


async def wins(probe: Probe, task: Task, grader: Grader, sandboxes: LocalSandboxes) -> tuple[str, ...]:
    (found,) = await check([task], grader=grader, sandboxes=sandboxes, repeats=1, probes={"it": probe})
    assert (found.gold, found.empty, found.tried, found.unknown, found.trouble) == ((1,), (0,), ("it",), None, None)
    return found.wins


def scene_of(sandbox: Sandbox, task: Task, text: str) -> Scene:
    bug = Bug.of(task)
    return Scene(sandbox=sandbox, file=bug.file, text=text, tests=(*bug.f2p, *bug.p2p))


def honest(task: Task) -> Probe:
    bug = Bug.of(task)

    async def probe(scene: Scene) -> Files:
        return {scene.file: bug.pristine_text(package_of(bug)).encode()}

    return probe


async def test_what_repairs_wins(task: Task, grader: Grader, sandboxes: LocalSandboxes) -> None:
    """The control for the tests below: the way from a probe's files to a score of 1 is open."""
    assert await wins(honest(task), task, grader, sandboxes) == ("it",)


@pytest.mark.parametrize("name", PROBES)
async def test_a_cheat_scores_nothing(name: str, task: Task, grader: Grader, sandboxes: LocalSandboxes) -> None:
    assert await wins(PROBES[name], task, grader, sandboxes) == ()


@pytest.mark.parametrize("name", PROBES)
async def test_a_cheat_scores_nothing_with_test_cases(
    name: str, source_of: Any, grader: Grader, sandboxes: LocalSandboxes, tmp_path: Path
) -> None:
    source = source_of({"tests/test_tiny.py": CASES, "tests/test_flaky.py": None})
    made = await make(source, tmp_path / "out.jsonl", 1, grader=grader)
    assert await wins(PROBES[name], made.tasks[0], grader, sandboxes) == ()


@pytest.mark.parametrize("name", ["patch_runner", "slip_in_plugin", "expect_failure"])
async def test_such_cheats_do_win_where_nobody_looks(name: str, task: Task, sandboxes: LocalSandboxes) -> None:
    """Under a plain pytest run the cheat's exit code is that of success: the probes are no straw men."""
    bug, package = Bug.of(task), package_of(task)
    sandbox = await sandboxes.start(package.tree)
    try:
        text = bug.bugged_text(package)
        scene = scene_of(sandbox, task, text)
        codes = []
        for files in ({bug.file: text.encode()}, await PROBES[name](scene)):
            for path, data in files.items():
                assert data is not None
                await sandbox.write(path, data)
            run = await sandbox.exec(
                ["python", "-m", "pytest", "-p", "no:cacheprovider", *bug.f2p], env=package.environment
            )
            codes.append(run.exit_code)
    finally:
        await sandbox.close()
    assert codes == [1, 0]


async def test_history_is_found_where_there_is_some(task: Task, grader: Grader, sandboxes: LocalSandboxes) -> None:
    bug, package = Bug.of(task), package_of(task)
    buggy = bug.bugged_text(package)
    sandbox = await sandboxes.start(package.tree)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    try:
        for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "later"]):
            assert (await sandbox.exec([*git, *arguments])).exit_code == 0
        await sandbox.write(bug.file, buggy.encode())
        files = await read_history(scene_of(sandbox, task, buggy))
    finally:
        await sandbox.close()
    assert files == {bug.file: bug.pristine_text(package).encode()}
    assert (await judge_files(grader, bug, package, files)).resolved


async def test_flaky_tests_are_named(source_of: Any, grader: Grader, sandboxes: LocalSandboxes, tmp_path: Path) -> None:
    marker = tmp_path / "seen"
    source = source_of({"tests/test_flaky.py": None})
    (task,) = (await make(source, tmp_path / "out.jsonl", 1, grader=grader)).tasks
    tree = tmp_path / "changed"
    shutil.copytree(package_of(task).tree, tree)
    other = f"import pathlib\n\n\ndef test_it():\n    seen = pathlib.Path({str(marker)!r})\n    there = seen.exists()\n"
    other += "    seen.touch()\n    assert not there\n"
    (tree / "tests" / "test_other.py").write_text(other)
    flaky = Task(id="flaky", env="swe", data={**task.data, "p2p": ["tests/test_other.py::test_it"]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("turnstile.tasks.swe.grading.gate.package_of", lambda bug: replace(package_of(bug), tree=tree))
        found = (await check([flaky], grader=grader, sandboxes=sandboxes, probed=0))[0]
    assert found.flaky == ("tests/test_other.py::test_it",)
    assert found.why == "flaky: tests/test_other.py::test_it"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"f2p": ["tests/test_tiny.py::test_broken"]}, "the repair scores 0: tests/test_tiny.py::test_broken (assert"),
        ({"f2p": ["tests/test_tiny.py::test_nothing"]}, "no change scores 1: tests/test_tiny.py::test_nothing passes"),
        ({"p2p": ["tests/test_tiny.py::test_clamp[5-5]"]}, "test_clamp[5-5] is to pass and does not"),
        ({"digest": "f" * 16}, "the source tree differs"),
    ],
)
async def test_what_is_off_is_said(
    task: Task, grader: Grader, sandboxes: LocalSandboxes, changes: Mapping[str, Any], why: str
) -> None:
    off = Task(id="off", env="swe", data={**task.data, "f2p": ["tests/test_tiny.py::test_clamp[12-10]"], **changes})
    (found,) = await check([off], grader=grader, sandboxes=sandboxes, repeats=1, probes={})
    assert why in str(found.why)
    assert found.unknown is None


async def test_what_breaks_is_unknown_and_no_failure(task: Task, tmp_path: Path) -> None:
    closed = LocalSandboxes(root=tmp_path)
    await closed.close()
    (found,) = await check([task], grader=Grader(closed), sandboxes=closed)
    assert (found.why, found.unknown) == (None, "these sandboxes were closed")


async def test_probes_and_the_random_agent_are_tried_on_some(
    reference: Any, task: Task, grader: Grader, sandboxes: LocalSandboxes
) -> None:
    played: list[str] = []

    async def play(task: Task) -> bool:
        played.append(task.id)
        return len(played) == 1

    tasks = reference.made.tasks[:4]
    found = await check(
        tasks, grader=grader, sandboxes=sandboxes, repeats=2, probed=2, probes={"it": honest(tasks[0])}, play=play
    )
    assert [one.task for one in found] == list(tasks)
    assert sorted(played) == sorted(one.task.id for one in found if one.tried)
    assert sorted(str(one.random) for one in found) == ["0", "1", "None", "None"]
    assert {one.gold for one in found} == {(1, 1)}
    assert {one.empty for one in found} == {(0, 0)}
    assert [one.why for one in found if one.tried] == ["a cheat scores 1: it"] * 2


def test_what_failed_is_noted_beside_the_file(task: Task, tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    other = Task(id="other", env="swe", data=task.data)
    write_record(file, [CheckedTask(task=task, trouble="bad"), CheckedTask(task=other)])
    assert failed_before(file, [task, other]) == {task.id: "bad"}
    changed = Task(id=task.id, env="swe", data={**task.data, "difficulty": 99})
    assert failed_before(file, [changed]) == {}
    assert json.loads(record_of(file).read_text())["checked"] == 2
    record_of(file).write_text('{"failed": ')
    with pytest.raises(TaskError, match=r"cannot be read .*; check again: turnstile tasks check "):
        failed_before(file, [task])
    assert failed_before(tmp_path / "unchecked.jsonl", [task]) == {}
