"""The plugin in real runs of pytest: what it adds, and which tests it takes for the ones in their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugged import CANARY, Run, run

PACKAGE = """
    def mean(values):
        return sum(values) / len(values)
"""
TESTING = """
    import unittest
    from calc import mean

    HELPERS = 1

    class MeanTests:
        def test_mean(self):
            assert mean([2, 4]) == 3

        def test_one(self):
            assert mean([5]) == 5

    class MeanCase(unittest.TestCase):
        def test_case(self):
            self.assertEqual(mean([1, 3]), 2)

    def quietly(test):
        def wrapper(*args):
            return test(*args)
        return wrapper

    class Wrapped:
        @quietly
        def test_wrapped(self):
            assert mean([2]) == 2
"""
TESTS = """
    from calc.testing import MeanCase, MeanTests, Wrapped

    class TestMean(MeanTests):
        pass

    class TestWrapped(Wrapped):
        pass

    class Case(MeanCase):
        pass
"""
FILES = {"calc/__init__.py": PACKAGE, "calc/testing.py": TESTING, "tests/test_calc.py": TESTS}


def of_pytest(folder: Path, files: dict[str, str], **more: object) -> Run:
    return run("pytest", folder, files, "pytest", "-p", "no:cacheprovider", "tests", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "last",
    [
        "pytestmark = pytest.mark.skip",
        "pytestmark = pytest.mark.xfail",
        "pytestmark = pytest.mark.usefixtures('nothing_like_it')",
        "@pytest.fixture(autouse=True)\ndef choosy(): pytest.skip('not today')",
        "def setup_module(): pytest.skip('not today')",
    ],
)
def test_marks_of_the_last_file_do_not_apply_to_the_canary(tmp_path: Path, last: str) -> None:
    files = {
        "tests/test_a.py": "def test_good(): pass\n",
        "tests/test_z.py": f"import pytest\n{last}\ndef test_last(): pass\n",
    }
    found = of_pytest(tmp_path, files)
    assert found.planted == ["FAILED"]
    assert found.outcomes["test_good"] == "PASSED"
    assert (found.exit_code, found.named("end")[0]["count"]) == (1, 3)


def test_the_canary_is_there_whatever_tests_are_called(tmp_path: Path) -> None:
    settings = "[pytest]\npython_files = check_*.py\npython_functions = check_*\n"
    files = {"pytest.ini": settings, "tests/check_it.py": "def check_it(): pass\n"}
    found = of_pytest(tmp_path, files)
    assert (found.planted, found.outcomes) == (["FAILED"], {"check_it": "PASSED"})


def test_a_suite_of_test_cases_has_a_canary_case(tmp_path: Path) -> None:
    found = of_pytest(tmp_path, FILES)
    assert found.planted == ["FAILED", "FAILED"]


INHERITED = {"test_mean": "PASSED", "test_one": "PASSED", "test_wrapped": "PASSED", "test_case": "PASSED"}


def test_tests_that_the_package_ships_count(tmp_path: Path) -> None:
    found = of_pytest(tmp_path, FILES)
    assert found.outcomes == INHERITED
    assert found.named("tampered") == []


@pytest.mark.parametrize("rewritten", [True, False])
def test_a_repair_may_change_the_code_beside_shipped_tests(tmp_path: Path, rewritten: bool) -> None:
    files = dict(FILES)
    if rewritten:
        files["tests/conftest.py"] = "import pytest\npytest.register_assert_rewrite('calc.testing')\n"
    files["calc/testing.py"] = TESTING.replace("HELPERS = 1", "HELPERS = 2\n\n    def help():\n        return 1\n")
    found = of_pytest(tmp_path, files, before={"calc/testing.py": TESTING})
    assert found.outcomes == INHERITED


@pytest.mark.parametrize(
    "changed",
    [
        {"calc/testing.py": TESTING.replace("assert mean([2, 4]) == 3", "pass")},
        {
            "calc/testing.py": TESTING + "\n    def _quiet(self): pass\n    MeanTests.test_mean = _quiet\n",
        },
        {
            "calc/testing.py": TESTING
            + "\n    class _Evil:\n        def test_mean(self): pass\n    MeanTests.test_mean = _Evil.test_mean\n",
        },
        {  # a function that the package had, under a test's name
            "calc/__init__.py": PACKAGE + "\n    def nothing(self): pass\n",
            "calc/testing.py": TESTING + "\n    from calc import nothing\n    MeanTests.test_mean = nothing\n",
        },
        {"calc/testing.py": TESTING + "\n    MeanTests.test_mean = unittest.TestCase.id\n"},
        {
            "calc/testing.py": TESTING
            + "\n    from functools import partial\n    MeanTests.test_mean = partial(lambda *rest: None)\n"
        },
        {
            "calc/testing.py": TESTING
            + "\n    import json\n    def _made(dumps=json.dumps, loads=json.loads):\n"
            + "        def wrapper(*rest): loads\n        return wrapper\n    MeanTests.test_mean = _made()\n"
        },
    ],
)
def test_a_test_that_the_change_brings_along_does_not_count(tmp_path: Path, changed: dict[str, str]) -> None:
    buggy = {**FILES, **changed}
    buggy.setdefault("calc/__init__.py", PACKAGE)
    buggy["calc/__init__.py"] = buggy["calc/__init__.py"].replace("/ len", "/ 1 + len")
    before = {"calc/testing.py": TESTING}
    found = of_pytest(tmp_path, buggy, before=before)
    assert found.outcomes.get("test_mean") != "PASSED"
    assert found.outcomes.get("test_one") != "PASSED"  # an old pytest stops at what it cannot collect


def test_a_function_that_replaces_a_test_does_not_count(tmp_path: Path) -> None:
    package = """
        import sys

        def test_mean(): pass

        def mean(values):
            sys._getframe(1).f_globals["test_mean"] = test_mean
    """
    tests = """
        from calc import mean

        def test_mean():
            assert mean([2, 4]) == 3

        mean([])
    """
    found = of_pytest(tmp_path, {"calc/__init__.py": package, "tests/test_calc.py": tests},
                      before={"calc/__init__.py": PACKAGE})  # fmt: skip
    assert found.outcomes == {"test_mean": "FAILED"}
    assert found.messages["test_mean"] == "the test that ran is not the one in its file"


LIBRARY = {
    "kit/__init__.py": """
        import functools

        class Shipped:
            def test_shipped(self):
                assert self.number == 1

        def quietly(test):
            @functools.wraps(test)
            def wrapper(*args):
                return test(*args)
            return wrapper

        def idle(test):
            def wrapper(*args):
                return None if test else None
            return wrapper
    """
}
OF_LIBRARY = """
    import calc
    from kit import Shipped, idle, quietly

    class TestShipped(Shipped):
        number = 1

    @quietly
    def test_wrapped():
        assert calc.mean([2]) == 2

    def test_plain():
        assert calc.mean([2]) == 2

    calc.mean([])
"""


def test_tests_that_a_library_ships_or_wraps_count(tmp_path: Path) -> None:
    package = "def mean(values): return 2\n"
    found = of_pytest(tmp_path, {"calc/__init__.py": package, "tests/test_calc.py": OF_LIBRARY}, installed=LIBRARY)
    assert found.outcomes == {"test_shipped": "PASSED", "test_wrapped": "PASSED", "test_plain": "PASSED"}


@pytest.mark.parametrize(
    "cheat",
    [
        # what says that it is of a file that is nowhere, or of a library's
        "def test_plain(): pass\n"
        "test_plain.__code__ = test_plain.__code__.replace(co_filename='/nowhere/test_plain.py')",
        "import kit\ndef test_plain(): pass\n"
        "test_plain.__code__ = test_plain.__code__.replace(co_filename=kit.__file__)",
        # a function of a library that does nothing, and one of the change that only holds the test
        "import kit\ntest_plain = kit.idle(print)",
        "import kit\ntest_plain = kit.quietly(lambda *rest: None)",
        "def over(test):\n    def test_plain(): test\n    return test_plain\ntest_plain = over(tests['test_plain'])",
    ],
)
def test_code_that_hides_behind_a_library_or_a_decorator_does_not_count(tmp_path: Path, cheat: str) -> None:
    body = "\n".join(f"    {line}" for line in cheat.splitlines())
    package = "import sys\n\ndef mean(values):\n    tests = sys._getframe(1).f_globals\n"
    package += f"    if values: return 0\n{body}\n    tests['test_plain'] = test_plain\n"
    files = {"calc/__init__.py": package, "tests/test_calc.py": OF_LIBRARY}
    before = {"calc/__init__.py": "def mean(values): return 2\n"}
    found = of_pytest(tmp_path, files, installed=LIBRARY, before=before)
    assert found.outcomes == {"test_shipped": "PASSED", "test_wrapped": "FAILED", "test_plain": "FAILED"}
    assert found.messages["test_plain"] == "the test that ran is not the one in its file"


def test_the_report_says_why_a_test_failed(tmp_path: Path) -> None:
    files = {
        "tests/test_a.py": """
            import pytest

            def test_value():
                assert 1 + 1 == 3

            def test_raised():
                raise KeyError("no\\nsecond line")

            def test_fixture(nothing_like_it):
                pass

            @pytest.mark.xfail(strict=True)
            def test_strict():
                pass
        """,
    }
    found = of_pytest(tmp_path, files)
    assert found.messages["test_value"].startswith("AssertionError: assert (1 + 1) == 3")
    assert found.messages["test_raised"].startswith("KeyError: 'no")
    assert "nothing_like_it" in found.messages["test_fixture"]
    assert "strict" in found.messages["test_strict"].lower()


def test_the_report_says_why_a_file_was_not_read(tmp_path: Path) -> None:
    found = of_pytest(tmp_path, {"tests/test_b.py": "import nothing_like_it\n"})
    (unread,) = found.named("collect")
    assert unread["id"] == "tests/test_b.py"
    assert "nothing_like_it" in unread["message"]


MOCKS = {
    "mocks/__init__.py": "",
    "mocks/plugin.py": """
        import unittest.mock

        def assert_not_called(self, *args):
            assert self.call_count == 0

        def pytest_configure(config):
            unittest.mock.NonCallableMock.assert_not_called = assert_not_called
    """,
    "mocks-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: mocks\nVersion: 1.0\n",
    "mocks-1.0.dist-info/entry_points.txt": "[pytest11]\nmocks = mocks.plugin\n",
}


@pytest.mark.parametrize("library", ["library", "repository/.venv"])
def test_late_replacements_by_a_plugin_of_the_image_are_allowed(tmp_path: Path, library: str) -> None:
    tests = """
        from unittest.mock import Mock

        def test_mock():
            assert Mock.assert_not_called.__module__ == "mocks.plugin"
    """
    found = of_pytest(tmp_path, {"tests/test_a.py": tests}, installed=MOCKS, library=library)
    assert (found.outcomes, found.named("tampered")) == ({"test_mock": "PASSED"}, [])


PASSING = """
    import pytest

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(item, call):
        report = (yield).get_result()
        report.outcome, report.longrepr = "passed", None
        item.session.testsfailed = 1
"""
EARLY = {
    "conftest.py": "pytest_plugins = ['calc.passing']\n",
    "calc/__init__.py": "",
    "calc/passing.py": PASSING,
    "tests/test_a.py": "def test_bad(): assert False\n",
}


def test_the_canary_fails_by_itself(tmp_path: Path) -> None:
    found = of_pytest(tmp_path, FILES)
    assert {each["message"] for each in found.named("test") if CANARY in each["id"]} == {
        "AssertionError: this test is to fail"
    }


def test_a_hook_that_passes_everything_passes_the_canary(tmp_path: Path) -> None:
    """So that the run is not believed, whatever defines the hook."""
    found = of_pytest(tmp_path, EARLY)
    assert (found.outcomes, found.planted) == ({"test_bad": "PASSED"}, ["PASSED"])


@pytest.mark.parametrize("named", ["conftest.py", "pytest.ini"])
@pytest.mark.slow
def test_a_plugin_that_the_change_brings_along_is_detected(tmp_path: Path, named: str) -> None:
    files = dict(EARLY)
    if named == "pytest.ini":
        files["pytest.ini"] = "[pytest]\naddopts = -p calc.passing\n"
        del files["conftest.py"]
    (told,) = of_pytest(tmp_path / "changed", files, before={"calc/passing.py": ""}).named("tampered")
    assert "calc.passing" in told["what"]
    assert of_pytest(tmp_path / "unchanged", files).named("tampered") == []
    found = of_pytest(tmp_path / "repaired", files, before={"calc/passing.py": ""}, repaired=["calc/passing.py"])
    assert found.named("tampered") == []


def test_code_that_claims_to_be_of_a_test_file_does_not_count(tmp_path: Path) -> None:
    package = """
        import sys

        def empty_tests():
            for module in list(sys.modules.values()):
                for name, test in list(getattr(module, "__dict__", {}).items()):
                    if name in ("test_a", "test_b"):
                        def nothing(): pass
                        test.__code__ = nothing.__code__.replace(co_filename=test.__code__.co_filename, co_name=name)
    """
    tests = "from calc import empty_tests\n\ndef test_a():\n    empty_tests()\n\ndef test_b(): assert False\n"
    found = of_pytest(tmp_path, {"calc/__init__.py": package, "tests/test_a.py": tests})
    assert found.outcomes == {"test_a": "FAILED", "test_b": "FAILED"}
    assert found.messages["test_b"] == "the test that ran is not the one in its file"


def test_tests_are_recognised_however_pytest_rewrites_them(tmp_path: Path) -> None:
    tests = """
        import functools
        import pytest

        def quietly(test):
            @functools.wraps(test)
            def wrapper(*args, **kwargs):
                return test(*args, **kwargs)
            return wrapper

        @quietly
        @pytest.mark.parametrize("one", [1])
        def test_a(one):
            words = "\\d", -0.0, {1, 2}, frozenset()
            assert [word for word in words if word] and one == 1, "said"

        class TestB:
            __hidden = 1

            def test_b(self):
                assert self.__hidden == 1 and (lambda: True)()

        def made():
            def test_c():
                assert made
            return test_c

        test_c = made()
    """
    settings = "[pytest]\nenable_assertion_pass_hook = true\nfilterwarnings = error\n    default::SyntaxWarning\n"
    settings += "    default::DeprecationWarning\n"
    found = of_pytest(tmp_path, {"pytest.ini": settings, "tests/test_a.py": tests})
    assert found.outcomes == {"test_a[1]": "PASSED", "test_b": "PASSED", "test_c": "PASSED"}


@pytest.mark.parametrize(
    "cheat",
    [
        "report.outcomes = Lies()",
        "report.emit = lambda **event: None",
        "report.origins.altered = lambda *rest: False",
        "report.outcomes['tests/test_a.py::test_other'] = 'PASSED'",
        "type(report).pytest_runtest_logreport.__code__ = (lambda self, report: None).__code__",
    ],
)
def test_changing_the_report_in_memory_is_detected(tmp_path: Path, cheat: str) -> None:
    package = f"""
        import gc

        class Lies(dict):
            def __getitem__(self, test):
                return "PASSED"

        def change():
            for found in gc.get_objects():
                if type(found).__name__ == "Report" and hasattr(found, "canary"):
                    report = found
                    {cheat}
    """
    tests = "from calc import change\n\ndef test_bad():\n    change()\n    assert False\n"
    found = of_pytest(tmp_path, {"calc/__init__.py": package, "tests/test_a.py": tests})
    assert len(found.named("tampered")) == 1


def test_tests_cannot_find_the_report_as_a_module(tmp_path: Path) -> None:
    tests = "import sys\n\ndef test_it():\n    assert not [n for n in sys.modules if n.startswith('report_x')]\n"
    assert of_pytest(tmp_path, {"tests/test_a.py": tests}).outcomes == {"test_it": "PASSED"}
