"""Grading of a repair: a fresh copy, the agent's files in it, the tests that must pass.

Outcomes depend on nothing but the state of the code, so they are remembered by it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from turnstile.errors import TaskError, VerifierError
from turnstile.sandboxes.base import Limits, Sandboxes
from turnstile.tasks.swe.runner import TEST_LIMITS, Report, run_tests

__all__ = ["TEST_LIMITS", "Files", "Grader", "Report", "Verdict", "is_test_file", "run_tests", "tree_digest"]

Files = Mapping[str, bytes | None]
"""What an agent changed: path -> new content, None for a file it removed."""

PRECOMPILE = "turnstile.tasks.swe.precompile"
COMPILE_LIMITS = Limits(seconds=300.0, cpu_seconds=300.0)
TEST_FOLDERS = frozenset({"test", "tests"})
STARTUP = frozenset({"conftest.py", "sitecustomize.py", "usercustomize.py"})


def is_test_file(path: str) -> bool:
    """Whether a change to `path` could change the tests instead of the code."""
    parts = PurePosixPath(path)
    name = parts.name
    return (
        name in STARTUP
        or name.startswith("test_")
        or name.endswith(("_test.py", ".pyc", ".pth"))
        or not TEST_FOLDERS.isdisjoint(parts.parts[:-1])
        or "__pycache__" in parts.parts
    )


def normal(path: str) -> str:
    return os.path.normpath(path)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What grading found. `resolved`: every FAIL_TO_PASS and every PASS_TO_PASS test passes.

    `ignored` are the changed files that were not applied, being tests; `seconds` is the wall-clock time of the
    run that gave the verdict, `from_memo` says that this was an earlier one.
    """

    resolved: bool
    fail_to_pass_passed: int
    fail_to_pass_total: int
    pass_to_pass_passed: int
    pass_to_pass_total: int
    ignored: tuple[str, ...] = ()
    messages: Mapping[str, str] = field(default_factory=dict)
    timed_out: bool = False
    problem: str | None = None
    seconds: float = 0.0
    from_memo: bool = False

    @property
    def ignored_test_edits(self) -> int:
        return len(self.ignored)


class Grader:
    """Grades repairs in sandboxes of one provider and remembers up to `memo` runs.

    A template is taken not to change while the grader lives; it is compiled once, and every run is on a fresh
    copy of that. Equal requests made at the same time share one run. Errors are not remembered.
    """

    def __init__(
        self,
        sandboxes: Sandboxes,
        *,
        limits: Limits = TEST_LIMITS,
        plugins: Sequence[str] = (),
        memo: int = 50_000,
    ) -> None:
        self._sandboxes = sandboxes
        self._limits = limits
        self._plugins = tuple(plugins)
        self._memo: OrderedDict[str, Report] = OrderedDict()
        self._memo_size = memo
        self._running: dict[str, asyncio.Task[Report]] = {}
        self._digests: dict[Path, str] = {}
        self._compiled: dict[Path, asyncio.Task[Path]] = {}
        self.runs = 0  # runs of tests
        self.reused = 0  # requests answered without one

    async def grade(
        self,
        template: Path,
        files: Files,
        *,
        fail_to_pass: Sequence[str],
        pass_to_pass: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> Verdict:
        """Apply the changed files that are no tests to a fresh copy of `template` and run the named tests.

        Raises ValueError when a path leaves the template, VerifierError and SandboxError as `run_tests`, and
        TaskError when there is no FAIL_TO_PASS test.
        """
        if not fail_to_pass:
            raise TaskError("a repair cannot be graded without a FAIL_TO_PASS test")
        graded = {test.partition("::")[0] for test in (*fail_to_pass, *pass_to_pass)}
        ignored = tuple(sorted(path for path in files if is_test_file(path) or normal(path) in graded))
        code = {path: data for path, data in files.items() if path not in ignored}
        tests = tuple(dict.fromkeys((*fail_to_pass, *pass_to_pass)))
        report, from_memo = await self._report(template, code, tests, env)
        f2p = sum(map(report.passed, fail_to_pass))
        p2p = sum(map(report.passed, pass_to_pass))
        return Verdict(
            resolved=f2p == len(fail_to_pass) and p2p == len(pass_to_pass),
            fail_to_pass_passed=f2p,
            fail_to_pass_total=len(fail_to_pass),
            pass_to_pass_passed=p2p,
            pass_to_pass_total=len(pass_to_pass),
            ignored=ignored,
            messages=report.messages,
            timed_out=report.timed_out,
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
    ) -> Report:
        """The outcomes of tests (all for None) on `template` with all of `files` applied, tests included."""
        report, _ = await self._report(template, files, None if node_ids is None else tuple(node_ids), env)
        return report

    async def close(self) -> None:
        """End the runs under way. The provider of sandboxes is its owner's to close."""
        running = [*self._running.values(), *self._compiled.values()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _report(
        self, template: Path, files: Files, tests: tuple[str, ...] | None, env: Mapping[str, str] | None
    ) -> tuple[Report, bool]:
        key = await self._key(template, files, tests, env)
        known = self._memo.get(key)
        if known is not None:
            self._memo.move_to_end(key)
            self.reused += 1
            return known, True
        task = self._running.get(key)
        shared = task is not None
        if task is None:
            task = asyncio.create_task(self._run(key, template, files, tests, env))
            self._running[key] = task
            task.add_done_callback(lambda done: self._settle(key, done))
        report = await asyncio.shield(task)  # one caller's cancellation is not the others'
        self.reused += shared
        return report, shared

    def _settle(self, key: str, task: asyncio.Task[Report]) -> None:
        del self._running[key]
        if task.cancelled() or task.exception() is not None:
            return  # the awaiting callers have it
        self._memo[key] = task.result()
        while len(self._memo) > self._memo_size:
            self._memo.popitem(last=False)

    async def _run(
        self,
        key: str,
        template: Path,
        files: Files,
        tests: tuple[str, ...] | None,
        env: Mapping[str, str] | None,
    ) -> Report:
        self.runs += 1
        sandbox = await self._sandboxes.start(await self._compile(template))
        try:
            for path, data in files.items():
                if data is not None:
                    await sandbox.write(path, data)
            removed = [path for path, data in files.items() if data is None]
            if removed:
                await sandbox.exec(["rm", "-f", "--", *removed])
            return await run_tests(sandbox, tests, limits=self._limits, env=env, plugins=self._plugins)
        finally:
            await sandbox.close()

    async def _compile(self, template: Path) -> Path:
        """A copy of the template with its byte code, made when first asked for."""
        task = self._compiled.get(template)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._compiled[template] = asyncio.create_task(self._compile_now(template))
        return await asyncio.shield(task)

    async def _compile_now(self, template: Path) -> Path:
        sandbox = await self._sandboxes.start(template)
        try:
            result = await sandbox.exec(["python", "-m", PRECOMPILE], limits=COMPILE_LIMITS)
            if result.exit_code != 0:
                last = result.stderr.strip().splitlines()[-1:]
                raise VerifierError(f"{template} could not be compiled: {last[0] if last else result.exit_code}")
            return await sandbox.snapshot()
        finally:
            await sandbox.close()

    async def _key(
        self, template: Path, files: Files, tests: tuple[str, ...] | None, env: Mapping[str, str] | None
    ) -> str:
        """A name for everything the outcome depends on; a file with the template's own content is no change."""
        if template not in self._digests:
            self._digests[template] = await asyncio.to_thread(tree_digest, template)
        changed = {
            normal(path): None if data is None else hashlib.sha256(data).hexdigest()
            for path, data in files.items()
            if data != content(template, path)
        }
        parts = (self._digests[template], sorted(changed.items()), tests, sorted((env or {}).items()))
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def content(template: Path, path: str) -> bytes | None:
    """A template file's bytes, None if it has no such file. Raises ValueError when the path leaves the template."""
    if os.path.isabs(path) or os.path.normpath(path).split(os.sep)[0] == os.pardir:
        raise ValueError(f"the path {path!r} leaves the template; give one relative to its root")
    file = template / path
    return file.read_bytes() if file.is_file() else None


def tree_digest(folder: Path) -> str:
    """A hash of the names and contents of all files of a tree, compiled Python left out.

    Raises TaskError when `folder` is none.
    """
    if not folder.is_dir():
        raise TaskError(f"there is no template folder {folder}")
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        inner = file.relative_to(folder)
        if file.is_file() and "__pycache__" not in inner.parts and ".git" not in inner.parts:
            digest.update(f"{inner.as_posix()}\0{file.stat().st_size}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
