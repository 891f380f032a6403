"""The seam behind which nobody cares where a repository task comes from: `Problem`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from turnstile.swe.grading.bench import Files
from turnstile.swe.grading.grader import Verdict
from turnstile.swe.problems.copy import Change, Copy
from turnstile.swe.problems.diff import git_diff


class Problem(Protocol):
    """One repository task, ready to be tried. Changes are relative to what `open` gives.

    `statement` is what the agent is asked, `suspects` are the files where the fault lies, as far as that is
    known, for the signals of an episode alone. Tests are named as the task names them; `must_fail` are those known to
    fail at the beginning. `import_root` is the folder that the package is imported from.
    """

    id: str
    statement: str
    suspects: frozenset[str]
    fail_to_pass: Sequence[str]
    pass_to_pass: Sequence[str]
    must_fail: Sequence[str]
    import_root: str

    async def open(self) -> Copy:
        """A copy for an agent: no hidden tests, no repair, no commit later than the beginning."""
        ...

    async def ignored(self, files: Iterable[str]) -> tuple[str, ...]:
        """Which changed files are not graded: tests, what can change them, and modules in place of a library."""
        ...

    async def base(self, files: Iterable[str]) -> Mapping[str, bytes | None]:
        """The content of files at the beginning, None for one that was not there."""
        ...

    async def grade(self, change: Change, *, repeat: int = 0) -> Verdict:
        """The verdict on what of a change is graded; requests that differ in `repeat` are run anew.

        Raises VerifierError and SandboxError where there is none to be had.
        """
        ...

    async def gold(self) -> Change | None:
        """The repair, None where the task carries none."""
        ...


async def graded_patch(problem: Problem, change: Change) -> str:
    """What of a change is graded, as a git diff."""
    left_out = await problem.ignored(change.files)
    files: Files = {path: data for path, data in change.files.items() if path not in left_out}
    base = await problem.base(files)
    return await asyncio.to_thread(git_diff, files, base.get, change.executable)
