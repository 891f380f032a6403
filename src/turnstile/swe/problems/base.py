"""The interface `Problem`, which hides where a repository task comes from."""

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

    `statement` is what the agent is asked. `suspects` are the files with the fault, as far as they are known; they
    serve the signals of an episode and the cheats of a check. Tests are named as the task names them; `must_fail` are
    those known to fail at the beginning. `import_root` is the folder that the package is imported from.
    """

    id: str
    statement: str
    suspects: frozenset[str]
    fail_to_pass: Sequence[str]
    pass_to_pass: Sequence[str]
    must_fail: Sequence[str]
    import_root: str

    async def open(self) -> Copy:
        """Return a copy for an agent, without hidden tests, the repair, or commits later than the beginning."""
        ...

    async def ignored(self, files: Iterable[str]) -> tuple[str, ...]:
        """Return the changed files that are not graded: tests, files that affect tests, modules that hide a library."""
        ...

    async def base(self, files: Iterable[str]) -> Mapping[str, bytes | None]:
        """Return the content of files at the beginning; None for one that did not exist."""
        ...

    async def grade(self, change: Change, *, repeat: int = 0) -> Verdict:
        """Return the verdict on the part of a change that is graded; requests that differ in `repeat` are run anew.

        Raises VerifierError and SandboxError if no verdict can be reached.
        """
        ...

    async def gold(self) -> Change | None:
        """Return the repair; None if the task has none."""
        ...


async def graded_patch(problem: Problem, change: Change) -> str:
    """Return the part of a change that is graded, as a git diff."""
    left_out = await problem.ignored(change.files)
    files: Files = {path: data for path, data in change.files.items() if path not in left_out}
    base = await problem.base(files)
    return await asyncio.to_thread(git_diff, files, base.get, change.executable)
