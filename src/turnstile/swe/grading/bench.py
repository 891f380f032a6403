"""Run tests on a fresh copy of a package's tree, with changed files in it, in a sandbox.

Grading, the making and checking of tasks, and the measuring of a suite all go through `Bench.run`, so that they all see
the same outcomes.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from turnstile.errors import SandboxError, VerifierError
from turnstile.sandboxes.base import Limits, Sandbox, Sandboxes, Template
from turnstile.sandboxes.local import LocalSandboxes
from turnstile.swe.grading.memo import Memo
from turnstile.swe.grading.testrun import TEST_LIMITS, Report, run_tests
from turnstile.swe.packages.exposed import find_exposed, refuse_exposed
from turnstile.swe.packages.source import Package
from turnstile.swe.tree import inside

Files = Mapping[str, bytes | None]
"""Changed files, as path -> new content, None for a file that was removed."""

PRECOMPILE = "turnstile.swe.in_sandbox.precompile"
_BATCH = 500  # paths on one command line
_PACKAGES = 1024  # packages for which what the sandboxes show is remembered
MISSING = re.compile(r"ModuleNotFoundError: No module named '(_?pytest|turnstile)\b")
COMPILE_LIMITS = Limits(seconds=300.0, cpu_seconds=300.0)


class Bench:
    """Runs tests on fresh copies of templates, in sandboxes of one provider.

    A template must not change while the bench exists, because it is compiled once and the compiled tree is copied.
    """

    def __init__(self, sandboxes: Sandboxes, *, limits: Limits = TEST_LIMITS) -> None:
        self.sandboxes = sandboxes
        self._limits = limits
        self._compiled: dict[Path, asyncio.Task[Template]] = {}
        self._exposed: Memo[Mapping[str, str | None]] = Memo(_PACKAGES, passing=lambda _: False)

    async def run(
        self,
        template: Path,
        files: Files,
        node_ids: Sequence[str] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        reverse: bool = False,
        executable: frozenset[str] = frozenset(),
        calls: str | None = None,
        limits: Limits | None = None,
    ) -> Report:
        """Return the outcomes of tests (None for all) on `template` with `files` in it; see `testrun.run_tests`.

        Raises VerifierError and SandboxError as `run_tests` does, and ValueError if a path leaves the template.
        """
        sandbox = await self._start(template, dependency_folder(env))
        try:
            await put(sandbox, files)
            if executable:
                await sandbox.exec(["chmod", "+x", "--", *sorted(executable)])
            return await run_tests(
                sandbox, node_ids, limits=limits or self._limits, env=env, reverse=reverse, calls=calls
            )
        finally:
            await sandbox.close()

    async def check_hidden(self, package: Package, file: str) -> None:
        """Raise TaskError if these sandboxes show the package's file without the fault, outside the task's copy.

        See `packages.exposed`. Local sandboxes are not checked, because they hide nothing.
        """
        if not isinstance(self.sandboxes, LocalSandboxes):
            found, _ = await self._exposed.get(package.label, lambda: find_exposed(package, self.sandboxes))
            refuse_exposed(package, file, found)

    async def close(self) -> None:
        """End the compilations under way. The provider of sandboxes is left to its owner."""
        running = list(self._compiled.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._exposed.close()

    async def _start(self, template: Path, deps: Path | None) -> Sandbox:
        """Start a sandbox with a compiled copy of the template.

        A snapshot that cannot be started is forgotten, so that the next request makes another. It may have been lost
        with the server that kept it.
        """
        compiled = await self._compile(template, deps)
        task = self._compiled.get(template)
        try:
            return await self.sandboxes.start(compiled, deps=deps)
        except SandboxError:
            if task is not None and self._compiled.get(template) is task:
                del self._compiled[template]
            raise

    async def _compile(self, template: Path, deps: Path | None) -> Template:
        """Return a copy of the template with byte code, which is made on the first request."""
        task = self._compiled.get(template)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._compiled[template] = asyncio.create_task(self._compile_now(template, deps))
        return await asyncio.shield(task)

    async def _compile_now(self, template: Path, deps: Path | None) -> Template:
        sandbox = await self.sandboxes.start(template, deps=deps)
        try:
            result = await sandbox.exec(["python", "-m", PRECOMPILE], limits=COMPILE_LIMITS)
            if result.exit_code != 0:
                last_line = result.stderr.strip().rpartition("\n")[2] or str(result.exit_code)
                if MISSING.match(last_line):
                    last_line += "; the sandbox's Python needs pytest, in its image or by sandbox.carry"
                raise VerifierError(f"{template} could not be compiled: {last_line}")
            return await sandbox.snapshot()
        finally:
            await sandbox.close()


def dependency_folder(env: Mapping[str, str] | None) -> Path | None:
    """Return the folder of dependencies in an environment, which is the absolute path in its PYTHONPATH, if any."""
    places = (env or {}).get("PYTHONPATH", "").split(os.pathsep)
    return next((Path(place) for place in places if os.path.isabs(place)), None)


async def put(sandbox: Sandbox, files: Files, *, below: str = ".") -> None:
    """Write and remove files below a folder of a sandbox, and remove the folders that are empty then.

    Raises ValueError if a path leaves the folder, SandboxError, and OSError if a folder stands in a file's place.
    """
    removed = [os.path.join(below, inside(path)) for path, data in files.items() if data is None]
    for first in range(0, len(removed), _BATCH):
        batch = removed[first : first + _BATCH]
        done = await sandbox.exec(["rm", "-f", "--", *batch])
        if done.exit_code != 0:
            raise SandboxError(f"files could not be removed: {done.stderr.strip() or done.exit_code}")
        await sandbox.exec(["rmdir", "-p", "--ignore-fail-on-non-empty", "--", *{os.path.dirname(p) for p in batch}])
    for path, data in files.items():
        if data is not None:
            await sandbox.write(os.path.join(below, inside(path)), data)
