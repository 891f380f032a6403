"""Find which tests are stable and which functions each of them calls, once per package; the result is cached."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from turnstile.errors import TaskError
from turnstile.sandboxes.base import Limits
from turnstile.swe.grading.bench import Bench
from turnstile.swe.grading.testrun import Report
from turnstile.swe.packages.source import Package, Progress

_FORMAT = 4
SLOW = 0.5  # seconds; a test that takes longer counts as slow


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """The stable tests of a package with their durations in seconds, and the tests that call each function.

    Functions are named `file:line`, with the line where the function begins, decorators included.
    """

    seconds: Mapping[str, float]
    covering: Mapping[str, tuple[str, ...]]
    collected: int
    unstable: tuple[str, ...]  # collected, but did not pass in every run
    flaky: tuple[str, ...] = ()  # those of them that passed in some run
    runs: int = 2
    breadth: Mapping[str, int] = field(init=False)  # number of functions that each test calls

    def tests_of(self, file: str, scope: tuple[int, int], cap: int) -> tuple[str, ...]:
        """Return at most `cap` tests that call the function at `scope`, quick and specific ones first.

        Measured times only tell slow tests from quick ones, so that two measurements lead to the same choice.
        """
        tests = self.covering.get(f"{file}:{scope[0]}", ())
        return tuple(sorted(tests, key=lambda node: (self.seconds[node] > SLOW, self.breadth[node], node))[:cap])

    def __post_init__(self) -> None:
        counts: dict[str, int] = {}
        for tests in self.covering.values():
            for node in tests:
                counts[node] = counts.get(node, 0) + 1
        object.__setattr__(self, "breadth", counts)


async def profile(
    package: Package,
    bench: Bench,
    *,
    runs: int = 2,
    seconds: float = 300.0,
    progress: Progress = lambda message: None,
) -> Profile:
    """Return a package's profile, from the cache or from `runs` runs (at least two) of the whole suite.

    Calls are recorded in the first run. The third run and every second one after it take the tests in reverse order.
    `seconds` limits each run, in wall-clock and in processor time. Raises TaskError if the suite hangs, cannot be
    collected, or has no test that passes in every run.
    """
    name = f"profile-{sys.version_info.major}.{sys.version_info.minor}.json"
    path = package.tree.with_name(name)
    cached = _load(path, package)
    if cached is not None and cached.runs >= runs:
        return cached
    found = await _run_suite(package, bench, max(runs, 2), seconds, progress)
    first, second = found[:2]
    collected = [test for test in first.outcomes if test not in first.uncollected]
    stable = sorted(test for test in collected if all(run.passed(test) for run in found))
    if not stable:
        raise TaskError(f"{package.spec}: none of its {len(collected)} tests passes here{_first_problem(first)}")
    measured = Profile(
        seconds={test: second.durations[test] for test in stable},
        covering=_covering(package, first, stable),
        collected=len(collected),
        unstable=tuple(sorted(set(collected) - set(stable))),
        flaky=tuple(sorted(test for test in set(collected) - set(stable) if any(run.passed(test) for run in found))),
        runs=len(found),
    )
    _save(path, package, measured)
    return measured


def _first_problem(run: Report) -> str:
    """Return the first problem that kept tests from running, as the end of a sentence; "" if there is none."""
    problems = [f"{file}: {why}" for file, why in run.uncollected.items()] + [run.problem or ""]
    if not problems[0]:
        return ""
    missing = re.search(r"No module named '([^'.]+)", problems[0])
    hint = f" (if the tests need it, add --extra with the package that holds {missing[1]})" if missing else ""
    return f"; the first problem: {problems[0]}{hint}"


async def _run_suite(package: Package, bench: Bench, runs: int, seconds: float, progress: Progress) -> list[Report]:
    """Run the suite `runs` times, recording calls in the first run.

    Raises TaskError if a run times out or breaks off.
    """
    limits = Limits(seconds=seconds, cpu_seconds=seconds, memory_mb=4096, file_mb=512)
    found = []
    for number in range(runs):
        progress(f"running the tests of {package.label} ({number + 1} of {runs})")
        run = await bench.run(
            package.tree,
            {},
            package.tests,
            env=package.environment,
            calls=None if number else package.import_root,
            reverse=number > 1 and number % 2 == 0,
            limits=limits,
        )
        if run.timed_out:
            raise TaskError(
                f"{package.spec}: its tests did not end within {seconds:.0f} s; give them more "
                "(--suite-seconds), or choose another package"
            )
        if run.problem is not None and not run.uncollected:
            raise TaskError(
                f"{package.spec}: its tests do not run to their end ({run.problem}); choose another package"
            )
        found.append(run)
    return found


def _covering(package: Package, run: Report, tests: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Map each function in the package's modules, which exclude test files, to the tests that call it."""
    modules = set(package.modules)
    covering: dict[str, list[str]] = {}
    for test in tests:
        for function in run.calls.get(test, ()):
            if function.rpartition(":")[0] in modules:
                covering.setdefault(function, []).append(test)
    return {function: tuple(found) for function, found in sorted(covering.items())}


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
        "flaky": list(measured.flaky),
        "runs": measured.runs,
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
        flaky=tuple(record["flaky"]),
        runs=record["runs"],
    )
