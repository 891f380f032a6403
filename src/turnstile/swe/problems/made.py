"""A generated task as a problem, which is a folder with a bug in it, graded by the package's own tests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from turnstile.swe.bug import Bug, package_of
from turnstile.swe.bugs.statement import problem_statement
from turnstile.swe.grading.grader import CodeGrader, Verdict, content, left_out
from turnstile.swe.grading.judge import judge_files
from turnstile.swe.packages.source import Package
from turnstile.swe.problems.copy import Change, Copy, begin


class MadeProblem:
    """A `Bug` as a problem. Its copy has no history and holds the source distribution with the bug in it."""

    def __init__(self, name: str, bug: Bug, package: Package, grader: CodeGrader) -> None:
        self.id = name
        self.fail_to_pass: Sequence[str] = bug.f2p
        self.pass_to_pass: Sequence[str] = bug.p2p
        self.must_fail: Sequence[str] = bug.f2p
        self.suspects = frozenset((bug.file,))
        self.import_root = package.import_root
        self.statement = bug.statement or problem_statement(
            bug.package, bug.f2p, len(bug.p2p), {bug.f2p[0]: bug.message}
        )
        self._bug, self._package, self._grader = bug, package, grader
        self._buggy = {bug.file: bug.bugged_text(package).encode("utf-8", "surrogatepass")}

    @classmethod
    async def of(cls, name: str, bug: Bug, grader: CodeGrader) -> MadeProblem:
        """Return the problem of a bug.

        Raises TaskError if the package cannot be fetched, is not the one the bug was made in, or can be read in the
        sandboxes without the bug.
        """
        package = await asyncio.to_thread(package_of, bug)
        await grader.bench.check_hidden(package, bug.file)
        return cls(name, bug, package, grader)

    async def open(self) -> Copy:
        sandbox = await self._grader.bench.sandboxes.start(self._package.tree, deps=self._package.deps)
        try:
            for path, data in self._buggy.items():
                await sandbox.write(path, data)
        except BaseException:
            await sandbox.close()
            raise
        return await begin(sandbox, self.id, env=self._package.environment)

    async def ignored(self, files: Iterable[str]) -> tuple[str, ...]:
        tests = (*self.fail_to_pass, *self.pass_to_pass)
        return left_out(self._package.tree, dict.fromkeys(files), tests, self._package.environment)

    async def base(self, files: Iterable[str]) -> Mapping[str, bytes | None]:
        pristine = await asyncio.to_thread(lambda: {path: content(self._package.tree, path) for path in files})
        return {path: self._buggy.get(path, data) for path, data in pristine.items()}

    async def grade(self, change: Change, *, repeat: int = 0) -> Verdict:
        files: Any = {**self._buggy, **change.files}
        return await judge_files(
            self._grader, self._bug, self._package, files, executable=change.executable, repeat=repeat
        )

    async def gold(self) -> Change | None:
        text = self._bug.pristine_text(self._package)
        return Change(files={self._bug.file: text.encode("utf-8", "surrogatepass")})
