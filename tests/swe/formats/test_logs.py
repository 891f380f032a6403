"""The parsers, on what the real runners print."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from turnstile.errors import ConfigError
from turnstile.swe.formats.instance import Instance
from turnstile.swe.formats.logs import pytest_log, unittest_log, unittest_trouble
from turnstile.swe.grading.suite import error_near

PYTEST = """
import pytest

@pytest.fixture
def dirty():
    yield
    raise RuntimeError("no - teardown")

def test_passed(): pass
def test_failed(): assert 1 == 2, "a - b"
def test_broken(gone): pass
def test_dirty(dirty): pass
def test_skipped(): pytest.skip("no")
@pytest.mark.xfail
def test_xfail(): assert False
@pytest.mark.xfail
def test_xpass(): pass
@pytest.mark.parametrize("x", ["a b", "c - d"])
def test_names(x): pass
"""
UNITTEST = '''
import sys, unittest

class Case(unittest.TestCase):
    def test_ok(self): pass
    def test_doc(self):
        """A line of its own."""
    def test_loud(self): print("loud", file=sys.stderr)
    def test_fail(self): self.fail("x")
    def test_error(self): 1 / 0
    @unittest.skip("why not")
    def test_skip(self): pass
    @unittest.expectedFailure
    def test_known(self): self.fail()
    @unittest.expectedFailure
    def test_surprise(self): pass
'''


def printed(folder: Path, text: str, *command: str) -> str:
    (folder / "test_it.py").write_text(text)
    done = subprocess.run([sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True)
    return done.stdout + done.stderr


@pytest.mark.parametrize("colour", ["yes", "no"])
def test_statuses_are_read_from_the_summary_of_pytest(tmp_path: Path, colour: str) -> None:
    log = printed(tmp_path, PYTEST, "pytest", "-rA", f"--color={colour}", "-p", "no:cacheprovider", "test_it.py")
    assert {name.removeprefix("test_it.py::test_"): status for name, status in pytest_log(log).items()} == {
        "passed": "PASSED",
        "failed": "FAILED",
        "broken": "ERROR",
        "dirty": "ERROR",
        "xfail": "XFAIL",
        "xpass": "XPASS",
        "names[a b]": "PASSED",
        "names[c - d]": "PASSED",
    }


def test_statuses_are_read_from_the_lines_of_pytest(tmp_path: Path) -> None:
    log = printed(tmp_path, PYTEST, "pytest", "-v", "-p", "no:cacheprovider", "test_it.py")
    found = {name.removeprefix("test_it.py::test_"): status for name, status in pytest_log(log).items()}
    assert found == {
        "passed": "PASSED",
        "failed": "FAILED",
        "broken": "ERROR",
        "dirty": "ERROR",
        "skipped": "SKIPPED",
        "xfail": "XFAIL",
        "xpass": "XPASS",
        "names[a b]": "PASSED",
        "names[c - d]": "PASSED",
    }


def test_statuses_are_read_from_the_lines_of_unittest(tmp_path: Path) -> None:
    found = unittest_log(printed(tmp_path, UNITTEST, "unittest", "-v", "test_it"))
    assert {name.partition(" ")[0].removeprefix("test_"): status for name, status in found.items()} == {
        "ok": "PASSED",
        "doc": "PASSED",
        "loud": "PASSED",
        "fail": "FAILED",
        "error": "ERROR",
        "skip": "SKIPPED",
        "known": "XFAIL",
        "surprise": "XPASS",
    }
    assert all(name.partition(" ")[2].startswith("(test_it.Case") for name in found)


def test_a_log_must_agree_with_its_end(tmp_path: Path) -> None:
    log = printed(tmp_path, UNITTEST, "unittest", "-v", "test_it")
    found = unittest_log(log)
    assert unittest_trouble(log, found, 1) is None
    assert unittest_trouble(log, found, 0) == "the log ends with FAILED and the exit code is 0"
    passing = dict.fromkeys(found, "PASSED")
    assert unittest_trouble(log, passing, 1) == "the log ends with FAILED and names no test that failed"
    fewer = dict(list(found.items())[1:])
    assert unittest_trouble(log, fewer, 1) == "the log says that 8 tests ran, and names 7"
    for wrong in (log + log, log.replace("Ran ", "Run ")):
        assert str(unittest_trouble(wrong, found, 1)).startswith("the log says ")
    good = "import unittest\n\nclass Case(unittest.TestCase):\n    def test_ok(self): pass\n"
    log = printed(tmp_path, good, "unittest", "-v", "test_it")
    assert unittest_trouble(log, unittest_log(log), 0) is None
    assert error_near(printed(tmp_path, UNITTEST, "unittest", "-v", "test_it"), "test_fail (test_it.Case)") == (
        "AssertionError: x"
    )


def test_a_class_fixture_does_not_count_as_a_test(tmp_path: Path) -> None:
    broken = "import unittest\n\nclass Case(unittest.TestCase):\n    def test_ok(self): pass\n"
    broken += "    @classmethod\n    def setUpClass(cls): raise KeyError\n"
    log = printed(tmp_path, broken, "unittest", "-v", "test_it")
    assert unittest_trouble(log, unittest_log(log), 1) is None


def test_an_instance_names_its_log_parser() -> None:
    instance = Instance(id="i", problem="")
    assert instance.statuses("PASSED a::b\n") == {"a::b": "PASSED"}
    own = Instance(id="i", problem="", log_parser=f"{__name__}:only_x")
    assert own.log_trouble("", {}, 1) == "a bad end"
    assert instance.log_trouble("", {}, 1) is None
    assert own.statuses("") == {"x": "PASSED"}
    with pytest.raises(ConfigError, match="unknown log_parser kind 'pytests'; did you mean 'pytest'"):
        Instance(id="i", problem="", log_parser="pytests").statuses("")


def only_x(log: str) -> dict[str, str]:
    return {"x": "PASSED"}


only_x.trouble = lambda text, statuses, exit_code: "a bad end" if exit_code else None  # type: ignore[attr-defined]
