"""The interface that hides where a repository task comes from: `Problem`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from turnstile.swe.grading.bench import Files
from turnstile.swe.grading.grader import Verdict
from turnstile.swe.problems.copy import Change, Copy
from turnstile.swe.problems.diff import git_diff


class Problem(Protocol):
    """One repository task, ready to be tried. Changes are relative to the copy that `open` returns.

    `statement` is what the agent is asked. `suspects` are the files where the fault lies, as far as that is known; they
    serve the signals of an episode only. Tests are named as the task names them; `must_fail` are those known to fail at
    the beginning. `import_root` is the folder that the package is imported from.
    """

    id: str
    statement: str
    suspects: frozenset[str]
    fail_to_pass: Sequence[str]
    pass_to_pass: Sequence[str]
    must_fail: Sequence[str]
    import_root: str

    async def open(self) -> Copy:
        """Return a copy for an agent: without hidden tests, repair, or commits later than the beginning."""
        ...

    async def ignored(self, files: Iterable[str]) -> tuple[str, ...]:
        """Return the changed files that are not graded: tests, what can change them, modules in place of a library."""
        ...

    async def base(self, files: Iterable[str]) -> Mapping[str, bytes | None]:
        """Return the content of files at the beginning, None for one that was not there."""
        ...

    async def grade(self, change: Change, *, repeat: int = 0) -> Verdict:
        """Return the verdict on the part of a change that is graded; requests that differ in `repeat` are run anew.

        Raises VerifierError and SandboxError if no verdict can be had.
        """
        ...

    async def gold(self) -> Change | None:
        """Return the repair, None if the task has none."""
        ...


async def graded_patch(problem: Problem, change: Change) -> str:
    """Return the part of a change that is graded, as a git diff."""
    left_out = await problem.ignored(change.files)
    files: Files = {path: data for path, data in change.files.items() if path not in left_out}
    base = await problem.base(files)
    return await asyncio.to_thread(git_diff, files, base.get, change.executable)
