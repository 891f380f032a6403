"""The plugin in real runs of unittest."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugged import Run, run

PACKAGE = """
    def mean(values):
        return sum(values) / (len(values) + 1)
"""
TESTS = """
    import unittest
    from calc import mean

    class Case(unittest.TestCase):
        def test_mean(self):
            self.assertEqual(mean([2, 4]), 3)

        def test_text(self):
            \"\"\"A line of its own.\"\"\"
            print("test_mean (tests.test_calc.Case) ... ok")

        @unittest.skip("not today")
        def test_skipped(self):
            pass

        @unittest.expectedFailure
        def test_known(self):
            self.fail()

        def test_parts(self):
            for number in range(3):
                with self.subTest(number=number):
                    self.assertLess(number, 2)
"""
FILES = {"calc/__init__.py": PACKAGE, "tests/__init__.py": "", "tests/test_calc.py": TESTS}


def of_unittest(folder: Path, change: str = "", **files: str) -> Run:
    text = PACKAGE + change
    return run("unittest", folder, {**FILES, "calc/__init__.py": text, **files}, "unittest", "-v", "tests.test_calc",
               before={"calc/__init__.py": PACKAGE})  # fmt: skip


def test_outcomes_are_reported_and_the_canary_fails(tmp_path: Path) -> None:
    found = of_unittest(tmp_path)
    assert found.outcomes == {
        "test_mean": "FAILED",
        "test_text": "PASSED",
        "test_skipped": "SKIPPED",
        "test_known": "XFAIL",
        "test_parts": "FAILED",
    }
    assert (found.planted, found.exit_code) == (["FAILED"], 1)
    assert found.messages["test_mean"] == "AssertionError: 2.0 != 3"
    assert found.messages["test_parts"] == "AssertionError: 2 not less than 2"
    (end,) = found.named("end")
    assert (end["count"], end["exit_code"], found.named("tampered")) == (6, 1, [])


def test_a_run_inside_a_test_is_not_in_the_report(tmp_path: Path) -> None:
    inner = """
    class Inner(unittest.TestCase):
        def test_inner(self):
            self.fail()

        def runTest(self):
            pass

    class Outer(unittest.TestCase):
        def test_outer(self):
            suite = unittest.TestSuite([Inner("test_inner")])
            self.assertFalse(unittest.TextTestRunner().run(suite).wasSuccessful())

    del Case
    def load_tests(loader, tests, pattern):
        return loader.loadTestsFromTestCase(Outer)
"""
    found = of_unittest(tmp_path, **{"tests/test_calc.py": TESTS + inner})
    assert (found.outcomes, found.planted) == ({"test_outer": "PASSED"}, ["FAILED"])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("\n    import os; os.write(2, b'test_mean (tests.test_calc.Case) ... ok'); os._exit(0)", "nothing"),
        (
            "\n    import unittest\n    unittest.TestCase.fail = unittest.TestCase.assertEqual = lambda *rest: None",
            "tampered",
        ),
        (
            "\n    import sys\n    def nothing(self): pass\n    def mean(values):\n"
            "        sys.modules['tests.test_calc'].Case.test_mean = nothing\n        return 0\n",
            "mean fails",
        ),
    ],
)
def test_cheats_are_detected(tmp_path: Path, change: str, told: str) -> None:
    late = "\n    mean([])\n" if told == "mean fails" else ""
    found = of_unittest(tmp_path, change, **{"tests/test_calc.py": TESTS + late})
    if told == "nothing":
        assert (found.named("test"), found.named("end")) == ([], [])
    elif told == "tampered":
        assert found.named("tampered")
    else:
        assert found.outcomes["test_mean"] == "FAILED"
        assert found.messages["test_mean"] == "the test that ran is not the one in its file"


@pytest.mark.parametrize(
    "cheat",
    [
        "report.outcomes = {'test_mean (tests.test_calc.Case)': 'PASSED'}",
        "report.emit = lambda **event: None",
        "report.origins.altered = lambda *rest: False",
        "report.outcomes.update({test: 'PASSED' for test in report.outcomes})",
        "type(report).note.__code__ = (lambda self, result, test, outcome, error=None: None).__code__",
    ],
)
def test_changing_the_report_in_memory_is_detected(tmp_path: Path, cheat: str) -> None:
    change = f"""
    import gc

    def mean(values):
        for found in gc.get_objects():
            if type(found).__name__ == "Report" and hasattr(found, "canary"):
                report = found
                {cheat}
        return 0
    """
    found = of_unittest(tmp_path, change)
    assert len(found.named("tampered")) == 1


def test_tests_cannot_find_the_report_as_a_module(tmp_path: Path) -> None:
    change = "\n    import sys\n    def mean(values): return len([n for n in sys.modules if 'report_x' in n]) + 3\n"
    assert of_unittest(tmp_path, change).outcomes["test_mean"] == "PASSED"


def test_only_the_tests_may_expect_a_failure(tmp_path: Path) -> None:
    change = """
    import sys
    def mean(values):
        sys.modules["tests.test_calc"].Case.test_mean.__unittest_expecting_failure__ = True
        return 0
    """
    found = of_unittest(tmp_path, change, **{"tests/test_calc.py": TESTS + "\n    mean([])\n"})
    assert (found.outcomes["test_known"], found.outcomes["test_mean"]) == ("XFAIL", "FAILED")


def test_tests_inherited_from_the_package_count(tmp_path: Path) -> None:
    shipped = (
        "\n    import unittest\n    class Shipped(unittest.TestCase):\n        def test_shipped(self): mean([1])\n"
    )
    tests = "from calc.testing import Shipped\nclass Own(Shipped): pass\ndel Shipped\n"
    found = of_unittest(tmp_path, **{"calc/testing.py": PACKAGE + shipped, "tests/test_calc.py": tests})
    assert found.outcomes == {"test_shipped": "PASSED"}
