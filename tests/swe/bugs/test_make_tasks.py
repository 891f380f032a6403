from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from turnstile.errors import TaskError
from turnstile.sandboxes.base import Limits
from turnstile.sandboxes.local import LocalSandboxes
from turnstile.swe import edits
from turnstile.swe.bug import Bug, package_of
from turnstile.swe.bugs import mutate
from turnstile.swe.bugs.candidates import DEMO_FILTER, Filter, candidates
from turnstile.swe.bugs.make import Made, Progress, make
from turnstile.swe.bugs.profile import profile
from turnstile.swe.bugs.validate import steady
from turnstile.swe.grading.bench import Bench
from turnstile.swe.grading.grader import CodeGrader
from turnstile.swe.grading.judge import fault
from turnstile.swe.packages.source import fetch
from turnstile.tasks.base import load_tasks, write_tasks
from turnstile.types import Task


@pytest.fixture
def every(grader: CodeGrader) -> Mapping[str, Any]:
    """Arguments of `make` for every bug there is."""
    return {"per_function": 99, "grader": grader}


@pytest.fixture
def made(reference: Any, monkeypatch: pytest.MonkeyPatch) -> Made:
    monkeypatch.setenv("TURNSTILE_CACHE", str(reference.cache))
    return reference.made


def test_bugs_that_the_tests_notice_are_kept(made: Made, reference: Any) -> None:
    bugs = {task.id: Bug.of(task) for task in made.tasks}
    assert load_tasks(reference.out) == list(made.tasks)
    assert made.exhausted
    assert {bug.function for bug in bugs.values()} == {"clamp", "digits"}  # `unused` is not called by any test
    bug = bugs["tiny-1.0/tiny.clamp/l9-minmax-0"]
    assert (bug.old, bug.new, bug.buggy, bug.fixed) == ("min", "max", "return max(", "return min(")
    assert (bug.file, bug.line, bug.col) == ("src/tiny/__init__.py", 9, 11)
    assert (bug.shown, bug.hidden, bug.shown_lines()) == ((4, 9), (5, 6), [4, 7, 8, 9])
    assert set(bug.f2p) == {"tests/test_tiny.py::test_clamp[5-5]", "tests/test_tiny.py::test_clamp[12-10]"}
    assert bug.p2p == ("tests/test_tiny.py::test_clamp[-1-0]",)
    assert bug.message.startswith("assert ")
    assert (bug.licence, bug.requires, bug.kind, bug.unique) == ("MIT License", (), "minmax", True)


def test_other_bugs_are_rejected_with_a_reason(made: Made, reference: Any) -> None:
    side = [json.loads(line) for line in Path(f"{reference.out}.rejected.jsonl").read_text().splitlines()]
    reasons = {record["id"]: record["why"] for record in side}
    assert made.rejected == Counter(reasons.values())
    assert {reasons[name] for name in reasons if "/tiny.nothing/" in name} == {"survives"}
    assert reasons["tiny-1.0/tiny.digits/l14-compare-0"] == "hangs or crashes"  # while n < 9
    assert not set(reasons) & {task.id for task in made.tasks}


async def test_every_task_is_sound_and_its_fix_repairs_the_bug(made: Made, grader: CodeGrader) -> None:
    for task in made.tasks[::6]:
        bug, package = Bug.of(task), package_of(task)
        assert await fault(grader, bug, package) is None
        bugged, pristine = bug.bugged_text(package), bug.pristine_text(package)
        assert bugged != pristine
        line = bugged.split("\n")[bug.line - 1]
        assert line.replace(bug.buggy, bug.fixed, 1) == pristine.split("\n")[bug.line - 1]


@pytest.mark.slow
async def test_the_number_of_workers_changes_nothing(made: Made, every: Any, reference: Any, tmp_path: Path) -> None:
    await make("pypi:tiny==1.0", tmp_path / "one.jsonl", 2, workers=1, **every)
    assert (tmp_path / "one.jsonl").read_bytes() == reference.head(2)


async def test_a_larger_number_adds_to_the_file(
    made: Made, every: Any, reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    first = await make("pypi:tiny==1.0", out, 1, **every)
    assert (len(first.tasks), first.added, first.exhausted) == (1, 1, False)
    more = await make("pypi:tiny==1.0", out, 2, **every)
    assert (len(more.tasks), more.added) == (2, 1)
    assert out.read_bytes() == reference.head(2)

    async def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("nothing is left to judge")

    monkeypatch.setattr(Bench, "run", never)
    assert (await make("pypi:tiny==1.0", out, 2, **every)).added == 0


MAKE_THREE = """
import asyncio, sys
from turnstile.sandboxes.base import Limits
from turnstile.sandboxes.local import LocalSandboxes
from turnstile.swe.grading.grader import CodeGrader
from turnstile.swe.bugs.make import make
from turnstile.swe.grading.testrun import PRELOAD

grader = CodeGrader(LocalSandboxes(preload=PRELOAD), limits=Limits(seconds=60.0, cpu_seconds=1.0))
asyncio.run(make("pypi:tiny==1.0", sys.argv[1], 3, workers=1, per_function=99, grader=grader))
"""


@pytest.mark.slow
def test_a_killed_run_resumes_where_it_stopped(made: Made, every: Any, reference: Any, tmp_path: Path) -> None:
    out = tmp_path / "killed.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", MAKE_THREE, str(out)], env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    while process.poll() is None and not (out.exists() and out.read_bytes().count(b"\n") >= 1):
        time.sleep(0.005)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    with out.open("ab") as file:
        file.write(b'{"id": "tiny-1.0/torn')
    resumed = asyncio.run(make("pypi:tiny==1.0", out, 3, workers=1, **every))
    assert 0 < resumed.added < 3
    assert out.read_bytes() == reference.head(3)


async def test_functions_take_turns_and_are_capped(made: Made, grader: CodeGrader, tmp_path: Path) -> None:
    capped = await make("pypi:tiny==1.0", tmp_path / "out.jsonl", 99, per_function=1, grader=grader)
    assert sorted(Bug.of(task).function for task in capped.tasks) == ["clamp", "digits"]
    assert capped.exhausted


async def test_kinds_take_turns_within_a_function(made: Made, bench: Bench) -> None:
    package = fetch("pypi:tiny==1.0")
    rows = candidates(package, await profile(package, bench), 0, Filter(), 30)
    for row in rows:
        kinds = [candidate.mutant.kind for candidate in row]
        different = len(set(kinds))
        assert len(set(kinds[:different])) == different
    assert rows == candidates(package, await profile(package, bench), 0, Filter(), 30)
    assert rows != candidates(package, await profile(package, bench), 1, Filter(), 30)


async def test_only_bugs_that_pass_the_filter_are_tried(made: Made, grader: CodeGrader, tmp_path: Path) -> None:
    seen: list[Progress] = []
    wanted = Filter(kinds=("minmax", "int"), max_line=20, max_shown=5)
    few = await make("pypi:tiny==1.0", tmp_path / "out.jsonl", 99, wanted=wanted, grader=grader, progress=seen.append)
    assert few.tasks == ()  # the line with min() has 23 characters, digits shows 6 lines
    assert few.rejected == {"survives": 3}  # those of `nothing`
    assert [report.stage for report in seen] == [*["validate"] * 3, "done"]
    assert (seen[-1].judged, seen[-1].candidates) == (3, 3)
    with pytest.raises(TaskError, match="unknown bug kind 'typo'"):
        Filter(kinds=("typo",))


async def test_a_file_may_hold_tasks_of_several_packages(
    every: Any, reference: Any, source_of: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    write_tasks(out, [Task(id="other-1/x", env="swe")])
    with out.open("ab") as file:
        file.write(reference.head(1))
    second = await make(source_of(version="2.0"), out, 1, **every)
    assert [task.id.split("/")[0] for task in load_tasks(out)] == ["other-1", "tiny-1.0", "tiny-2.0"]
    assert len(second.tasks) == 1


def test_messages_do_not_depend_on_the_run() -> None:
    assert steady("<A object at 0x7f11aa22bb>") == "<A object at 0x...>"
    assert steady("<A at 0x7FAA> == <A at 0x") == "<A at 0x...> == <A at 0x..."
    assert steady("assert 0xff == 0x7f11aa22bb") == "assert 0xff == 0x..."
    assert steady("no '/dev/shm/turnstile-sandboxes-x1/sandbox-0/work/src/a.py' in") == "no 'src/a.py' in"


@pytest.mark.slow
async def test_candidates_without_a_verdict_are_tried_again(
    source_of: Any, sandboxes: LocalSandboxes, grader: CodeGrader, tmp_path: Path
) -> None:
    """A bug that makes the code wait is judged by a machine with time for it, and by no other."""
    code = "import time\n\n\ndef f(n):\n    if n > 3:\n        time.sleep(1.5)\n    return n > 3\n"
    tests = "from tiny import f\n\n\ndef test_f():\n    assert not f(3)\n"
    source = source_of({"src/tiny/__init__.py": code, "tests/test_tiny.py": tests})
    out, wanted = tmp_path / "out.jsonl", Filter(kinds=("compare",))
    hurried = CodeGrader(sandboxes, limits=Limits(seconds=1.0))
    first = await make(source, out, 99, wanted=wanted, grader=hurried)
    assert first.undecided > 0
    again = await make(source, out, 99, wanted=wanted, grader=grader)
    assert again.undecided == 0
    judged = [len(made.tasks) + sum(made.rejected.values()) for made in (first, again)]
    assert judged[1] - judged[0] == first.undecided


async def test_a_bug_whose_tests_depend_on_their_order_is_rejected(
    grader: CodeGrader, source_of: Any, tmp_path: Path
) -> None:
    """The tests agree in either order, and do not when those that notice the bug are run first, as they are graded."""
    tests = """
        from tiny import f
        ran = []

        def test_a():
            f(0)
            ran.append("a")

        def test_b():
            ran.append("b")
            assert f(1) == 4

        def test_c():
            f(0)
            assert ran[-1:] != ["a"]
    """
    source = source_of({"src/tiny/__init__.py": "def f(n):\n    return n + 3\n", "tests/test_tiny.py": tests})
    made = await make(source, tmp_path / "out.jsonl", 99, grader=grader)
    assert made.tasks == ()
    assert set(made.rejected) == {"no steady failure"}


def test_the_demo_filter_matches_the_docs() -> None:
    assert (DEMO_FILTER.max_line, DEMO_FILTER.max_shown, DEMO_FILTER.unique) == (56, 12, True)


@pytest.mark.slow
async def test_larger_bugs_are_made_and_check_out(made: Made, grader: CodeGrader, tmp_path: Path) -> None:
    found = await make(
        "pypi:tiny==1.0",
        tmp_path / "out.jsonl",
        99,
        wanted=Filter(kinds=("drop", "body", "pair")),
        per_function=99,
        grader=grader,
    )
    bugs = {task.id: Bug.of(task) for task in found.tasks}
    assert {bug.kind for bug in bugs.values()} == {"drop", "body", "pair"}
    for bug in bugs.values():
        package = package_of(bug)
        lines = bug.bugged_text(package).split("\n")
        assert lines[bug.shown[0] - 1].startswith(f"def {bug.function}(")
        assert lines[bug.shown[1] : bug.shown[1] + 2] in (["", ""], [""])
        assert bug.failing == len(bug.f2p)
        assert bug.lines == edits.changed_lines(bug.edits)
        assert await fault(grader, bug, package) is None
    pair = next(bug for bug in bugs.values() if bug.kind == "pair")
    assert len(pair.edits) == 2
    body = next(bug for bug in bugs.values() if bug.kind == "body" and bug.function == "clamp")
    assert (body.new, body.lines, body.unique) == ("    raise NotImplementedError\n", 3, False)


async def test_larger_kinds_only_add_candidates(made: Made, bench: Bench) -> None:
    package = fetch("pypi:tiny==1.0")
    measured = await profile(package, bench)
    few = candidates(package, measured, 0, Filter(), 30)
    assert few == candidates(package, measured, 0, Filter(kinds=mutate.TOKEN_KINDS), 30)
    more = candidates(package, measured, 0, Filter(kinds=mutate.KINDS), 30)
    assert {one.id for row in few for one in row} < {one.id for row in more for one in row}
