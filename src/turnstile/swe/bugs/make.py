"""Make repository tasks by putting bugs into a package and keeping those that its tests show to be good.

Every candidate is judged by running the tests that call its function. The grader, which also grades episodes, must fail
the bug and pass its repair. Good candidates are appended to the task file as they are found, and the others are
recorded in `FILE.rejected.jsonl`. A run that was killed therefore resumes where it stopped, and the same call with a
larger number only adds to the file.
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
from turnstile.swe.packages.exposed import find_exposed
from turnstile.swe.packages.source import Package, Source, fetch
from turnstile.types import Task

_EXPOSED_ADVICE = "train on these tasks in containers, as sandboxes of the kinds local and bubblewrap show it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The progress in making one task file."""

    package: str
    stage: str  # "fetch", "profile", "validate" or "done"
    message: str = ""
    valid: int = 0
    wanted: int = 0
    judged: int = 0
    candidates: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """The result of `make`; `tasks` are all tasks of the package in the file, `rejected` counts the reasons.

    `undecided` counts the candidates without a verdict, because something broke or their tests ran out of wall-clock
    time; the next call tries them again.
    """

    tasks: tuple[Task, ...]
    added: int
    rejected: Mapping[str, int]
    undecided: int
    exhausted: bool  # the candidates ran out before `n` tasks were found


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
    """Add validated tasks of one package to the task file `out` until it holds `n` of them.

    A bug becomes a task if at least one of the tests that call the function (at most `tests_per_bug`) fails in both
    test orders, nothing hangs, and the module can still be imported. Tests whose outcome depends on the order are left
    out, and so are tests that do not pass in each of `runs` runs of the whole suite. At most `per_function` tasks come
    from one function.

    The same arguments give the same file, regardless of `workers`. `extra` names requirements of the tests that the
    package's metadata leaves out. `grader` should be the one that grades episodes, and its limits decide what counts as
    a hang; None makes one with local sandboxes.

    Raises TaskError if the package cannot be fetched, has no tests, or none of them passes.
    """
    package = await _fetch(source, extra, cache, progress)
    ledger = Ledger(out=Path(out), package=package)
    ledger.open()
    before = len(ledger.tasks)
    making = _Making(ledger=ledger, n=n, per_function=per_function, workers=workers, progress=progress)
    async with AsyncExitStack() as stack:
        if grader is None:
            grader = await stack.enter_async_context(local_grader(workers))
        found = await find_exposed(package, grader.bench.sandboxes)
        if place := next(filter(None, found.values()), None):
            making.report("profile", f"{package.name} is in this Python too, at {place}: {_EXPOSED_ADVICE}")
        measured = await profile(
            package, grader.bench, runs=runs, seconds=suite_seconds, progress=partial(making.report, "profile")
        )
        rows = candidates(package, measured, seed, wanted or Filter(), tests_per_bug)
        exhausted = await making.judge_in_rounds(rows, Validator(package, grader))
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
    """The state of making one task file: how many tasks are wanted, and which exist."""

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

    async def judge_in_rounds(self, rows: Sequence[Sequence[Candidate]], validator: Validator) -> bool:
        """Try one candidate of every function, then the next of each, until `n` tasks exist.

        Returns whether the candidates ran out first. Verdicts are recorded in the order of the candidates, so the file
        does not depend on which of them is judged first.
        """
        self.candidates = sum(map(len, rows))
        for turn in range(max(map(len, rows), default=0)):
            queue = [row[turn] for row in rows if turn < len(row) and self.ledger.kept(row[:turn]) < self.per_function]
            for start in range(0, len(queue), 4 * self.workers):
                if len(self.ledger.tasks) >= self.n:
                    return False
                await self._judge_batch(queue[start : start + 4 * self.workers], validator)
        return len(self.ledger.tasks) < self.n

    async def _judge_batch(self, block: Sequence[Candidate], validator: Validator) -> None:
        """Judge a few candidates at the same time, and record their verdicts in order."""
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
