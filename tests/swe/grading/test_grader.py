from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from turnstile.errors import SandboxError, TaskError, VerifierError
from turnstile.sandboxes.base import ExecResult, Limits
from turnstile.sandboxes.bubblewrap import BubblewrapSandboxes
from turnstile.sandboxes.containers.provider import ContainerSandboxes
from turnstile.sandboxes.local import LocalSandboxes
from turnstile.swe.grading.grader import CodeGrader
from turnstile.swe.grading.testrun import PRELOAD, REQUEST, VERIFIER, Report, read_report, run_tests
from turnstile.swe.tree import can_change_tests

SHAPES = """\
def area(width, height):
    return width * height


def names():
    return ["a", "b"]
"""
TESTS = """\
import pytest

import shapes


def test_area():
    assert shapes.area(2, 3) == 6


def test_square(side):
    assert shapes.area(side, side) == side * side


@pytest.mark.parametrize("name", shapes.names())
def test_name(name):
    assert len(name) == 1


class TestMany:
    def test_inner(self):
        assert shapes.area(1, 1) == 1
"""
CONFTEST = "import pytest\n\n\n@pytest.fixture\ndef side():\n    return 4\n"
BUG = {"shapes.py": SHAPES.replace("*", "+").encode()}
AREA, SQUARE = "tests/test_shapes.py::test_area", "tests/test_shapes.py::test_square"
NAMES = ("tests/test_shapes.py::test_name[a]", "tests/test_shapes.py::test_name[b]")


@pytest.fixture
def template(tmp_path: Path) -> Path:
    folder = tmp_path / "template"
    (folder / "tests").mkdir(parents=True)
    (folder / "shapes.py").write_text(SHAPES)
    (folder / "tests" / "test_shapes.py").write_text(TESTS)
    (folder / "tests" / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option -x\n")
    return folder


async def outcomes_of(sandboxes: LocalSandboxes, folder: Path, tests: str, ids: list[str] | None = None) -> Report:
    """Run a test file in a folder of its own."""
    folder = folder / "alone"
    folder.mkdir()
    (folder / "test_it.py").write_text(tests)
    sandbox = await sandboxes.start(folder)
    try:
        return await run_tests(sandbox, ids)
    finally:
        await sandbox.close()


async def test_a_repair_is_resolved_and_a_bug_is_not(grader: CodeGrader, template: Path) -> None:
    ids = {"fail_to_pass": [AREA, SQUARE], "pass_to_pass": NAMES}
    good = await grader.grade(template, {}, **ids)
    assert (good.resolved, good.fail_to_pass_passed, good.pass_to_pass_passed) == (True, 2, 2)
    assert (good.fail_to_pass_total, good.pass_to_pass_total) == (2, 2)
    assert good.messages == {}
    bad = await grader.grade(template, BUG, **ids)
    assert (bad.resolved, bad.fail_to_pass_passed, bad.pass_to_pass_passed) == (False, 0, 2)
    assert bad.messages == {AREA: "assert 5 == 6", SQUARE: "assert 8 == (4 * 4)"}
    assert (good.failed, bad.failed) == ((), (AREA, SQUARE))


async def test_edits_of_tests_are_ignored_and_counted(grader: CodeGrader, template: Path) -> None:
    cheat = {
        **BUG,
        "tests/test_shapes.py": b"def test_area(): pass\ndef test_square(): pass\n",
        "tests/conftest.py": b"import shapes\nshapes.area = lambda a, b: a * b\n",
        "conftest.py": b"import shapes\nshapes.area = lambda a, b: a * b\n",
        "__pycache__/shapes.cpython-311.pyc": b"",
    }
    verdict = await grader.grade(template, cheat, fail_to_pass=[AREA, SQUARE])
    assert not verdict.resolved
    assert len(verdict.ignored) == 4
    assert "shapes.py" not in verdict.ignored


@pytest.mark.parametrize(
    ("path", "ignored"),
    [
        ("pkg/core.py", False),
        ("pkg/testing.py", False),
        ("pkg/contest.py", False),
        ("pkg/test_core.py", True),
        ("pkg/core_test.py", True),
        ("tests/data/x.json", True),
        ("pkg/test/helpers.py", True),
        ("conftest.py", True),
        ("sitecustomize.py", True),
        ("x.pth", True),
        ("src/x-1.0.dist-info/entry_points.txt", True),
        ("x.egg-info/entry_points.txt", True),
    ],
)
def test_paths_that_can_change_tests_are_ignored(path: str, ignored: bool) -> None:
    assert can_change_tests(path) is ignored


async def test_a_graded_file_is_protected_whatever_its_name(grader: CodeGrader, template: Path) -> None:
    (template / "checks.py").write_text("import shapes\n\n\ndef test_it():\n    assert shapes.area(2, 3) == 6\n")
    edit = {**BUG, "./checks.py": b"def test_it(): pass\n"}
    verdict = await grader.grade(template, edit, fail_to_pass=["checks.py::test_it"])
    assert (verdict.resolved, verdict.ignored) == (False, ("./checks.py",))


async def test_equal_states_are_run_once(grader: CodeGrader, template: Path) -> None:
    first, second = await asyncio.gather(*(grader.grade(template, BUG, fail_to_pass=[AREA]) for _ in range(2)))
    assert sorted((first.from_memo, second.from_memo)) == [False, True]
    assert (await grader.grade(template, dict(BUG), fail_to_pass=[AREA])).from_memo
    assert grader.runs == 1
    pristine = await grader.grade(template, {}, fail_to_pass=[AREA])
    undone = await grader.grade(template, {"shapes.py": SHAPES.encode()}, fail_to_pass=[AREA])
    assert (pristine.from_memo, undone.from_memo, undone.resolved) == (False, True, True)
    assert not (await grader.grade(template, BUG, fail_to_pass=[SQUARE])).from_memo
    assert not (await grader.grade(template, BUG, fail_to_pass=[AREA], env={"X": "1"})).from_memo
    assert (grader.runs, grader.reused) == (4, 3)


async def test_the_memory_is_bounded(sandboxes: LocalSandboxes, template: Path) -> None:
    grader = CodeGrader(sandboxes, memo=1)
    await grader.grade(template, BUG, fail_to_pass=[AREA])
    await grader.grade(template, {}, fail_to_pass=[AREA])
    assert not (await grader.grade(template, BUG, fail_to_pass=[AREA])).from_memo
    assert (await grader.grade(template, BUG, fail_to_pass=[AREA])).from_memo


async def test_a_cancelled_caller_does_not_disturb_the_others(grader: CodeGrader, template: Path) -> None:
    impatient = asyncio.ensure_future(grader.grade(template, BUG, fail_to_pass=[AREA]))
    patient = asyncio.ensure_future(grader.grade(template, BUG, fail_to_pass=[AREA]))
    await asyncio.sleep(0.01)
    impatient.cancel()
    assert not (await patient).resolved
    assert impatient.cancelled()
    assert grader.runs == 1


async def test_runs_do_not_see_each_others_files(grader: CodeGrader, template: Path) -> None:
    (template / "tests" / "test_trace.py").write_text(
        "import os, pathlib\n\n\ndef test_trace():\n    seen = os.path.exists('trace')\n"
        "    pathlib.Path('trace').touch()\n    pathlib.Path('shapes.py').write_text('')\n    assert not seen\n"
    )
    trace = "tests/test_trace.py::test_trace"
    for number in range(2):
        files = {"note.txt": str(number).encode()}
        assert (await grader.grade(template, files, fail_to_pass=[trace])).resolved
    assert (template / "shapes.py").read_text() == SHAPES
    assert (await grader.grade(template, {}, fail_to_pass=[AREA])).resolved


async def test_added_and_removed_files_count(grader: CodeGrader, template: Path) -> None:
    moved: dict[str, bytes | None] = {
        "shapes.py": None,
        "shapes/__init__.py": SHAPES.replace("width * height", "7").encode(),
    }
    report = await grader.run_tests(template, moved, [AREA])
    assert report.messages == {AREA: "assert 7 == 6"}
    report = await grader.run_tests(template, {"shapes.py": None}, [AREA])
    assert report.outcomes == {AREA: "error"}
    assert "No module named 'shapes'" in report.messages[AREA]


@pytest.mark.parametrize("path", ["/etc/passwd", "../x.py", "a/../../x.py"])
async def test_changes_outside_the_template_are_refused(grader: CodeGrader, template: Path, path: str) -> None:
    for data in (b"", None):
        with pytest.raises(ValueError, match=r"leaves|root"):
            await grader.bench.run(template, {path: data}, [AREA])


async def test_a_path_that_cannot_be_removed_gives_no_verdict(grader: CodeGrader, template: Path) -> None:
    with pytest.raises(SandboxError, match=r"could not be removed: .*tests"):
        await grader.bench.run(template, {"tests": None}, [AREA])


async def test_byte_code_of_the_template_is_never_stale(grader: CodeGrader, template: Path) -> None:
    """Same size, and the same time of change would do no harm either: byte code is checked by hash."""
    for area, resolved in (("width * height", True), ("width + height", False), ("width * height", True)):
        files = {"shapes.py": SHAPES.replace("width * height", area).encode()}
        assert (await grader.grade(template, files, fail_to_pass=[AREA])).resolved is resolved


async def test_the_whole_suite_is_run_and_vanished_tests_are_missing(grader: CodeGrader, template: Path) -> None:
    whole = await grader.run_tests(template, {})
    assert set(whole.outcomes.values()) == {"passed"}
    assert len(whole.outcomes) == 5
    backwards = await grader.run_tests(template, {}, reverse=True)
    assert list(backwards.outcomes) == list(whole.outcomes)[::-1]
    files = await grader.run_tests(template, {}, ["tests/test_shapes.py"])
    assert files.outcomes == whole.outcomes
    fewer = {"shapes.py": SHAPES.replace('["a", "b"]', '["b"]').encode()}
    report = await grader.run_tests(template, fewer, [AREA, *NAMES])
    assert report.outcomes == {AREA: "passed", NAMES[0]: "missing", NAMES[1]: "passed"}
    assert report.problem is None


async def test_many_tests_are_chosen_from_their_files(grader: CodeGrader, template: Path) -> None:
    (template / "tests" / "test_more.py").write_text(
        "import pytest\n\n\n@pytest.mark.parametrize('n', range(80))\ndef test_n(n):\n    assert n != 7\n"
    )
    ids = [f"tests/test_more.py::test_n[{n}]" for n in range(70)]
    report = await grader.run_tests(template, {}, ids)
    assert sorted(report.outcomes) == sorted(ids)
    assert [name for name in ids if not report.passed(name)] == [ids[7]]


async def test_an_import_path_may_lie_below_the_root(grader: CodeGrader, tmp_path: Path) -> None:
    template = tmp_path / "layout"
    (template / "src").mkdir(parents=True)
    (template / "src" / "shapes.py").write_text(SHAPES)
    (template / "test_area.py").write_text("import shapes\n\n\ndef test_area():\n    assert shapes.area(2, 3) == 6\n")
    env = {"PYTHONPATH": "src"}
    assert (await grader.grade(template, {}, fail_to_pass=["test_area.py::test_area"], env=env)).resolved
    bug = {"src/shapes.py": BUG["shapes.py"]}
    assert not (await grader.grade(template, bug, fail_to_pass=["test_area.py::test_area"], env=env)).resolved


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
async def test_grading_in_bubblewrap(template: Path, tmp_path: Path) -> None:
    provider = BubblewrapSandboxes(root=tmp_path / "home", preload=PRELOAD)
    try:
        grader = CodeGrader(provider)
        assert (await grader.grade(template, {}, fail_to_pass=[AREA], pass_to_pass=[SQUARE])).resolved
        assert not (await grader.grade(template, BUG, fail_to_pass=[AREA])).resolved
    finally:
        await provider.close()


RUNNER = ("turnstile", "pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")


async def test_grading_in_containers(template: Path, containers: Callable[..., ContainerSandboxes]) -> None:
    grader = CodeGrader(containers(carry=RUNNER))
    assert (await grader.grade(template, {}, fail_to_pass=[AREA], pass_to_pass=[SQUARE])).resolved
    assert not (await grader.grade(template, BUG, fail_to_pass=[AREA])).resolved


async def test_a_container_without_pytest_gives_a_clear_error(
    template: Path, containers: Callable[..., ContainerSandboxes]
) -> None:
    grader = CodeGrader(containers(carry=["turnstile"]))
    with pytest.raises(VerifierError, match=r"could not be compiled: .*; the sandbox's Python needs pytest"):
        await grader.grade(template, {}, fail_to_pass=[AREA])


async def test_a_request_that_cannot_be_graded_is_refused(grader: CodeGrader, template: Path, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="FAIL_TO_PASS"):
        await grader.grade(template, {}, fail_to_pass=[])
    with pytest.raises(TaskError, match="no template folder"):
        await grader.grade(tmp_path / "none", {}, fail_to_pass=[AREA])
    with pytest.raises(ValueError, match="leaves the template"):
        await grader.grade(template, {"../x.py": b""}, fail_to_pass=[AREA])


async def test_broken_sandboxes_give_no_verdict_and_are_not_remembered(template: Path, tmp_path: Path) -> None:
    closed = LocalSandboxes(root=tmp_path / "home")
    await closed.close()
    grader = CodeGrader(closed)
    for _ in range(2):
        with pytest.raises(SandboxError, match="closed"):
            await grader.grade(template, {}, fail_to_pass=[AREA])
    assert grader.runs == 2


EVERY = """\
import pytest


@pytest.fixture
def broken():
    raise RuntimeError("no fixture")


@pytest.fixture
def dirty():
    yield
    raise RuntimeError("no teardown")


def test_passed():
    pass


def test_failed():
    raise ValueError("first line\\nsecond line")


def test_setup(broken):
    pass


def test_teardown(dirty):
    pass


def test_skipped():
    pytest.skip("no")


@pytest.mark.xfail
def test_xfailed():
    assert False


@pytest.mark.xfail
def test_xpassed():
    pass


@pytest.mark.xfail(strict=True)
def test_strict():
    pass


def test_unspeakable():
    class Mute(Exception):
        def __str__(self):
            raise OSError

    raise Mute
"""


async def test_every_outcome_is_reported(sandboxes: LocalSandboxes, tmp_path: Path) -> None:
    report = await outcomes_of(sandboxes, tmp_path, EVERY)
    found = {name.removeprefix("test_it.py::test_"): outcome for name, outcome in report.outcomes.items()}
    assert found == {
        "passed": "passed",
        "failed": "failed",
        "setup": "error",
        "teardown": "error",
        "skipped": "skipped",
        "xfailed": "xfailed",
        "xpassed": "xpassed",
        "strict": "failed",
        "unspeakable": "failed",
    }
    counted = {name.removeprefix("test_it.py::test_") for name in report.outcomes if report.passed(name)}
    assert counted == {"passed", "xfailed", "xpassed"}
    assert report.messages["test_it.py::test_failed"] == "ValueError: first line"
    assert report.messages["test_it.py::test_setup"] == "RuntimeError: no fixture"
    assert report.problem is None


async def test_a_hang_is_a_failure_of_the_code(sandboxes: LocalSandboxes, tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    tests = "def test_a(): pass\ndef test_b():\n    while True: pass\ndef test_c(): pass\n"
    (tmp_path / "alone" / "test_it.py").write_text(tests)
    grader = CodeGrader(sandboxes, limits=Limits(seconds=60.0, cpu_seconds=1.0))
    ids = [f"test_it.py::test_{letter}" for letter in "abc"]
    verdict = await grader.grade(tmp_path / "alone", {}, fail_to_pass=ids)
    assert (verdict.resolved, verdict.fail_to_pass_passed, verdict.timed_out) == (False, 1, True)
    assert "timed out" in verdict.messages[ids[1]]
    report = await grader.run_tests(tmp_path / "alone", {}, ids)
    assert report.outcomes == {ids[0]: "passed", ids[1]: "failed", ids[2]: "missing"}
    assert (grader.runs, grader.reused) == (1, 1)  # used-up processor time is a fact


NAP = """\
import pathlib, time


def test_nap():
    seen = pathlib.Path({marker!r})
    if {always} or not seen.exists():
        seen.touch()
        time.sleep(600)
"""


@pytest.mark.parametrize(("always", "seconds"), [(False, 5.0), (True, 2.0)])
@pytest.mark.slow
async def test_a_wait_beyond_the_time_limit_is_tried_again_and_not_remembered(
    sandboxes: LocalSandboxes, tmp_path: Path, always: bool, seconds: float
) -> None:
    template = tmp_path / "alone"
    template.mkdir()
    (template / "test_it.py").write_text(NAP.format(marker=str(tmp_path / "seen"), always=always))
    grader = CodeGrader(sandboxes, limits=Limits(seconds=seconds))
    first = await grader.grade(template, {}, fail_to_pass=["test_it.py::test_nap"])
    assert (first.resolved, first.timed_out, grader.runs) == (not always, always, 2)
    second = await grader.grade(template, {}, fail_to_pass=["test_it.py::test_nap"])
    assert (second.resolved, second.from_memo, grader.runs) == (not always, not always, 4 if always else 2)


@pytest.mark.parametrize(
    "body",
    [
        "import os; os._exit(0)",
        "import os; os._exit(1)",
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "x = bytearray(8 << 30)",
        "import pytest; pytest.exit('enough', returncode=0)",
        "raise KeyboardInterrupt",
    ],
)
async def test_code_that_ends_its_process_fails_its_test(sandboxes: LocalSandboxes, tmp_path: Path, body: str) -> None:
    tests = f"def test_a(): pass\ndef test_b():\n    {body}\ndef test_c(): pass\n"
    ids = [f"test_it.py::test_{letter}" for letter in "abc"]
    report = await outcomes_of(sandboxes, tmp_path, tests, ids)
    assert not report.passed(ids[1])
    assert report.messages[ids[1]]


FORGERIES = {
    "exit code": "import pytest\npytest.main = None\nimport os\nold = os._exit\nos._exit = lambda code: old(0)\n",
    "outcomes": "import _pytest.reports as r\nr.TestReport.failed = property(lambda self: False)\n"
    "r.TestReport.passed = property(lambda self: True)\n",
    "protocol": "import _pytest.runner as r\nr.CallInfo.from_call = classmethod(\n"
    "    lambda cls, func, when, reraise=None: cls(None, None, 0.0, 0.0, 0.0, when, _ispytest=True))\n",
    "function": "import _pytest.python as p\np.Function.runtest = lambda self: None\n",
    "write": "import os\nold = os.write\nos.write = lambda to, data: old(to, data.replace(b'failed', b'passed'))\n",
    "json": "import json\nold = json.dumps\njson.dumps = lambda event: old(event).replace('failed', 'passed')\n",
    "main module": "import sys\nmain = sys.modules['__main__']\nmain.outcome_of = lambda report: 'passed'\n",
}


@pytest.mark.parametrize("name", FORGERIES)
async def test_forged_reports_pass_nothing(sandboxes: LocalSandboxes, tmp_path: Path, name: str) -> None:
    tests = FORGERIES[name] + "def test_a():\n    assert 1 == 2\n"
    report = await outcomes_of(sandboxes, tmp_path, tests, ["test_it.py::test_a"])
    assert not report.passed("test_it.py::test_a")


@pytest.mark.parametrize("name", ["pytest.xfail()", "pytest.skip()", *FORGERIES])
async def test_code_that_forges_passes_nothing(grader: CodeGrader, template: Path, name: str) -> None:
    """The same from within the function under test, which is all that a policy may write."""
    line = FORGERIES.get(name, f"import pytest\n{name}\n").strip().replace("\n", "\n    ")
    code = SHAPES.replace("    return width * height", f"    {line}\n    return width + height")
    verdict = await grader.grade(
        template, {"shapes.py": code.encode()}, fail_to_pass=[AREA, SQUARE], pass_to_pass=NAMES
    )
    assert not verdict.resolved


EMPTY_IN_MEMORY = """
import gc, types
for found in gc.get_objects():
    if isinstance(found, types.FunctionType) and found.__name__ == "test_area":
        found.__code__ = (lambda: None).__code__
"""
WRITE_OVER = """
import pathlib
pathlib.Path("tests/test_shapes.py").write_text("def test_area(): pass")
"""
PUT_IN_PLACE = """
import sys
def replaced(): pass
for name, module in list(sys.modules.items()):
    if name.endswith("test_shapes"):
        module.test_area = replaced
"""


@pytest.mark.parametrize("cheat", [EMPTY_IN_MEMORY, WRITE_OVER, PUT_IN_PLACE])
async def test_only_the_tests_in_their_files_count(grader: CodeGrader, template: Path, cheat: str) -> None:
    """Another test file, imported before, gives the code under test a chance to change the test's own."""
    first = "tests/test_again.py::test_first"
    (template / "tests" / "test_again.py").write_text("import shapes\n\n\ndef test_first():\n    shapes.names()\n")
    files = {
        "shapes.py": BUG["shapes.py"].replace(b"return [", cheat.replace("\n", "\n    ").encode() + b"\n    return [")
    }
    if cheat is WRITE_OVER:
        files = {"shapes.py": BUG["shapes.py"] + cheat.encode()}
    verdict = await grader.grade(template, files, fail_to_pass=[AREA], pass_to_pass=[first])
    assert not verdict.resolved
    assert AREA in verdict.failed


async def test_decorated_and_inherited_tests_count(sandboxes: LocalSandboxes, tmp_path: Path) -> None:
    tests = """
import functools, unittest.mock, hypothesis, hypothesis.strategies as st

def plain(f):
    def run():
        f()
    return run

def wrapping(f):
    @functools.wraps(f)
    def run(*args):
        return f(*args)
    return run

@plain
def test_plain(): pass

@wrapping
@wrapping
def test_wrapped(): pass

@unittest.mock.patch("os.getcwd")
def test_mocked(cwd): pass

@hypothesis.settings(max_examples=2, database=None)
@hypothesis.given(st.integers())
def test_property(n): pass

class Base:
    def test_inherited(self): pass

class TestIt(Base): pass

class Case(unittest.TestCase):
    @unittest.expectedFailure
    def test_case(self): self.fail()
"""
    report = await outcomes_of(sandboxes, tmp_path, tests, ["test_it.py"])
    assert report.messages == {}
    assert len(report.outcomes) == 6
    assert all(map(report.passed, report.outcomes))


@pytest.mark.parametrize(
    ("body", "passed"),
    [
        ("pytest.xfail('known')", True),
        ("expect()", False),
        ("mark(request)\n    1 / 0", False),
        ("request.applymarker(pytest.mark.xfail)\n    1 / 0", True),
    ],
)
async def test_only_tests_may_expect_a_failure(
    sandboxes: LocalSandboxes, tmp_path: Path, body: str, passed: bool
) -> None:
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "code.py").write_text(
        "import pytest\n\n\ndef expect():\n    pytest.xfail('known')\n\n\n"
        "def mark(request):\n    request.applymarker(pytest.mark.xfail)\n"
    )
    (tmp_path / "alone" / "test_it.py").write_text(
        f"import pytest\nfrom code import expect, mark\n\n\ndef test_a(request):\n    {body}\n\n\n"
        "def test_b():\n    pass\n"
    )
    grader = CodeGrader(sandboxes)
    first, second = "test_it.py::test_a", "test_it.py::test_b"
    verdict = await grader.grade(tmp_path / "alone", {}, fail_to_pass=[second], pass_to_pass=[first])
    assert verdict.resolved is passed
    repair = await grader.grade(tmp_path / "alone", {}, fail_to_pass=[first])
    assert not repair.resolved  # an expected failure is not a repair


async def test_a_module_that_shadows_a_library_is_not_applied(grader: CodeGrader, template: Path) -> None:
    (template / "json.py").write_text("")
    files = {"unittest/__init__.py": b"", "./pytest.py": b"", "json.py": b"x = 1", "lib/json.py": b""}
    verdict = await grader.grade(template, {**BUG, **files}, fail_to_pass=[AREA])
    assert verdict.ignored == ("./pytest.py", "unittest/__init__.py")


async def test_tests_cannot_see_the_key(sandboxes: LocalSandboxes, tmp_path: Path) -> None:
    tests = (
        "import os, sys\n\n\ndef test_a():\n    assert len(sys.argv) == 1\n    assert 'KEY' not in str(os.environ)\n"
    )
    assert (await outcomes_of(sandboxes, tmp_path, tests)).passed("test_it.py::test_a")


async def test_a_file_that_cannot_be_collected_is_an_error(sandboxes: LocalSandboxes, tmp_path: Path) -> None:
    report = await outcomes_of(sandboxes, tmp_path, "def test_a(:\n", ["test_it.py::test_a"])
    assert report.outcomes == {"test_it.py::test_a": "error"}
    assert "invalid syntax" in report.messages["test_it.py::test_a"]


async def test_a_kill_gives_no_verdict(sandboxes: LocalSandboxes, tmp_path: Path) -> None:
    body = "import os, signal\n\n\ndef test_a():\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    with pytest.raises(VerifierError, match="killed"):
        await outcomes_of(sandboxes, tmp_path, body)


async def test_a_broken_verifier_gives_no_verdict(sandboxes: LocalSandboxes, template: Path) -> None:
    """As when its files and the runner's are not of the same version."""
    sandbox = await sandboxes.start(template)
    try:
        for request, said in (('"tests": null', "KeyError: 'reverse'"), ('"calls": null', "KeyError: 'tests'")):
            await sandbox.write(REQUEST, f'{{"key": "KEY", {request}}}'.encode())
            result = await sandbox.exec(["python", "-m", VERIFIER, REQUEST])
            with pytest.raises(VerifierError, match=said):
                read_report(result, "KEY", "test_x", [AREA])
    finally:
        await sandbox.close()


async def test_code_that_breaks_pytest_fails(sandboxes: LocalSandboxes, tmp_path: Path) -> None:
    body = "import _pytest.runner as r\n\n\ndef test_a():\n    r.CallInfo = None\n\n\ndef test_b():\n    pass\n"
    report = await outcomes_of(sandboxes, tmp_path, body, ["test_it.py::test_a", "test_it.py::test_b"])
    assert report.problem == "pytest broke off: AttributeError: 'NoneType' object has no attribute 'from_call'"
    assert report.outcomes == {"test_it.py::test_a": "error", "test_it.py::test_b": "missing"}


def result_of(stdout: str, exit_code: int = 1) -> ExecResult:
    return ExecResult(exit_code=exit_code, stdout=stdout, stderr="last words\n", seconds=1.0)


TEST = 'KEY {"event": "test", "id": "t.py::test_a", "outcome": "passed", "message": "", "seconds": 0.1}\n'
CANARY = 'KEY {"event": "test", "id": "::test_x", "outcome": "failed", "message": "m", "seconds": 0.1}\n'
END = 'KEY {"event": "end", "collected": 1, "reported": 2, "exit_code": 1}\n'


def test_a_report_is_believed_only_if_all_of_it_agrees() -> None:
    ids = ["t.py::test_a"]
    assert read_report(result_of(TEST + CANARY + END), "KEY", "test_x", ids).passed(ids[0])
    passed_canary = CANARY.replace('"failed"', '"passed"')
    for problem, result in (
        ("exit code", result_of(TEST + CANARY + END, exit_code=0)),
        ("counts", result_of(TEST + CANARY + END.replace(": 2", ": 3"))),
        ("must fail", result_of(TEST + END.replace(": 2", ": 1"))),
        ("must fail", result_of(TEST + passed_canary + END)),
        ("exit code is 0", result_of(TEST + CANARY + END.replace('code": 1', 'code": 0'), exit_code=0)),
    ):
        report = read_report(result, "KEY", "test_x", ids)
        assert problem in (report.problem or "")
        assert report.outcomes == {ids[0]: "error"}


def test_a_truncated_line_does_not_count() -> None:
    ids = ["t.py::test_a"]
    cut = read_report(result_of(TEST + CANARY + END[:-9]), "KEY", "test_x", ids)
    assert (cut.problem, cut.outcomes) == ("the tests' process ended early with exit code 1", {ids[0]: "passed"})
    lost = read_report(result_of(TEST[:-9] + "\n" + CANARY + END), "KEY", "test_x", ids)
    assert lost.problem == "the report counts 2 tests and names 1"
    assert lost.outcomes == {ids[0]: "missing"}


def test_functions_are_named_once_and_then_by_number() -> None:
    first = 'KEY {"event": "functions", "first": 0, "names": ["a.py:1", "a.py:5"]}\n'
    test = TEST.replace("0.1}", '0.1, "calls": [1]}')
    report = read_report(result_of(first + test + CANARY + END), "KEY", "test_x", None)
    assert report.calls == {"t.py::test_a": ["a.py:5"]}
    with pytest.raises(VerifierError, match="a part of it was lost"):
        read_report(result_of(test + CANARY + END), "KEY", "test_x", None)


def test_a_missing_report_or_a_fault_of_the_verifier_gives_no_verdict() -> None:
    with pytest.raises(VerifierError, match=r"no report.*last words"):
        read_report(result_of("", 1), "KEY", "test_x", None)
    with pytest.raises(VerifierError, match="the verifier itself failed: oops"):
        read_report(
            result_of('KEY {"event": "internal", "inside": false, "message": "oops"}\n', 3), "KEY", "test_x", None
        )
