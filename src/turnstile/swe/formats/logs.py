"""Parse the output of a test run into statuses: PASSED, FAILED, ERROR, SKIPPED, XFAIL or XPASS for each test.

Uses the standard library only, since it is also copied beside the tests of exported tasks. For other runners, write a
function from the text to a mapping from tests to statuses, and name it as package.module:function. A parser may have an
attribute `trouble`, a function of text, statuses and exit code that says what is wrong with the run as a whole, or
returns None if nothing is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_STATUS = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
_SUMMARY = re.compile(rf"({_STATUS}) (\S.*)")
_VERBOSE = re.compile(rf"(\S.*?) ({_STATUS})(?: \(.*\))?(?: +\[ *\d+%\])?")
_UNITTEST = re.compile(r"(\w+) \(([\w.]+)\)")
_WORDS = {"ok": "PASSED", "FAIL": "FAILED", "ERROR": "ERROR", "skipped": "SKIPPED", "expected failure": "XFAIL",
          "unexpected success": "XPASS"}  # fmt: skip
_FIXTURES = ("setUpClass (", "tearDownClass (", "setUpModule (", "tearDownModule (")
_RAN = re.compile(r"^Ran (\d+) tests? in .*$", re.MULTILINE)
_CLOSED = re.compile(r"^(OK|FAILED)(?: \(.*\))?$", re.MULTILINE)
_ENDS = re.compile(rf"\.\.\. (?:.*)?({'|'.join(_WORDS)})(?: .*)?$")


def pytest_log(text: str) -> dict[str, str]:
    """Return the statuses in the output of `pytest -rA` or `pytest -v`; the short summary overrides other lines.

    A test that passed but whose teardown failed has the status ERROR.
    """
    found: dict[str, str] = {}
    for line in _ANSI.sub("", text).splitlines():
        line = line.strip()
        if match := _SUMMARY.fullmatch(line):
            status, rest = match.groups()
            name = rest if status == "PASSED" else rest.partition(" - ")[0]
            if status == "SKIPPED" and name.startswith("["):
                continue  # this names a place in the code, not a test
            if found.get(name) != "ERROR" or status == "FAILED":
                found[name] = status
        elif "::" in line and (match := _VERBOSE.fullmatch(line)):
            found[match[1]] = match[2]
    return found


def unittest_log(text: str) -> dict[str, str]:
    """Return the statuses in the output of `python -m unittest -v`, by `test (module.Class)` as printed.

    A docstring's first line or output of the test may stand between name and status.
    """
    found: dict[str, str] = {}
    waiting = ""
    for line in _ANSI.sub("", text).splitlines():
        if match := _UNITTEST.match(line):
            waiting = f"{match[1]} ({match[2]})"
        elif line.startswith(("=====", "-----")):
            waiting = ""
        ended = _ENDS.search(line) or re.fullmatch(rf"({'|'.join(_WORDS)})", line.strip())
        if waiting and ended:
            found[waiting] = _WORDS[ended[1]]
            waiting = ""
    return found


def unittest_line(test: str, status: str) -> str:
    """Return the line that `unittest -v` would print for a test with this status."""
    return f"{test} ... {next(word for word, meant in _WORDS.items() if meant == status)}"


def unittest_trouble(text: str, statuses: Mapping[str, str], exit_code: int) -> str | None:
    """Return what a run's last lines show to be wrong, in a few words; None if nothing.

    "Ran N tests" and OK or FAILED must be there once, and agree with the statuses and the exit code.
    """
    text = _ANSI.sub("", text)
    ran = list(_RAN.finditer(text))
    closed = _CLOSED.findall(text, ran[-1].end()) if ran else []
    if len(ran) != 1 or len(closed) != 1:
        return f"the log says {len(ran)} times how many tests ran, and {len(closed)} times how they ended"
    read = sum(not test.startswith(_FIXTURES) for test in statuses)
    if int(ran[0][1]) != read:
        return f"the log says that {ran[0][1]} tests ran, and names {read}"
    failed = not {"FAILED", "ERROR", "XPASS"}.isdisjoint(statuses.values())
    if failed != (closed[0] == "FAILED"):
        return f"the log ends with {closed[0]} and names {'a' if failed else 'no'} test that failed"
    if failed != (exit_code != 0):
        return f"the log ends with {closed[0]} and the exit code is {exit_code}"
    return None


unittest_log.trouble = unittest_trouble  # type: ignore[attr-defined]
