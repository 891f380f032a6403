"""Getting a task file ready on this machine: its packages in the cache, and a sample of its bugs tried out."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from turnstile.errors import TaskError
from turnstile.tasks.swe.instance import Bug, package_of
from turnstile.tasks.swe.profile import TestResult, copy_tree, run_tests
from turnstile.tasks.swe.source import Package
from turnstile.tasks.swe.split import mixed
from turnstile.types import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """How far the preparation is: `done` of `total` in a stage ("fetch" or "check"), and what is next."""

    stage: str
    done: int
    total: int
    item: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """The packages by label, and the ids of the tasks that were tried out."""

    packages: dict[str, Package]
    checked: tuple[str, ...]


async def prepare(
    tasks: Sequence[Task],
    *,
    sample: int = 8,
    seed: int = 0,
    workers: int = 2,
    seconds: float = 60.0,
    progress: Callable[[Step], None] = lambda step: None,
) -> Prepared:
    """Fetches every package that `tasks` need, then tries `sample` of them out, spread over the packages.

    A task that is tried must have all its tests pass on the pristine tree and every FAIL_TO_PASS test not
    pass with the bug. `seconds` is wall-clock, for one run of one task's tests.

    Raises TaskError for a package that cannot be had and for a task that does not behave.
    """
    bugs = {task.id: Bug.of(task) for task in tasks}
    wanted = {bug.label: bug for bug in bugs.values()}
    packages: dict[str, Package] = {}
    gate = asyncio.Semaphore(workers)

    async def fetched(label: str, bug: Bug) -> None:
        async with gate:
            progress(Step(stage="fetch", done=len(packages), total=len(wanted), item=bug.source))
            packages[label] = await asyncio.to_thread(package_of, bug)
            progress(Step(stage="fetch", done=len(packages), total=len(wanted)))

    await _all(fetched(label, bug) for label, bug in wanted.items())
    chosen, done = _spread(mixed(tasks, seed), bugs, sample), 0

    async def tried(task: Task) -> None:
        nonlocal done
        async with gate:
            progress(Step(stage="check", done=done, total=len(chosen), item=task.id))
            await check(task, packages[bugs[task.id].label], seconds=seconds)
            done += 1
            progress(Step(stage="check", done=done, total=len(chosen)))

    await _all(map(tried, chosen))
    return Prepared(packages=packages, checked=tuple(task.id for task in chosen))


async def _all(jobs: Iterable[Coroutine[None, None, None]]) -> None:
    """Runs all jobs; the first error ends the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(job)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _spread(tasks: Sequence[Task], bugs: dict[str, Bug], sample: int) -> list[Task]:
    """The first `sample` tasks when the packages take turns."""
    piles: dict[str, list[Task]] = {}
    for task in tasks:
        piles.setdefault(bugs[task.id].label, []).append(task)
    longest = max(map(len, piles.values()), default=0)
    rounds = (pile[turn] for turn in range(longest) for pile in piles.values() if turn < len(pile))
    return [task for task, _ in zip(rounds, range(sample), strict=False)]


async def check(task: Task, package: Package, *, seconds: float = 60.0) -> None:
    """Raises TaskError unless the task's tests pass without the bug and its FAIL_TO_PASS tests do not with it."""
    bug = Bug.of(task)
    nodes = [*bug.f2p, *bug.p2p]
    with tempfile.TemporaryDirectory(prefix="turnstile-check-", ignore_cleanup_errors=True) as folder:
        root = copy_tree(package, Path(folder) / "copy")
        run = await run_tests(package, root, nodes=nodes, seconds=seconds)
        failing = nodes if run is None else [node for node in nodes if node not in run.passed]
        if failing:
            why = "it hung or died" if run is None else _reason(run.errors, run.results.get(failing[0]))
            raise TaskError(
                f"task {task.id}: {failing[0]} does not pass on the unchanged {package.spec} here ({why}); "
                "make the task file again on this machine"
            )
        (root / bug.file).write_bytes(bug.bugged_text(package).encode("utf-8"))
        run = await run_tests(package, root, nodes=nodes, seconds=seconds)
        if run is None:
            raise TaskError(f"task {task.id}: its tests hang with the bug; remove it from the task file")
        passing = [node for node in bug.f2p if node in run.passed]
        if passing:
            raise TaskError(f"task {task.id}: {passing[0]} passes with the bug; remove it from the task file")


def _reason(errors: Sequence[str], result: TestResult | None) -> str:
    if result is not None:
        return result.message or result.outcome
    return errors[0] if errors else "it is not there"
