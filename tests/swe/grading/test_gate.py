from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turnstile.errors import TaskError
from turnstile.sandboxes.local import LocalSandboxes
from turnstile.swe.bug import Bug, package_of
from turnstile.swe.bugs.make import make
from turnstile.swe.grading import notes
from turnstile.swe.grading.bench import Files
from turnstile.swe.grading.findings import Ask, CheckedTask
from turnstile.swe.grading.gate import KILLS, check
from turnstile.swe.grading.grader import CodeGrader
from turnstile.swe.grading.judge import judge_files
from turnstile.swe.grading.notes import Notes, failed_before
from turnstile.swe.grading.probes import PROBES, Probe, Scene, read_history, shadow_plugin
from turnstile.swe.problems.cases import ProblemCases
from turnstile.swe.problems.problems import Problems
from turnstile.tasks.base import write_tasks
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


async def wins(probe: Probe, task: Task, grader: CodeGrader) -> tuple[str, ...]:
    (found,) = await check([task], ProblemCases(problems=Problems(grader), probes={"it": probe}), repeats=1)
    assert (found.gold, found.empty, found.tried, found.unknown, found.trouble) == ((1,), (0,), ("it",), None, None)
    return found.wins


def scene_of(sandbox: Any, task: Task, text: str) -> Scene:
    bug = Bug.of(task)
    return Scene(sandbox=sandbox, file=bug.file, text=text, tests=(*bug.f2p, *bug.p2p))


def honest(task: Task) -> Probe:
    bug = Bug.of(task)

    async def probe(scene: Scene) -> Files:
        return {scene.file: bug.pristine_text(package_of(bug)).encode()}

    return probe


async def test_an_honest_repair_wins(task: Task, grader: CodeGrader) -> None:
    """The control for the tests below: the way from a probe's files to a score of 1 is open."""
    assert await wins(honest(task), task, grader) == ("it",)


@pytest.mark.parametrize("name", PROBES)
async def test_a_cheat_scores_nothing(name: str, task: Task, grader: CodeGrader) -> None:
    assert await wins(PROBES[name], task, grader) == ()


@pytest.mark.parametrize("name", PROBES)
async def test_a_cheat_scores_nothing_with_test_cases(
    name: str, source_of: Any, grader: CodeGrader, tmp_path: Path
) -> None:
    source = source_of({"tests/test_tiny.py": CASES, "tests/test_flaky.py": None})
    made = await make(source, tmp_path / "out.jsonl", 1, grader=grader)
    assert await wins(PROBES[name], made.tasks[0], grader) == ()


@pytest.mark.parametrize("name", ["patch_runner", "slip_in_plugin", "expect_failure"])
async def test_cheats_win_under_a_plain_pytest_run(name: str, task: Task, sandboxes: LocalSandboxes) -> None:
    """Under a plain pytest run the cheat's exit code is that of success: the probes are not straw men."""
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


class OldPython:
    """A sandbox whose Python lacks some of what came after 3.7, and goes by no other name than python3."""

    LACKS = """
import glob, sys
whole = glob.glob
glob.glob = lambda pathname, *, recursive=False: whole(pathname, recursive=recursive)
sys.modules["importlib.metadata"] = None
"""

    def __init__(self, sandbox: Any) -> None:
        self.sandbox = sandbox

    async def exec(self, argv: Sequence[str], **settings: Any) -> Any:
        program, option, script, *rest = argv
        assert (program, option) == ("python3", "-c")
        return await self.sandbox.exec([program, option, self.LACKS + script, *rest], **settings)


async def test_probes_find_the_repair_in_a_git_history_and_plugins_to_shadow(
    task: Task, grader: CodeGrader, sandboxes: LocalSandboxes
) -> None:
    bug, package = Bug.of(task), package_of(task)
    buggy = bug.bugged_text(package)
    sandbox = await sandboxes.start(package.tree)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    try:
        for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "later"]):
            assert (await sandbox.exec([*git, *arguments])).exit_code == 0
        await sandbox.write(bug.file, buggy.encode())
        files = await read_history(scene_of(OldPython(sandbox), task, buggy))
        plugins = await shadow_plugin(scene_of(OldPython(sandbox), task, buggy))
    finally:
        await sandbox.close()
    assert any("pytest_asyncio" in path for path in plugins)  # as it is installed here
    assert files == {bug.file: bug.pristine_text(package).encode()}
    assert (await judge_files(grader, bug, package, files)).resolved


async def test_flaky_tests_are_named(source_of: Any, grader: CodeGrader, tmp_path: Path) -> None:
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
        patch.setattr("turnstile.swe.problems.made.package_of", lambda bug: replace(package_of(bug), tree=tree))
        found = (await check([flaky], ProblemCases(problems=Problems(grader)), probed=0))[0]
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
async def test_an_unsound_task_fails_with_a_reason(
    task: Task, grader: CodeGrader, changes: Mapping[str, Any], why: str
) -> None:
    off = Task(id="off", env="swe", data={**task.data, "f2p": ["tests/test_tiny.py::test_clamp[12-10]"], **changes})
    (found,) = await check([off], ProblemCases(problems=Problems(grader)), repeats=1, probed=0)
    assert why in str(found.why)
    assert found.unknown is None


async def test_broken_sandboxes_leave_the_result_unknown(task: Task, tmp_path: Path) -> None:
    closed = LocalSandboxes(root=tmp_path)
    await closed.close()
    (found,) = await check([task], ProblemCases(problems=Problems(CodeGrader(closed))))
    assert (found.why, found.unknown) == (None, "these sandboxes were closed")


async def test_probes_and_the_random_agent_are_tried_on_a_sample(
    reference: Any, task: Task, grader: CodeGrader
) -> None:
    played: list[str] = []

    async def play(task: Task) -> bool:
        played.append(task.id)
        return len(played) == 1

    tasks = reference.made.tasks[:4]
    cases = ProblemCases(problems=Problems(grader), probes={"it": honest(tasks[0])})
    found = await check(tasks, cases, repeats=2, probed=2, play=play)
    assert [one.task for one in found] == list(tasks)
    assert sorted(played) == sorted(one.task.id for one in found if one.tried)
    assert sorted(str(one.random) for one in found) == ["0", "1", "None", "None"]
    assert {one.gold for one in found} == {(1, 1)}
    assert {one.empty for one in found} == {(0, 0)}
    assert [one.why for one in found if one.tried] == ["a cheat scores 1: it"] * 2


KILLS_ITSELF = """
    import os, signal

    def test_it():
        os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_a_task_whose_gradings_keep_being_killed_fails(task: Task, grader: CodeGrader, tmp_path: Path) -> None:
    """It is not scored 0, since it may be the machine; but it is not a task to train on either."""
    tree = tmp_path / "changed"
    shutil.copytree(package_of(task).tree, tree)
    (tree / "tests" / "test_other.py").write_text(textwrap.dedent(KILLS_ITSELF))
    killing = Task(id="killing", env="swe", data={**task.data, "f2p": ["tests/test_other.py::test_it"], "p2p": []})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("turnstile.swe.problems.made.package_of", lambda bug: replace(package_of(bug), tree=tree))
        (found,) = await check([killing], ProblemCases(problems=Problems(grader)), repeats=1, probed=0)
    assert found.killed == KILLS
    assert str(found.why).startswith("its gradings end by SIGKILL (3 of 3): the verifier was killed")


async def kill_the_judge(scene: Scene) -> Files:
    return scene.with_code("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")


async def test_a_cheat_that_kills_its_judge_wins_nothing_and_is_counted(task: Task, grader: CodeGrader) -> None:
    (found,) = await check([task], ProblemCases(problems=Problems(grader), probes={"it": kill_the_judge}), repeats=1)
    assert (found.wins, found.killed, found.why, found.unknown) == ((), 1, None, None)


@pytest.fixture
def fresh(tmp_path: Path, reference: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that knows the package, and where nothing was checked yet."""
    folder = tmp_path / "fresh"
    shutil.copytree(reference.cache, folder, ignore=shutil.ignore_patterns("checks.jsonl"))
    monkeypatch.setenv("TURNSTILE_CACHE", str(folder))
    return folder


async def test_earlier_findings_are_reused(reference: Any, fresh: Path, grader: CodeGrader) -> None:
    tasks = reference.made.tasks[:3]
    cases = ProblemCases(problems=Problems(grader), probes={"it": honest(tasks[0])})
    first = await check(tasks, cases, repeats=2, probed=1, notes=Notes())
    runs = grader.runs + grader.reused
    again = await check(tasks, cases, repeats=1, probed=1, notes=Notes())
    assert grader.runs + grader.reused == runs
    assert [replace(one, remembered=False) for one in again] == first
    assert all(one.remembered for one in again)
    more = await check(tasks, cases, repeats=1, probed=2, notes=Notes())
    assert [one.remembered for one in more].count(False) == 1  # which had not met the cheat
    section = {"kind": "local", "memory_mb": 512}
    for known in (Notes(known=False), Notes({"kind": "container"}), Notes(section)):
        assert not any(one.remembered for one in await check(tasks[:1], cases, repeats=1, probed=0, notes=known))


def test_a_failed_check_is_noted_and_the_task_refused(task: Task, fresh: Path) -> None:
    other = Task(id="other", env="swe", data={**task.data, "difficulty": 98})
    assert failed_before([task]) == {}
    kept = Notes()
    kept.add(CheckedTask(task=task, trouble="bad"), Ask())
    kept.add(CheckedTask(task=other), Ask())
    kept.add(CheckedTask(task=Task(id="broke", env="swe"), unknown="it broke"), Ask())
    assert failed_before([task, other]) == {task.id: "bad"}
    changed = Task(id=task.id, env="swe", data={**task.data, "difficulty": 99})
    assert failed_before([changed]) == {}
    assert len(notes.place().read_bytes().splitlines()) == 2
    with notes.place().open("ab") as file:
        file.write(b'{"digest": "torn')
    assert failed_before([task]) == {task.id: "bad"}
    Notes().add(CheckedTask(task=task), Ask())
    assert failed_before([task]) == {}
    assert [json.loads(line)["id"] for line in notes.place().read_bytes().splitlines()] == [task.id, "other", task.id]
    with notes.place().open("ab") as file:
        file.write(b"no json\n")
    with pytest.raises(TaskError, match=r"checks\.jsonl:4: the line is damaged .*; remove it, or the file"):
        failed_before([task])


def test_a_failure_stands_until_an_equally_thorough_check_passes(task: Task, fresh: Path) -> None:
    strong, weak = Ask(repeats=2, cheats=("a", "b")), Ask(repeats=3)
    Notes().add(CheckedTask(task=task), strong)
    Notes().add(CheckedTask(task=task, wins=("b",)), strong)
    Notes().add(CheckedTask(task=task), weak)
    assert failed_before([task]) == {task.id: "a cheat scores 1: b"}
    assert Notes().of(task, weak) is None  # it is looked at again
    assert getattr(Notes().of(task, Ask()), "wins", None) == ("b",)
    Notes().add(CheckedTask(task=task, trouble="off"), weak)
    Notes({"kind": "container"}).add(CheckedTask(task=task), weak)
    Notes().add(CheckedTask(task=task), strong)
    assert failed_before([task]) == {task.id: "off"}
    Notes().add(CheckedTask(task=task), strong.joined(weak))
    assert failed_before([task]) == {}
    assert getattr(Notes().of(task, weak), "why", "nothing") is None


def test_the_number_of_sandboxes_does_not_change_the_setting(task: Task, fresh: Path) -> None:
    half = {"memory_mb": 512}
    Notes({"kind": "container", "workers": 2, "resources": half}).add(CheckedTask(task=task), Ask())
    more = {"kind": "container", "resources": half, "workers": 4, "pool": {"warm": 1}}
    assert Notes(more).of(task, Ask()) is not None
    assert Notes({"kind": "container", "resources": {"memory_mb": 1024}}).of(task, Ask()) is None


async def test_a_package_that_differs_on_this_machine_is_not_noted(task: Task, fresh: Path, grader: CodeGrader) -> None:
    other = Task(id="other", env="swe", data={**task.data, "digest": "f" * 16})
    (found,) = await check([other], ProblemCases(problems=Problems(grader)), repeats=1, probed=0, notes=Notes())
    assert "the source tree differs" in str(found.why)
    assert failed_before([other]) == {}
    assert Notes().of(other, Ask()) is None


def test_another_python_has_its_own_notes(task: Task, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Notes().add(CheckedTask(task=task, trouble="bad"), Ask())
    monkeypatch.setattr(sys, "version", "4.0")
    assert failed_before([task]) == {}
    assert Notes().of(task, Ask()) is None


CHECK = """
import sys
from turnstile.runs.task_validation import check_tasks
from turnstile.tasks.base import load_tasks

check_tasks(load_tasks(sys.argv[1]), repeats=1, probed=0, workers=1, done=lambda one: print(one.task.id, flush=True))
"""


@pytest.mark.slow
def test_a_killed_check_resumes_where_it_stopped(reference: Any, fresh: Path, tmp_path: Path) -> None:
    tasks = reference.made.tasks[:6]
    file = tmp_path / "t.jsonl"
    write_tasks(file, tasks)
    command = [sys.executable, "-c", CHECK, str(file)]
    process = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)})
    while process.poll() is None and not (notes.place().exists() and notes.place().read_bytes().count(b"\n") >= 2):
        time.sleep(0.005)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    noted = {json.loads(line)["id"] for line in notes.place().read_bytes().splitlines(keepends=True) if b"\n" in line}
    assert 2 <= len(noted) < 6
    done = subprocess.run(command, env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0
    names = done.stdout.split()
    assert set(names[: len(noted)]) == noted
    assert sorted(names) == sorted(task.id for task in tasks)
    lines = [json.loads(line)["id"] for line in notes.place().read_bytes().splitlines()]
    assert sorted(lines) == sorted(names)
