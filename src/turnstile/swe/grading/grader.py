"""Grade a repair by applying the agent's files to a fresh copy and running the tests that must pass.

Outcomes depend only on the state of the code, so they are remembered by it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from turnstile.errors import TaskError
from turnstile.sandboxes.base import Limits, Sandboxes
from turnstile.sandboxes.local import LocalSandboxes
from turnstile.swe.grading.bench import Bench, Files
from turnstile.swe.grading.memo import Memo
from turnstile.swe.grading.testrun import PRELOAD, TEST_LIMITS, Report
from turnstile.swe.tree import can_change_tests, hides_a_library, inside, tree_digest


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The result of grading; `resolved` means that every FAIL_TO_PASS and every PASS_TO_PASS test passes.

    `failed` are the tests that did not pass, FAIL_TO_PASS first. `ignored` are the changed files that were not applied,
    because they are tests or would replace a library. `waited_out` means that the wall clock ended the run, `silent`
    that the run named none of the tests. `seconds` is the wall-clock time of the run that gave the verdict, and
    `from_memo` means that this was an earlier run.
    """

    resolved: bool
    fail_to_pass_passed: int
    fail_to_pass_total: int
    pass_to_pass_passed: int
    pass_to_pass_total: int
    failed: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    messages: Mapping[str, str] = field(default_factory=dict)
    timed_out: bool = False
    waited_out: bool = False
    problem: str | None = None
    silent: bool = False
    seconds: float = 0.0
    from_memo: bool = False

    def passed_by_test(self, fail_to_pass: Sequence[str]) -> dict[str, bool]:
        """Return whether each of these tests passed."""
        bad = set(self.failed)
        return {test: test not in bad for test in fail_to_pass}


class CodeGrader:
    """Grades repairs in sandboxes of one provider, and remembers up to `memo` runs.

    Equal requests made at the same time share one run. Errors are not remembered. A run that the wall clock ended is
    repeated once, since a busy machine alone can cause that; the second run counts as it is, but is not remembered if
    the wall clock ended it too. A run that used up its processor time is remembered like any other.
    """

    def __init__(self, sandboxes: Sandboxes, *, limits: Limits = TEST_LIMITS, memo: int = 50_000) -> None:
        self.bench = Bench(sandboxes, limits=limits)
        self._memo: Memo[Report] = Memo(memo, passing=lambda report: report.waited_out)
        self._digests: dict[Path, str] = {}

    @property
    def runs(self) -> int:
        """The number of test runs that were started."""
        return self._memo.runs

    @property
    def reused(self) -> int:
        """The number of requests answered without a run."""
        return self._memo.reused

    async def grade(
        self,
        template: Path,
        files: Files,
        *,
        fail_to_pass: Sequence[str],
        pass_to_pass: Sequence[str] = (),
        executable: frozenset[str] = frozenset(),
        env: Mapping[str, str] | None = None,
        repeat: int = 0,
    ) -> Verdict:
        """Apply the changed files that are not tests to a fresh copy of `template`, and run the named tests.

        A new module that would be imported in place of a library is not applied either. The files in `executable` are
        made executable. Requests that differ in `repeat` are run anew.

        Raises ValueError if a path leaves the template, VerifierError and SandboxError as `run_tests` does, and
        TaskError if there is no FAIL_TO_PASS test.
        """
        if not fail_to_pass:
            raise TaskError("a repair cannot be graded without a FAIL_TO_PASS test")
        tests = tuple(dict.fromkeys((*fail_to_pass, *pass_to_pass)))
        ignored = left_out(template, files, tests, env)
        code = {path: data for path, data in files.items() if path not in ignored}
        report, from_memo = await self._report(
            template, code, tests, env, executable=executable & code.keys(), repeat=repeat
        )
        bad = {test for test in fail_to_pass if not report.repaired(test)}
        bad.update(test for test in pass_to_pass if not report.passed(test))
        f2p = sum(test not in bad for test in fail_to_pass)
        p2p = sum(test not in bad for test in pass_to_pass)
        return Verdict(
            resolved=f2p == len(fail_to_pass) and p2p == len(pass_to_pass),
            fail_to_pass_passed=f2p,
            fail_to_pass_total=len(fail_to_pass),
            pass_to_pass_passed=p2p,
            pass_to_pass_total=len(pass_to_pass),
            failed=tuple(test for test in tests if test in bad),
            ignored=ignored,
            messages=report.messages,
            timed_out=report.timed_out,
            waited_out=report.waited_out,
            problem=report.problem,
            seconds=report.seconds,
            from_memo=from_memo,
        )

    async def run_tests(
        self,
        template: Path,
        files: Files,
        node_ids: Sequence[str] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        reverse: bool = False,
    ) -> Report:
        """Return the outcomes of tests (None for all) on `template` with all of `files` applied, tests included."""
        tests = None if node_ids is None else tuple(node_ids)
        report, _ = await self._report(template, files, tests, env, reverse)
        return report

    async def close(self) -> None:
        """End the runs under way. The provider of sandboxes is left to its owner."""
        await self._memo.close()
        await self.bench.close()

    async def _report(
        self,
        template: Path,
        files: Files,
        tests: tuple[str, ...] | None,
        env: Mapping[str, str] | None,
        reverse: bool = False,
        executable: frozenset[str] = frozenset(),
        repeat: int = 0,
    ) -> tuple[Report, bool]:
        key = await self._key(template, files, tests, env, reverse, executable, repeat)
        return await self._memo.get(
            key,
            lambda: self.bench.run(template, files, tests, env=env, reverse=reverse, executable=executable),
        )

    async def _key(
        self,
        template: Path,
        files: Files,
        tests: tuple[str, ...] | None,
        env: Mapping[str, str] | None,
        reverse: bool,
        executable: frozenset[str],
        repeat: int,
    ) -> str:
        """Return a key for everything that the outcome depends on.

        A file whose content is the template's own does not count as changed.
        """
        if template not in self._digests:
            self._digests[template] = await asyncio.to_thread(tree_digest, template)
        changed = {
            normal(path): None if data is None else hashlib.sha256(data).hexdigest()
            for path, data in files.items()
            if data != content(template, path)
        }
        settings = (sorted((env or {}).items()), reverse, sorted(executable), repeat)
        parts = (self._digests[template], sorted(changed.items()), tests, settings)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@asynccontextmanager
async def local_grader(workers: int = 2) -> AsyncIterator[CodeGrader]:
    """Yield a grader over local sandboxes with `workers` runs at once, and close both afterwards."""
    sandboxes = LocalSandboxes(preload=PRELOAD, workers=workers)
    grader = CodeGrader(sandboxes)
    try:
        yield grader
    finally:
        await grader.close()
        await sandboxes.close()


def left_out(
    template: Path, files: Files, tests: Sequence[str], env: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Return the changed files that are not applied: tests, files that affect tests, and modules that hide a library.

    `tests` are the graded ones, and `env` is their environment. Raises ValueError if a path leaves the template.
    """
    graded = {test.partition("::")[0] for test in tests}
    places = (env or {}).get("PYTHONPATH", ".").split(os.pathsep)
    return tuple(
        sorted(
            path
            for path in files
            if can_change_tests(path)
            or normal(path) in graded
            or hides_a_library(path, lambda inner: (template / inner).exists(), places)
        )
    )


def normal(path: str) -> str:
    """Return a path without `.`, `..` and double slashes."""
    return os.path.normpath(path)


def content(template: Path, path: str) -> bytes | None:
    """Return the bytes of a template's file; None if there is no such file. Raises ValueError for a path outside."""
    file = template / inside(path)
    return file.read_bytes() if file.is_file() else None
