"""Making repository tasks: a package, its bugs, and the tests' word on which of them are good.

Every candidate is judged by running the tests that call its function, through the grader that episodes are
graded by, whose verdict on the bug and on its repair is the last word. Good ones are appended to the task file
as they are found, the others are remembered in `FILE.rejected.jsonl`, so a run that was killed goes on where
it stopped, and the same call with a larger number only adds to the file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from turnstile.swe.bugs.candidates import Candidate, Filter, candidates
from turnstile.swe.bugs.ledger import Ledger
from turnstile.swe.bugs.profile import profile
from turnstile.swe.bugs.validate import Validator
from turnstile.swe.grading.grader import CodeGrader, local_grader
from turnstile.swe.packages.exposed import exposed
from turnstile.swe.packages.source import Package, Source, fetch
from turnstile.types import Task

_READ_THERE = "train on these tasks in containers, as sandboxes of the kinds local and bubblewrap show it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far the making of one file is."""

    package: str
    stage: str  # "fetch", "profile", "validate" or "done"
    message: str = ""
    valid: int = 0
    wanted: int = 0
    judged: int = 0
    candidates: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """What `make` did. `rejected` counts the reasons; `tasks` are all tasks of the package in the file.

    `undecided` counts the candidates of which no verdict could be had, because something broke or the wall clock
    ended their tests; the next call tries them again.
    """

    tasks: tuple[Task, ...]
    added: int
    rejected: Mapping[str, int]
    undecided: int
    exhausted: bool  # every candidate was judged before `n` were found


async def make(  # noqa: PLR0913 - the options of `turnstile tasks make`, each by name
    source: Source | str,
    out: str | Path,
    n: int,
    seed: int = 0,
    *,
    wanted: Filter | None = None,
    per_function: int = 4,
    tests_per_bug: int = 30,
    workers: int = 2,
    extra: Sequence[str] = (),
    grader: CodeGrader | None = None,
    suite_seconds: float = 300.0,
    runs: int = 2,
    cache: Path | None = None,
    progress: Callable[[Progress], None] = lambda report: None,
) -> Made:
    """Adds validated tasks of one package to the task file `out` until it holds `n` of it.

    A task is kept when at least one of the at most `tests_per_bug` tests that call the function fails with
    the bug, whatever their order, nothing hangs, and the module still imports. Tests whose outcome depends on the
    order are left out; of the whole suite those count that pass in each of `runs` runs. At most `per_function` tasks
    come from one function.
    The same arguments give the same file, whatever `workers` is. `extra` names requirements of the tests that
    the package's metadata leaves out. `grader` is to be the one that episodes are graded by, None for one over
    local sandboxes; its limits say what a hang is.

    Raises TaskError when the package cannot be fetched, has no tests, or none passes.
    """
    package = await _fetch(source, extra, cache, progress)
    ledger = Ledger(out=Path(out), package=package)
    ledger.open()
    before = len(ledger.tasks)
    making = _Making(ledger=ledger, n=n, per_function=per_function, workers=workers, progress=progress)
    async with AsyncExitStack() as stack:
        if grader is None:
            grader = await stack.enter_async_context(local_grader(workers))
        found = await exposed(package, grader.bench.sandboxes)
        if place := next(filter(None, found.values()), None):
            making.report("profile", f"{package.name} is in this Python too, at {place}: {_READ_THERE}")
        measured = await profile(
            package, grader.bench, runs=runs, seconds=suite_seconds, progress=partial(making.report, "profile")
        )
        rows = candidates(package, measured, seed, wanted or Filter(), tests_per_bug)
        exhausted = await making.rounds(rows, Validator(package, grader))
    making.report("done")
    return Made(
        tasks=tuple(ledger.tasks.values()),
        added=len(ledger.tasks) - before,
        rejected=ledger.reasons(rows),
        undecided=len(ledger.undecided),
        exhausted=exhausted,
    )


async def _fetch(
    source: Source | str, extra: Sequence[str], cache: Path | None, progress: Callable[[Progress], None]
) -> Package:
    name = source if isinstance(source, str) else source.spec

    def say(message: str) -> None:
        progress(Progress(package=name, stage="fetch", message=message))

    return await asyncio.to_thread(fetch, source, extra=extra, cache=cache, progress=say)


@dataclass(kw_only=True, slots=True)
class _Making:
    """The making of one file: how many tasks are wanted, and how far it is."""

    ledger: Ledger
    n: int
    per_function: int
    workers: int
    progress: Callable[[Progress], None]
    candidates: int = 0

    def report(self, stage: str, message: str = "") -> None:
        ledger = self.ledger
        self.progress(
            Progress(
                package=ledger.package.label,
                stage=stage,
                message=message,
                valid=len(ledger.tasks),
                wanted=self.n,
                judged=len(ledger.tasks) + len(ledger.rejected),
                candidates=self.candidates,
            )
        )

    async def rounds(self, rows: Sequence[Sequence[Candidate]], validator: Validator) -> bool:
        """Tries one candidate of every function, then the next of each, until n are found; True when none is left.

        Verdicts are written in the order of the candidates, so the file does not depend on who was quicker.
        """
        self.candidates = sum(map(len, rows))
        for turn in range(max(map(len, rows), default=0)):
            queue = [row[turn] for row in rows if turn < len(row) and self.ledger.kept(row[:turn]) < self.per_function]
            for start in range(0, len(queue), 4 * self.workers):
                if len(self.ledger.tasks) >= self.n:
                    return False
                await self._block(queue[start : start + 4 * self.workers], validator)
        return len(self.ledger.tasks) < self.n

    async def _block(self, block: Sequence[Candidate], validator: Validator) -> None:
        """Judges a few candidates at once."""
        running = {
            candidate.id: asyncio.ensure_future(validator.verdict(candidate))
            for candidate in block
            if self.ledger.verdict_on(candidate) is None
        }
        try:
            for candidate in block:
                if candidate.id in running and len(self.ledger.tasks) < self.n:
                    self.ledger.add(candidate, await running[candidate.id])
                    self.report("validate")
        finally:
            for future in running.values():
                future.cancel()
            await asyncio.gather(*running.values(), return_exceptions=True)
