"""Runs tests next to the code under test and reports what came of them; `turnstile.tasks.swe.runner` reads it.

    python -m turnstile.tasks.swe.verifier KEY REQUEST

REQUEST is JSON: `tests`, node ids or whole files relative to the working folder, or null for the whole suite;
`reverse`, whether the last of them comes first; `canary`, the name of a test that is added and must fail;
`calls`, the folder whose functions are to be told by the tests that call them, or null. Every report line is
`KEY {json}` on the standard output as it was before any test could redirect it, and KEY is random, so what
the tests themselves print is not taken for a report. The project's pytest configuration is ignored, its
conftest files are honoured.

Code under test shares this process, so forging a report is made hard (the key is out of `sys.argv`, the canary
must fail, counts and exit code must agree), not impossible.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from turnstile.tasks.swe.calls import CallRecorder

FLAGS = (
    "-c",
    os.devnull,
    "--rootdir=.",
    *(
        flag
        for name in (
            "cacheprovider",
            "terminal",
            "faulthandler",
            "unraisableexception",  # collects garbage several times for warnings nobody reads
            "threadexception",
            "pastebin",
            "junitxml",
        )
        for flag in ("-p", f"no:{name}")
    ),
)
WORST_FIRST = ("error", "failed", "skipped", "xfailed", "xpassed", "passed")
MANY = 50  # node ids past which collecting whole files and choosing is quicker than asking for each
EXPLAINED = "AssertionError: assert "
LONGEST = 300  # characters of a message
HERE = os.getcwd() + os.sep
Emit = Callable[..., None]


def summary(error: BaseException) -> str:
    """The first line of an exception as a traceback ends with it, less the name where pytest explains an assertion."""
    text = traceback.format_exception_only(error)[-1].strip().partition("\n")[0]
    return text.removeprefix("AssertionError: ")[:LONGEST] if text.startswith(EXPLAINED) else text[:LONGEST]


def is_inside(error: BaseException) -> bool:
    """Whether the code under test had its hand in an error of ours: it passed through, or used up the memory."""
    frames = traceback.walk_tb(error.__traceback__)
    return isinstance(error, MemoryError) or any(frame.f_code.co_filename.startswith(HERE) for frame, _ in frames)


def canary() -> None:
    """A test that fails, by the way that all tests go, whatever the code under test does to the others."""
    raise AssertionError


class Recorder:
    """The pytest plugin: chooses and orders the wanted tests, adds the canary and reports every outcome."""

    def __init__(self, emit: Emit, wanted: frozenset[str] | None, request: Any) -> None:
        self.emit = emit
        self.wanted = wanted
        self.reverse: bool = request["reverse"]
        self.canary: str = request["canary"]
        self.calls = None if request["calls"] is None else CallRecorder(request["calls"])
        self.collected = 0
        self.reported = 0
        self._may_fail: frozenset[str] = frozenset()
        self._functions: dict[str, int] = {}  # each is named once in the report, and by number after that
        self._outcomes: list[str] = []
        self._message = ""
        self._seconds = 0.0

    def pytest_configure(self, config: pytest.Config) -> None:
        config.option.tbstyle = "line"  # nobody reads the tracebacks, and rendering them takes longest of all

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        if self.wanted is not None:
            items[:] = [item for item in items if not self.wanted.isdisjoint((item.nodeid, file_of(item.nodeid)))]
        if self.reverse:
            items.reverse()
        self.collected = len(items)
        self._may_fail = frozenset(item.nodeid for item in items if item.get_closest_marker("xfail") is not None)
        last = pytest.Function.from_parent(session, name=self.canary, callobj=canary)
        items.append(last)  # it sees what the tests left behind

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
        self.emit(event="start", id=nodeid)
        if self.calls is not None:
            self.calls.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: pytest.TestReport = yield  # type: ignore[assignment]
        if report.failed and not self._message:
            error = None if call.excinfo is None else call.excinfo.value
            self._message = message_of(error, report.longrepr)
        return report  # type: ignore[return-value]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._outcomes.append(outcome_of(report))
        self._seconds += report.duration

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        calls = {} if self.calls is None else {"calls": self._numbers(self.calls.stop())}
        self.reported += 1
        worst = min(self._outcomes or ["error"], key=WORST_FIRST.index)
        if worst == "xfailed" and nodeid not in self._may_fail:
            worst = "failed"  # the code under test can raise what pytest.xfail() raises
        seconds = round(self._seconds, 4)
        self.emit(event="test", id=nodeid, outcome=worst, message=self._message, seconds=seconds, **calls)

    def _numbers(self, functions: Sequence[str]) -> list[int]:
        new = [name for name in functions if name not in self._functions]
        if new:
            self.emit(event="functions", first=len(self._functions), names=new)
            self._functions.update(zip(new, range(len(self._functions), len(self._functions) + len(new)), strict=True))
        return [self._functions[name] for name in functions]

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self.emit(event="internal", inside=is_inside(excinfo.value), message=summary(excinfo.value))


def file_of(test: str) -> str:
    """The file of a node id."""
    return test.partition("::")[0]


def outcome_of(report: pytest.TestReport) -> str:
    expected_failure = hasattr(report, "wasxfail")
    if report.skipped:
        return "xfailed" if expected_failure else "skipped"
    if report.passed:
        return "xpassed" if expected_failure else "passed"
    return "failed" if report.when == "call" else "error"


def message_of(error: BaseException | None, rendered: object) -> str:
    """What went wrong, in a line: of the exception, or of what pytest has made of it."""
    if error is not None:
        return summary(error)
    lines = [line.removeprefix("E  ").strip() for line in str(rendered).splitlines() if line.strip()]
    return lines[-1][:LONGEST] if lines else ""


def run_pytest(tests: Sequence[str] | None, wanted: frozenset[str] | None, request: Any, emit: Emit) -> tuple[int, int]:
    """pytest's exit code, and how many tests were reported."""
    recorder = Recorder(emit, wanted, request)
    code = int(pytest.main([*FLAGS, "--", *(tests or ())], plugins=[recorder]))
    emit(event="end", collected=recorder.collected, reported=recorder.reported, exit_code=code)
    return code, recorder.reported


def main(key: str, request: Any) -> int:
    """Run what the request asks for; the exit code is pytest's."""
    channel, write, dumps = os.dup(1), os.write, json.dumps  # before the code under test can replace them

    def emit(**event: Any) -> None:
        data = f"\n{key} {dumps(event)}\n".encode()
        while data:
            data = data[write(channel, data) :]

    emit(event="begin")
    random.seed(0)
    try:
        return run(request, emit)
    except BaseException as error:
        emit(event="internal", inside=is_inside(error), message=summary(error))
        raise


def run(request: Any, emit: Emit) -> int:
    tests: list[str] | None = request["tests"]
    files = None if tests is None else sorted(set(map(file_of, tests)))
    wanted = None if tests is None else frozenset(tests)
    if tests is not None and len(tests) <= MANY:
        code, reported = run_pytest(tests, wanted, request, emit)
        if code != pytest.ExitCode.USAGE_ERROR or reported:
            return code
        emit(event="again")  # one unknown node id stops pytest from running any: take files and choose
    present = None if files is None else [file for file in files if os.path.exists(file)]
    if present == []:
        code = int(pytest.ExitCode.NO_TESTS_COLLECTED)
        emit(event="end", collected=0, reported=0, exit_code=code)
        return code
    return run_pytest(present, wanted, request, emit)[0]


if __name__ == "__main__":
    arguments = sys.argv[1:]
    del sys.argv[1:]
    gc.disable()  # a run of seconds in its own process, ended below: collecting would only cost
    status = main(arguments[0], json.loads(arguments[1]))
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    os._exit(status)  # nothing registered by the code under test runs once the report is complete
