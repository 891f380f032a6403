"""Fetch the packages of task files into the cache, and check a sample of their tasks on this machine.

Each task of the sample is graded once, without cheats. If it is sound, that is noted as after any check, and it is not
checked again until the task or this Python changes. A bad task is checked every time, so that a fix shows at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from turnstile.errors import TaskError
from turnstile.swe.bug import Bug, package_of
from turnstile.swe.grading.findings import CheckedTask
from turnstile.swe.grading.gate import check
from turnstile.swe.grading.grader import CodeGrader, local_grader
from turnstile.swe.grading.notes import Notes
from turnstile.swe.packages.source import Package
from turnstile.swe.problems.cases import ProblemCases
from turnstile.swe.problems.problems import Problems
from turnstile.swe.split import shuffle_tasks
from turnstile.types import Task

_MORE = 2  # extra tasks, to tell a bad task from a bad package


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The progress of a stage ("fetch" or "check"): `done` of `total` packages, and the next one in `item`."""

    stage: str
    done: int
    total: int
    item: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """One package, and the results of checking some of its tasks."""

    package: Package
    tried: tuple[CheckedTask, ...] = ()

    @property
    def sound(self) -> list[CheckedTask]:
        return [one for one in self.tried if one.why is None and one.unknown is None]

    @property
    def off(self) -> list[CheckedTask]:
        return [one for one in self.tried if one.why is not None]

    @property
    def unknown(self) -> str | None:
        """Why a task could not be checked, if something broke that was not the task's fault; else None."""
        return next((one.unknown for one in self.tried if one.unknown is not None), None)

    @property
    def usable(self) -> bool:
        """Whether a checked task is sound, or at least none is known to be bad."""
        return bool(self.sound) or not self.off


async def try_tasks(
    tasks: Sequence[Task],
    *,
    sample: int | None = 1,
    seed: int = 0,
    workers: int = 2,
    grader: CodeGrader | None = None,
    progress: Callable[[Step], None] = lambda step: None,
) -> list[Tried]:
    """Fetch the packages that `tasks` need, then check `sample` tasks of each (None for all), drawn by `seed`.

    If all of them are bad, up to two more tasks of the package are checked. A `grader` of None makes one with local
    sandboxes. Returns one result per package. Raises TaskError if a package cannot be fetched, or if tasks of one
    package need different dependencies.
    """
    piles: dict[str, list[Task]] = {}
    for task in shuffle_tasks(tasks, seed):
        piles.setdefault(Bug.of(task).label, []).append(task)
    for label, pile in piles.items():
        _check_same_requirements(label, pile)
    places = asyncio.Semaphore(workers)
    packages: dict[str, Package] = {}
    tried: dict[str, tuple[CheckedTask, ...]] = {}

    async def fetch(label: str) -> None:
        bug = Bug.of(piles[label][0])
        async with places:
            progress(Step(stage="fetch", done=len(packages), total=len(piles), item=bug.source))
            packages[label] = await asyncio.to_thread(package_of, bug)
            progress(Step(stage="fetch", done=len(packages), total=len(piles)))

    async def try_out(label: str, cases: ProblemCases) -> None:
        async with places:
            progress(Step(stage="check", done=len(tried), total=len(piles), item=label))
            tried[label] = await _check_sample(piles[label], sample, cases)
            progress(Step(stage="check", done=len(tried), total=len(piles)))

    async with AsyncExitStack() as stack:
        await _run_all(map(fetch, piles))
        if grader is None:
            grader = await stack.enter_async_context(local_grader(workers))
        problems = Problems(grader)
        stack.push_async_callback(problems.close)
        cases = ProblemCases(problems=problems)
        await _run_all(try_out(label, cases) for label in piles)
    return [Tried(package=packages[label], tried=tried[label]) for label in piles]


def _check_same_requirements(label: str, tasks: Sequence[Task]) -> None:
    needed = sorted({", ".join(Bug.of(task).requires) or "nothing" for task in tasks})
    if len(needed) > 1:
        raise TaskError(
            f"some tasks of {label} need {needed[0]}, others {needed[1]}: a package is used in one setting at a "
            "time; make them again, all with the same --extra, or use the files one after the other"
        )


async def _run_all(jobs: Iterable[Coroutine[None, None, None]]) -> None:
    """Run all jobs. The first error cancels the others and is raised without its group."""
    try:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(job)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _check_sample(tasks: Sequence[Task], sample: int | None, cases: ProblemCases) -> tuple[CheckedTask, ...]:
    """Check `sample` tasks in order, then up to _MORE others as long as all have been bad.

    Stops at a task that could not be checked.
    """
    notes = Notes(failures=False)
    wanted = len(tasks) if sample is None else min(sample, len(tasks))
    found: list[CheckedTask] = []
    for task in tasks[: wanted + _MORE]:
        if len(found) >= wanted and (not found or any(one.why is None for one in found)):
            break
        found += await check([task], cases, repeats=1, probed=0, notes=notes)
        if found[-1].unknown is not None:
            break
    return tuple(found)
