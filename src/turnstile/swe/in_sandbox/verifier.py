"""Run tests next to the code under test and report the outcomes; `turnstile.swe.grading.testrun` reads the report.

    python -m turnstile.swe.in_sandbox.verifier REQUEST

REQUEST is a JSON file that is read and removed before anything else happens. It holds `key`, with which every report
line begins; `tests`, node ids or whole files relative to the working folder, or null for the whole suite; `reverse`,
whether to run the last of them first; `canary`, the name of the added tests that must fail; and `calls`, the folder
whose functions are reported for the tests that call them, or null. Report lines are `KEY {json}` on the standard output
as it was before any test could redirect it. The key is random, so what the tests print is not taken for a report. The
project's pytest configuration is ignored, but its conftest files are used.

Code under test shares this process, so forging a report is made hard, not impossible. The key is on no command line and
in no file. The canaries are ordinary tests and must fail. No function of the runner may have been replaced, and no test
or plugin slipped in. An expected failure must be one that the tests themselves expect. Counts and exit code must agree.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from turnstile.swe.in_sandbox.calls import CallRecorder
from turnstile.swe.in_sandbox.canary import canaries
from turnstile.swe.in_sandbox.seal import Seal
from turnstile.swe.in_sandbox.testcode import TestCode
from turnstile.swe.in_sandbox.testfiles import Expected, test_files

FLAGS = (
    "-c",
    os.devnull,
    "--rootdir=.",
    "--continue-on-collection-errors",  # a file that cannot be collected concerns its own tests only
    *(
        flag
        for name in (
            "cacheprovider",
            "terminal",
            "faulthandler",
            "unraisableexception",  # collects garbage several times for unused warnings
            "threadexception",
            "pastebin",
            "junitxml",
        )
        for flag in ("-p", f"no:{name}")
    ),
)
WORST_FIRST = ("error", "failed", "skipped", "xfailed", "xpassed", "passed")
MANY = 50  # node ids; for more, it is quicker to collect whole files and select from them
EXPLAINED = "AssertionError: assert "
LONGEST = 300  # characters of a message
HERE = os.getcwd() + os.sep
Emit = Callable[..., None]


def summary(error: BaseException) -> str:
    """Return the first line of an exception, in the form that a traceback ends with.

    The exception's name is left out if pytest explains an assertion.
    """
    text = traceback.format_exception_only(error)[-1].strip().partition("\n")[0]
    return text.removeprefix("AssertionError: ")[:LONGEST] if text.startswith(EXPLAINED) else text[:LONGEST]


def is_inside(error: BaseException, seal: Seal) -> bool:
    """Return whether the code under test was involved in an error of the verifier.

    It was if the error passed through it, memory ran out, or a part of the runner has been replaced.
    """
    frames = traceback.walk_tb(error.__traceback__)
    passed = any(frame.f_code.co_filename.startswith(HERE) for frame, _ in frames)
    return isinstance(error, MemoryError) or passed or seal.broken() is not None


class Recorder:
    """The pytest plugin that selects and orders the wanted tests, adds the canaries and reports every outcome."""

    def __init__(self, emit: Emit, seal: Seal, written: TestCode, wanted: frozenset[str] | None, request: Any) -> None:
        self.emit = emit
        self.seal = seal
        self.written = written
        self.expected = Expected(HERE, written.files or test_files(HERE))
        self.wanted = wanted
        self.reverse: bool = request["reverse"]
        self.canary: str = request["canary"]
        self.calls = None if request["calls"] is None else CallRecorder(request["calls"])
        self.collected = 0
        self.reported = 0
        self._functions: dict[str, int] = {}  # number of each one that the report has named
        self._outcomes: list[str] = []
        self._message = ""
        self._seconds = 0.0
        self._unsound = False  # the test is not the one in its file, or only code under test expects it to fail

    def pytest_configure(self, config: pytest.Config) -> None:
        config.option.tbstyle = "line"  # tracebacks are not used, and rendering them takes the most time

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        stranger = slipped_in(session.config.pluginmanager, self)
        if stranger is not None:
            self.emit(event="tampered", what=f"the plugin {stranger}")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        if self.wanted is not None:
            items[:] = [item for item in items if not self.wanted.isdisjoint((item.nodeid, file_of(item.nodeid)))]
        if self.reverse:
            items.reverse()
        self.collected = len(items)
        items += canaries(self.canary, session, items)  # last, so that they see what the tests left behind

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        report: pytest.CollectReport = yield  # type: ignore[assignment]
        if report.failed:
            call = getattr(report, "call", None)
            error = None if call is None or call.excinfo is None else call.excinfo.value
            if isinstance(error, pytest.Collector.CollectError):
                error = None  # its text is a traceback that pytest has rendered
            self.emit(event="collect", id=collector.nodeid, message=message_of(error, report.longrepr))
        return report  # type: ignore[return-value]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._outcomes = []
        self._message = ""
        self._seconds = 0.0
        self._unsound = False
        self.emit(event="start", id=nodeid)
        if self.calls is not None:
            self.calls.start()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: pytest.TestReport = yield  # type: ignore[assignment]
        error = None if call.excinfo is None else call.excinfo.value
        unexpected = hasattr(report, "wasxfail") and not self.expected.of(item)
        altered = self.written.altered(item)
        self._unsound = self._unsound or unexpected or altered
        if altered:
            self._message = "the test that ran is not the one in its file"
        elif unexpected:
            self._message = "only the tests may say that a failure is expected"
        elif report.failed and not self._message:
            self._message = message_of(error, report.longrepr)
        return report  # type: ignore[return-value]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._outcomes.append("failed" if self._unsound else outcome_of(report))
        self._seconds += report.duration

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        calls = {} if self.calls is None else {"calls": self._numbers(self.calls.stop())}
        self.reported += 1
        worst = min(self._outcomes or ["error"], key=WORST_FIRST.index)
        seconds = round(self._seconds, 4)
        self.emit(event="test", id=nodeid, outcome=worst, message=self._message, seconds=seconds, **calls)

    def _numbers(self, functions: Sequence[str]) -> list[int]:
        new = [name for name in functions if name not in self._functions]
        if new:
            self.emit(event="functions", first=len(self._functions), names=new)
            self._functions.update(zip(new, range(len(self._functions), len(self._functions) + len(new)), strict=True))
        return [self._functions[name] for name in functions]

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self.emit(event="internal", inside=is_inside(excinfo.value, self.seal), message=summary(excinfo.value))


def file_of(test: str) -> str:
    """Return the file part of a node id."""
    return test.partition("::")[0]


def outcome_of(report: pytest.TestReport) -> str:
    """Return a report's outcome: passed, failed, skipped, error, xfailed or xpassed."""
    expected_failure = hasattr(report, "wasxfail")
    if report.skipped:
        return "xfailed" if expected_failure else "skipped"
    if report.passed:
        return "xpassed" if expected_failure else "passed"
    return "failed" if report.when == "call" else "error"


def message_of(error: BaseException | None, rendered: object) -> str:
    """Return what went wrong in one line, from the exception or else from the text that pytest rendered."""
    if error is not None:
        return summary(error)
    lines = [line.removeprefix("E  ").strip() for line in str(rendered).splitlines() if line.strip()]
    return lines[-1][:LONGEST] if lines else ""


def slipped_in(manager: pytest.PytestPluginManager, recorder: Recorder) -> str | None:
    """Return the name of a plugin that is not pytest's, a conftest file or named by one; None if there is none."""
    plugins = [plugin for plugin in manager.get_plugins() if plugin is not recorder and not is_pytests(plugin)]
    conftests = [plugin for plugin in plugins if os.path.basename(getattr(plugin, "__file__", "")) == "conftest.py"]
    named: set[str] = set()
    for conftest in conftests:
        listed = getattr(conftest, "pytest_plugins", ())
        named.update([listed] if isinstance(listed, str) else listed)
    strangers = [manager.get_name(plugin) or repr(plugin) for plugin in plugins if plugin not in conftests]
    return next((name for name in sorted(strangers) if name not in named), None)


def is_pytests(plugin: object) -> bool:
    """Return whether a plugin is a module of pytest, or an object whose class is defined in one."""
    if isinstance(plugin, types.ModuleType):
        return plugin.__name__.startswith("_pytest.") and sys.modules.get(plugin.__name__) is plugin
    kind = type(plugin)
    home = sys.modules.get(kind.__module__)
    return kind.__module__.startswith("_pytest.") and getattr(home, kind.__qualname__, None) is kind


def run_pytest(
    tests: Sequence[str] | None,
    wanted: frozenset[str] | None,
    request: Any,
    emit: Emit,
    seal: Seal,
    written: TestCode,
) -> tuple[int, int]:
    """Run pytest, and return its exit code and the number of tests that were reported."""
    recorder = Recorder(emit, seal, written, wanted, request)
    code = int(pytest.main([*FLAGS, "--", *(tests or ())], plugins=[recorder]))
    replaced = seal.broken()
    if replaced is not None:
        emit(event="tampered", what=replaced)
    emit(event="end", collected=recorder.collected, reported=recorder.reported, exit_code=code)
    return code, recorder.reported


def main(key: str, request: Any) -> int:
    """Run what the request asks for, and return pytest's exit code."""
    channel, write, dumps = os.dup(1), os.write, json.dumps  # before the code under test can replace them

    def emit(**event: Any) -> None:
        data = f"\n{key} {dumps(event)}\n".encode()
        while data:
            data = data[write(channel, data) :]

    emit(event="begin")
    random.seed(0)
    seal = Seal()
    try:
        return run(request, emit, seal)
    except BaseException as error:
        emit(event="internal", inside=is_inside(error, seal), message=summary(error))
        raise


def run(request: Any, emit: Emit, seal: Seal) -> int:
    """Run the tests that a request names, or all, emitting an event for each; return pytest's exit code."""
    tests: list[str] | None = request["tests"]
    files = None if tests is None else sorted(set(map(file_of, tests)))
    wanted = None if tests is None else frozenset(tests)
    written = TestCode(files or ())
    if tests is not None and len(tests) <= MANY:
        code, reported = run_pytest(tests, wanted, request, emit, seal, written)
        if code != pytest.ExitCode.USAGE_ERROR or reported:
            return code
        emit(event="again")  # one unknown node id stops pytest from running any, so run files and select
    present = None if files is None else [file for file in files if os.path.exists(file)]
    if present == []:
        code = int(pytest.ExitCode.NO_TESTS_COLLECTED)
        emit(event="end", collected=0, reported=0, exit_code=code)
        return code
    return run_pytest(present, wanted, request, emit, seal, written)[0]


if __name__ == "__main__":
    file = sys.argv.pop()
    with open(file, encoding="utf-8") as opened:
        asked = json.load(opened)
    os.unlink(file)
    gc.disable()  # the process lasts only seconds, so collecting garbage does not pay
    status = main(asked.pop("key"), asked)
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    os._exit(status)  # nothing registered by the code under test runs once the report is complete
