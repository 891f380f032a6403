"""What a test run printed, as status by test: PASSED, FAILED, ERROR, SKIPPED, XFAIL or XPASS.

Of the standard library, since it is also copied beside the tests of exported tasks. Other runners: a function of
your own from text to such a map, named as package.module:function.
"""

from __future__ import annotations

import re

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_STATUS = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
_SUMMARY = re.compile(rf"({_STATUS}) (\S.*)")
_VERBOSE = re.compile(rf"(\S.*?) ({_STATUS})(?: \(.*\))?(?: +\[ *\d+%\])?")
_UNITTEST = re.compile(r"(\w+) \(([\w.]+)\)")
_WORDS = {"ok": "PASSED", "FAIL": "FAILED", "ERROR": "ERROR", "skipped": "SKIPPED", "expected failure": "XFAIL",
          "unexpected success": "XPASS"}  # fmt: skip
_ENDS = re.compile(rf"\.\.\. (?:.*)?({'|'.join(_WORDS)})(?: .*)?$")


def pytest_log(text: str) -> dict[str, str]:
    """Statuses from `pytest -rA` (the short summary) or `pytest -v`; the summary has the last word.

    A test that passed and whose teardown broke has ERROR.
    """
    found: dict[str, str] = {}
    for line in _ANSI.sub("", text).splitlines():
        line = line.strip()
        if match := _SUMMARY.fullmatch(line):
            status, rest = match.groups()
            name = rest if status == "PASSED" else rest.partition(" - ")[0]
            if status == "SKIPPED" and name.startswith("["):
                continue  # it gives a place in the code, not a test
            if found.get(name) != "ERROR" or status == "FAILED":
                found[name] = status
        elif "::" in line and (match := _VERBOSE.fullmatch(line)):
            found[match[1]] = match[2]
    return found


def unittest_log(text: str) -> dict[str, str]:
    """Statuses from `python -m unittest -v`, by `test (module.Class)` as printed, also where a docstring's line or
    output of the test stands between name and status."""
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
