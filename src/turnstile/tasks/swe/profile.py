"""Which tests are stable, and which functions each of them calls: measured once a package, kept in the cache."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnstile.errors import TaskError
from turnstile.tasks.swe.source import Package, Progress

_SCRIPT = Path(__file__).with_name("testrun.py")
_FORMAT = 2
SLOW = 0.5  # seconds of one test
_IGNORED = shutil.ignore_patterns("__pycache__", ".pytest_cache")


@dataclass(frozen=True, kw_only=True, slots=True)
class TestResult:
    """One test's outcome (passed, failed or skipped; an expected failure counts as passed)."""

    __test__ = False  # not a test class, whatever its name says to pytest

    outcome: str
    seconds: float
    message: str  # first line of what went wrong


@dataclass(frozen=True, kw_only=True, slots=True)
class TestRun:
    """What one pytest process found; `calls` maps a test to the `file:line` of the functions it called."""

    __test__ = False

    results: Mapping[str, TestResult]
    calls: Mapping[str, Sequence[str]]
    errors: tuple[str, ...]  # files that could not be collected

    @property
    def passed(self) -> set[str]:
        return {node for node, result in self.results.items() if result.outcome == "passed"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """The stable tests of a package with their seconds, and the tests that call each function.

    Functions are named `file:line`, where line is the function's first line, decorators included.
    """

    seconds: Mapping[str, float]
    covering: Mapping[str, tuple[str, ...]]
    collected: int
    unstable: tuple[str, ...]  # collected, but not passing in both runs
    breadth: Mapping[str, int] = field(init=False)  # functions that each test calls

    def tests_of(self, file: str, scope: tuple[int, int], cap: int) -> tuple[str, ...]:
        """At most `cap` tests that call the function at `scope`: quick and specific ones first.

        Measured times only part the slow from the quick, so that two measurements give the same choice.
        """
        tests = self.covering.get(f"{file}:{scope[0]}", ())
        return tuple(sorted(tests, key=lambda node: (self.seconds[node] > SLOW, self.breadth[node], node))[:cap])

    def __post_init__(self) -> None:
        counts: dict[str, int] = {}
        for tests in self.covering.values():
            for node in tests:
                counts[node] = counts.get(node, 0) + 1
        object.__setattr__(self, "breadth", counts)


def copy_tree(package: Package, into: Path) -> Path:
    """A private working copy of the pristine tree."""
    shutil.copytree(package.tree, into, ignore=_IGNORED, symlinks=True)
    return into.resolve()


def clean_environment(home: str) -> dict[str, str]:
    """The environment tests run in: nothing of the caller's but its PATH, and everything fixed that varies."""
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": home,
        "TMPDIR": home,
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }


async def run_tests(
    package: Package,
    root: Path,
    *,
    nodes: Sequence[str] | None = None,
    profiled: bool = False,
    reverse: bool = False,
    seconds: float = 300.0,
    cpu_seconds: float | None = None,
    memory_mb: int = 4096,
) -> TestRun | None:
    """Runs tests of the copy at `root` in a process group of its own; None when it hung or died.

    `root` is absolute and free of links. `nodes` picks tests by id (their files are the only ones collected);
    `reverse` runs the last of them first;
    `seconds` is wall-clock, `cpu_seconds` (the same unless given) processor time, which does not depend on what
    else the machine does.
    """
    with tempfile.TemporaryDirectory(prefix="turnstile-test-", ignore_cleanup_errors=True) as folder:
        report, ini = Path(folder) / "report.json", Path(folder) / "pytest.ini"
        ini.write_text("[pytest]\n")  # the package's own settings may ask for plugins that are not here
        files = list(package.tests) if nodes is None else sorted({node.split("::", 1)[0] for node in nodes})
        spec: dict[str, Any] = {
            "root": str(root),
            "paths": package.import_paths(root),
            "tests": files,
            "nodes": None if nodes is None else list(nodes),
            "reverse": reverse,
            "profile": package.import_paths(root)[0] if profiled else None,
            "ini": str(ini),
            "report": str(report),
            "memory_mb": memory_mb,
            "cpu_seconds": max(1, math.ceil(seconds if cpu_seconds is None else cpu_seconds)),
        }
        (Path(folder) / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", str(_SCRIPT), str(Path(folder) / "spec.json")),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=clean_environment(folder),
            start_new_session=True,
        )
        try:
            await asyncio.wait_for(process.wait(), timeout=seconds)
        except TimeoutError:
            pass  # killed below; no report is how a hang is told
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if not report.exists():
            return None
        found = json.loads(report.read_text(encoding="utf-8"))
    results = {node: TestResult(**result) for node, result in found["results"].items()}
    return TestRun(results=results, calls=found["calls"], errors=tuple(found["errors"]))


async def profile(package: Package, *, seconds: float = 300.0, progress: Progress = lambda message: None) -> Profile:
    """Runs the whole suite twice, once with calls recorded; kept in the cache under the tree's digest.

    Raises TaskError when the suite hangs, cannot be collected, or no test passes in both runs.
    """
    name = f"profile-{sys.version_info.major}.{sys.version_info.minor}.json"
    path = package.tree.with_name(name)
    cached = _load(path, package)
    if cached is not None:
        return cached
    runs = []
    with tempfile.TemporaryDirectory(prefix="turnstile-profile-", ignore_cleanup_errors=True) as folder:
        for number, profiled in enumerate((True, False), start=1):
            progress(f"running the tests of {package.label} ({number} of 2)")
            root = copy_tree(package, Path(folder) / f"run{number}")
            run = await run_tests(package, root, profiled=profiled, seconds=seconds)
            if run is None:
                raise TaskError(f"{package.spec}: its tests did not end within {seconds:.0f} s; choose another package")
            runs.append(run)
    first, second = runs
    stable = first.passed & second.passed
    if not stable:
        why = f"; the first problem: {first.errors[0]}" if first.errors else ""
        raise TaskError(f"{package.spec}: none of its {len(first.results)} tests passes here{why}")
    modules = set(package.modules)
    covering: dict[str, list[str]] = {}
    for node in sorted(stable):
        for function in first.calls.get(node, ()):
            if function.rpartition(":")[0] not in modules:
                continue  # tests may live inside the package
            covering.setdefault(function, []).append(node)
    measured = Profile(
        seconds={node: round(second.results[node].seconds, 4) for node in sorted(stable)},
        covering={function: tuple(tests) for function, tests in sorted(covering.items())},
        collected=len(first.results),
        unstable=tuple(sorted(set(first.results) - stable)),
    )
    _save(path, package, measured)
    return measured


def _save(path: Path, package: Package, measured: Profile) -> None:
    nodes = list(measured.seconds)
    index = {node: position for position, node in enumerate(nodes)}
    record = {
        "format": _FORMAT,
        "digest": package.digest,
        "seconds": dict(measured.seconds),
        "covering": {function: [index[node] for node in tests] for function, tests in measured.covering.items()},
        "collected": measured.collected,
        "unstable": list(measured.unstable),
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(record), encoding="utf-8")
    temporary.replace(path)


def _load(path: Path, package: Package) -> Profile | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    if record["format"] != _FORMAT or record["digest"] != package.digest:
        return None
    nodes = list(record["seconds"])
    covering = {function: tuple(nodes[i] for i in tests) for function, tests in record["covering"].items()}
    return Profile(
        seconds=record["seconds"],
        covering=covering,
        collected=record["collected"],
        unstable=tuple(record["unstable"]),
    )
