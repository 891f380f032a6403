"""Report every outcome of a unittest run under a random key, and add a test that must fail.

For Python 3.6 or newer, with the standard library only. It is put into a container as a package with the modules that
it imports. `in_sandbox.startup` imports it when a Python starts that runs unittest, directly or through a known
program. KEYFILE lies beside its folder, as for `in_sandbox.report`. Runners whose output differs from that of
`unittest.TextTestRunner` write no report. Since unittest has no plugins, this module wraps the functions that run
tests, and shares with `in_sandbox.report` only what both import.
"""

import inspect
import os
import sys
import unittest
from typing import Any

from .channel import Channel, codes, find_replaced, first_line, keeper, request
from .imports import guard
from .origin import Origins
from .testfiles import Expected, test_files

SEALED = ("unittest",)
OUTCOMES = {"addSuccess": "PASSED", "addFailure": "FAILED", "addError": "ERROR", "addSkip": "SKIPPED",
            "addExpectedFailure": "XFAIL", "addUnexpectedSuccess": "XPASS"}  # fmt: skip
BAD = ("FAILED", "ERROR")


class Report(Channel):
    """Writes begin, test, tampered and end lines for the process's first run; runs inside it belong to tests."""

    def __init__(self, asked: Any) -> None:
        super().__init__(asked["key"])
        self.canary = asked["canary"]
        self.origins = Origins(asked["root"], asked["before"], asked["repaired"])
        self.expected = Expected(asked["root"], test_files(asked["root"]))
        self.running: Any = []
        self.outcomes: Any = {}
        self.messages: Any = {}
        self.parts = {name: each for name, each in sys.modules.items() if name.partition(".")[0] == __name__}
        self.noted: Any = None
        self.changes: Any = None
        self.emit(event="begin")

    def watch(self) -> None:
        """Wrap the functions that run tests and record their outcomes.

        The report's original attributes and outcomes are kept in a closure, which no attribute leads to.
        """
        for name, outcome in OUTCOMES.items():
            setattr(unittest.TestResult, name, self.noting(getattr(unittest.TestResult, name), outcome))
        part = unittest.TestResult.addSubTest

        def add_subtest(result: Any, test: Any, subtest: Any, error: Any) -> None:
            if error is not None:
                self.note(result, test, "FAILED", error)
            part(result, test, subtest, error)

        run = unittest.TextTestRunner.run

        def run_all(runner: Any, test: Any) -> Any:
            return run(runner, test) if self.running else self.run(runner, run, test)

        setattr(unittest.TestResult, "addSubTest", add_subtest)  # noqa: B010
        setattr(unittest.TextTestRunner, "run", run_all)  # noqa: B010
        noted: Any = {}
        self.noted = noted.__setitem__
        sealed = self.functions()

        def changes() -> Any:
            found = restore() + find_replaced(sealed, self.functions())
            return found if self.outcomes == noted else [*found, "the report's outcomes"]

        self.changes = changes
        restore = keeper((self, self.origins, self.expected))

    def functions(self) -> Any:
        """Return the code objects of the sealed functions now, including those of the report itself."""
        return codes((*SEALED, __name__), {**sys.modules, **self.parts})

    def noting(self, add: Any, outcome: str) -> Any:
        def added(result: Any, test: Any, *rest: Any) -> None:
            self.note(result, test, outcome, *rest[:1])
            add(result, test, *rest)

        return added

    def note(self, result: Any, test: Any, outcome: str, error: Any = None) -> None:
        if result not in self.running or not hasattr(test, "id") or type(test).__name__ == "_SubTest":
            return
        name = str(test).partition("\n")[0]
        if self.is_altered(test):
            outcome, self.messages[name] = "FAILED", "the test that ran is not the one in its file"
        elif outcome == "XFAIL" and not self.is_expected(test):
            outcome, self.messages[name] = "FAILED", "only the tests may say that a failure is expected"
        elif outcome in BAD and error is not None:
            self.messages.setdefault(name, first_line(error[1]))
        if self.outcomes.get(name) not in BAD:
            self.outcomes[name] = outcome
            self.noted(name, outcome)

    def is_altered(self, test: Any) -> bool:
        name = getattr(test, "_testMethodName", None)
        if name is None or type(test).__name__ == self.canary:  # a fixture of a class or a module, or our canary
            return False
        method = getattr(type(test), name, None)
        return inspect.isfunction(method) and self.origins.altered(method, name)

    def is_expected(self, test: Any) -> bool:
        """Return whether the source of the test, of its class, or of a base class marks it as an expected failure."""
        kinds = type(test).__mro__
        names = {getattr(test, "_testMethodName", ""), *(kind.__name__ for kind in kinds)}
        return self.expected.says({os.path.realpath(file_of(kind)) for kind in kinds}, names)

    def run(self, runner: Any, run: Any, test: Any) -> Any:
        make, changes = runner._makeResult, self.changes

        def made() -> Any:
            self.running.append(make())
            return self.running[0]

        def method(case: unittest.TestCase) -> None:
            case.fail("this test is to fail")

        runner._makeResult = made
        case = type(self.canary, (unittest.TestCase,), {self.canary: method})
        result = run(runner, unittest.TestSuite([test, case(self.canary)]))
        changed = changes()
        if changed:
            self.emit(event="tampered", what=changed[0])
        for name, outcome in self.outcomes.items():
            self.emit(event="test", id=name, outcome=outcome, message=self.messages.get(name, ""))
        self.emit(event="end", count=len(self.outcomes), exit_code=0 if result.wasSuccessful() else 1)
        return result


def file_of(kind: Any) -> str:
    """Return the file that a class comes from; "" if there is none."""
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


def _open() -> None:
    asked = request()
    if asked is None:
        return
    if asked["own"]:
        guard(asked["root"], asked["own"])
    Report(asked).watch()


_open()
