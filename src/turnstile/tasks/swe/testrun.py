"""Runs pytest over a working copy in a process of its own: `python -P testrun.py SPEC.json`.

A script rather than a module, so that nothing of this project is imported beside the code under test. The
spec names the copy (`root`), what goes in front of the import path (`paths`), the test files (`tests`), the
test ids to keep (`nodes`, null for all), whether the last comes first (`reverse`), the folder whose function
calls are recorded (`profile`, null for none), limits, and the file for the report. The report is written last
and renamed into place: a run that is killed leaves none.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any


class Recorder:
    """A pytest plugin: outcome, duration and message of every test, and which functions it called."""

    def __init__(self, nodes: list[str] | None, root: str, profile: str | None, reverse: bool) -> None:
        self.keep = None if nodes is None else set(nodes)
        self.reverse = reverse
        self.root = root
        self.profile = profile
        self.results: dict[str, dict[str, Any]] = {}
        self.errors: list[str] = []
        self.calls: dict[str, list[str]] = {}
        self._known: dict[int, str] = {}
        self._alive: list[Any] = []  # code objects, so that no id is used twice
        self._called: set[str] = set()

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        if self.keep is not None:
            dropped = [item for item in items if item.nodeid not in self.keep]
            items[:] = [item for item in items if item.nodeid in self.keep]
            config.hook.pytest_deselected(items=dropped)
        if self.reverse:
            items.reverse()

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.errors.append(f"{report.nodeid}: {str(report.longrepr).strip().splitlines()[-1][:300]}")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._called = set()
        if self.profile is not None:
            sys.setprofile(self._on_event)

    def pytest_runtest_logreport(self, report: Any) -> None:
        result = self.results.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0, "message": ""})
        result["seconds"] += report.duration
        if report.outcome == "failed":
            result["outcome"] = "failed"
            result["message"] = result["message"] or _message(report)
        elif report.outcome == "skipped" and not hasattr(report, "wasxfail") and result["outcome"] == "passed":
            result["outcome"] = "skipped"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        sys.setprofile(None)
        self.calls[nodeid] = sorted(self._called)

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        name = self._known.get(id(code))
        if name is None:
            name, path = "", code.co_filename
            if self.profile is not None and path.startswith(self.profile):
                name = f"{os.path.relpath(path, self.root).replace(os.sep, '/')}:{code.co_firstlineno}"
            self._known[id(code)] = name
            self._alive.append(code)
        if name:
            self._called.add(name)


def _message(report: Any) -> str:
    """The first line of what went wrong, without the traceback."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(crash.message if crash is not None else report.longrepr).strip().splitlines()
    return (lines[0] if lines else "")[:200]


def run(spec: dict[str, Any]) -> dict[str, Any]:
    import pytest

    os.chdir(spec["root"])
    sys.path[:0] = spec["paths"]
    sys.dont_write_bytecode = True
    recorder = Recorder(spec["nodes"], spec["root"], spec["profile"], spec["reverse"])
    arguments = ["-q", "--tb=short", "-p", "no:cacheprovider", "-W", "ignore", "--rootdir", spec["root"]]
    code = pytest.main([*arguments, "-c", spec["ini"], *spec["tests"]], plugins=[recorder])
    return {"exit": int(code), "errors": recorder.errors, "results": recorder.results, "calls": recorder.calls}


def die_with_parent() -> None:
    """Asks Linux to kill this process when the one that started it is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main() -> None:
    die_with_parent()
    spec = json.loads(Path(sys.argv.pop()).read_text(encoding="utf-8"))  # code under test may read sys.argv
    resource.setrlimit(resource.RLIMIT_AS, (spec["memory_mb"] << 20,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (spec["cpu_seconds"], spec["cpu_seconds"] + 2))
    report = run(spec)
    temporary = Path(spec["report"] + ".tmp")
    temporary.write_text(json.dumps(report), encoding="utf-8")
    temporary.replace(spec["report"])


if __name__ == "__main__":
    main()
