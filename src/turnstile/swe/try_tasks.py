"""Prepare task files on this machine: fetch their packages into the cache, and check a sample of their tasks.

A sample runs each task once, without cheats. A sound task is noted as by any check, and not tried again until the task
or this Python changes; a task that is off is tried every time, so that a fix shows at once.
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

_MORE = 2  # further tasks that show whether only one task is off or its whole package


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """How far the preparation is: `done` of `total` packages in a stage ("fetch" or "check"), and what is next."""

    stage: str
    done: int
    total: int
    item: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """One package, and the results of trying out tasks of it."""

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
        """Why a task could not be tried, if something broke that was not the task's fault."""
        return next((one.unknown for one in self.tried if one.unknown is not None), None)

    @property
    def usable(self) -> bool:
        """Whether the package can be used: not all of the tasks that were tried are off."""
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
    """Fetch every package that `tasks` need, then try out `sample` tasks of each (None: all), drawn by `seed`.

    If all of them are off, up to two further ones of the package are tried. `grader` None stands for one over local
    sandboxes. Returns what was found, package by package. Raises TaskError for a package that cannot be had.
    """
    piles: dict[str, list[Task]] = {}
    for task in shuffle_tasks(tasks, seed):
        piles.setdefault(Bug.of(task).label, []).append(task)
    for label, pile in piles.items():
        _one_setting(label, pile)
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
            tried[label] = await _sample(piles[label], sample, cases)
            progress(Step(stage="check", done=len(tried), total=len(piles)))

    async with AsyncExitStack() as stack:
        await _all(map(fetch, piles))
        if grader is None:
            grader = await stack.enter_async_context(local_grader(workers))
        problems = Problems(grader)
        stack.push_async_callback(problems.close)
        cases = ProblemCases(problems=problems)
        await _all(try_out(label, cases) for label in piles)
    return [Tried(package=packages[label], tried=tried[label]) for label in piles]


def _one_setting(label: str, tasks: Sequence[Task]) -> None:
    needed = sorted({", ".join(Bug.of(task).requires) or "nothing" for task in tasks})
    if len(needed) > 1:
        raise TaskError(
            f"some tasks of {label} need {needed[0]}, others {needed[1]}: a package is used in one setting at a "
            "time; make them again, all with the same --extra, or use the files one after the other"
        )


async def _all(jobs: Iterable[Coroutine[None, None, None]]) -> None:
    """Run all jobs; the first error cancels the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(job)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _sample(tasks: Sequence[Task], sample: int | None, cases: ProblemCases) -> tuple[CheckedTask, ...]:
    """Try tasks in order until `sample` were tried, and up to _MORE further ones as long as all of them were off."""
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
