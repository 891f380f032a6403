"""The gate before training: of every task, that the repair scores 1 and no change 0, each time, and cheats 0.

What failed is kept beside the task file (`FILE.check.json`), where `turnstile train` looks.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from turnstile.errors import InfrastructureError, TaskError
from turnstile.sandboxes.base import Sandboxes
from turnstile.tasks.base import dump_task
from turnstile.tasks.swe.bug import ENV, Bug, package_of
from turnstile.tasks.swe.formats.instance import instance_of
from turnstile.tasks.swe.grading.grader import Grader, Verdict
from turnstile.tasks.swe.grading.judge import judge, judge_files
from turnstile.tasks.swe.grading.probes import PROBES, Probe, Scene
from turnstile.tasks.swe.packages.source import Package
from turnstile.tasks.swe.problems.problems import Problems
from turnstile.tasks.swe.problems.trial import try_problem
from turnstile.tasks.swe.split import mixed
from turnstile.types import Task

Play = Callable[[Task], Awaitable[bool]]
"""One episode of an agent at a task: whether it came to be resolved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedTask:
    """What checking one task found. Scores are 1 or 0, one a repeat.

    `flaky` names the tests that came out differently between repeats; `wins` the probes that scored 1, of the
    `tried` ones; `random` is the random agent's score, None where it did not play. `unknown` says what broke when
    it was no fault of the task.
    """

    task: Task
    gold: tuple[int, ...] = ()
    empty: tuple[int, ...] = ()
    flaky: tuple[str, ...] = ()
    wins: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()
    random: int | None = None
    trouble: str | None = None
    unknown: str | None = None

    @property
    def why(self) -> str | None:
        """Why the task must not be trained on, in a clause; None if nothing speaks against it."""
        if self.unknown is not None:
            return None
        if self.flaky:
            return f"flaky: {', '.join(self.flaky[:3])}{', ...' if len(self.flaky) > 3 else ''}"
        if self.trouble is not None:
            return self.trouble
        return f"a cheat scores 1: {', '.join(self.wins)}" if self.wins else None


async def check(
    tasks: Sequence[Task],
    *,
    grader: Grader,
    sandboxes: Sandboxes,
    repeats: int = 2,
    probed: int | None = 2,
    probes: Mapping[str, Probe] = PROBES,
    play: Play | None = None,
    workers: int = 2,
    seed: int = 0,
    done: Callable[[CheckedTask], None] = lambda checked: None,
) -> list[CheckedTask]:
    """Checks repository tasks, in their order.

    Repair and empty change of every task are graded `repeats` times. Probes and `play`, the random agent, are tried
    on `probed` tasks of each package (None: all), drawn by `seed`: they depend on the package's tests and on the
    grader more than on the bug. Raises nothing for what a task or an infrastructure does: that is in the result.
    """
    piles: dict[str, list[str]] = {}
    for task in mixed(tasks, seed):
        piles.setdefault(_label(task), []).append(task.id)
    with_probes = {name for pile in piles.values() for name in (pile if probed is None else pile[:probed])}
    gate = asyncio.Semaphore(workers)
    problems = Problems(grader)

    async def one(task: Task) -> CheckedTask:
        async with gate:
            found = await (_check if task.env == ENV else _check_instance)(
                task,
                problems=problems,
                grader=grader,
                sandboxes=sandboxes,
                repeats=repeats,
                probes=probes if task.id in with_probes else {},
                play=play if task.id in with_probes else None,
            )
        done(found)
        return found

    try:
        return list(await asyncio.gather(*map(one, tasks)))
    finally:
        await problems.close()


def _label(task: Task) -> str:
    return Bug.of(task).label if task.env == ENV else instance_of(task).repo


async def _check_instance(
    task: Task, *, problems: Problems, repeats: int, probes: Mapping[str, Probe], **_: object
) -> CheckedTask:
    """The same of an instance, at which no random agent plays."""
    try:
        trial = await try_problem(await problems.of(task), repeats=repeats, probes=probes)
    except TaskError as error:
        return CheckedTask(task=task, trouble=str(error))
    except InfrastructureError as error:
        return CheckedTask(task=task, unknown=str(error))
    return CheckedTask(
        task=task,
        gold=tuple(int(verdict.resolved) for verdict in trial.gold),
        empty=tuple(int(verdict.resolved) for verdict in trial.empty),
        flaky=tuple(dict.fromkeys((*_unsteady(trial.gold), *_unsteady(trial.empty)))),
        wins=trial.wins,
        tried=trial.tried,
        trouble=trial.trouble,
    )


async def _check(
    task: Task,
    *,
    problems: Problems,
    grader: Grader,
    sandboxes: Sandboxes,
    repeats: int,
    probes: Mapping[str, Probe],
    play: Play | None,
) -> CheckedTask:
    try:
        bug = Bug.of(task)
        package = await asyncio.to_thread(package_of, bug)
        buggy, pristine = bug.bugged_text(package), bug.pristine_text(package)
        gold = [await judge(grader, bug, package, pristine, repeat=number) for number in range(repeats)]
        empty = [await judge(grader, bug, package, buggy, repeat=number) for number in range(repeats)]
        wins = [name for name, probe in probes.items() if await _wins(probe, grader, sandboxes, bug, package)]
        random = None if play is None else int(await play(task))
    except TaskError as error:
        return CheckedTask(task=task, trouble=str(error))
    except InfrastructureError as error:
        return CheckedTask(task=task, unknown=str(error))
    return CheckedTask(
        task=task,
        gold=tuple(int(verdict.resolved) for verdict in gold),
        empty=tuple(int(verdict.resolved) for verdict in empty),
        flaky=tuple(dict.fromkeys((*_unsteady(gold), *_unsteady(empty)))),
        wins=tuple(wins),
        tried=tuple(probes),
        random=random,
        trouble=_trouble(bug, gold[0], empty[0]),
    )


def _unsteady(verdicts: Sequence[Verdict]) -> list[str]:
    """The tests that failed in some of the runs, and not in all."""
    failed = [set(verdict.failed) for verdict in verdicts]
    return sorted(test for test in set().union(*failed) if not all(test in each for each in failed))


def _trouble(bug: Bug, gold: Verdict, empty: Verdict) -> str | None:
    if not gold.resolved:
        first = gold.failed[0]
        return f"the repair scores 0: {first} ({gold.problem or gold.messages.get(first) or 'it was skipped'})"
    passing = [test for test in bug.f2p if test not in empty.failed]
    if passing:
        return f"{'no change scores 1' if empty.resolved else 'with the bug'}: {passing[0]} passes"
    failing = [test for test in bug.p2p if test in empty.failed]
    return f"with the bug {failing[0]} is to pass and does not" if failing else None


async def _wins(probe: Probe, grader: Grader, sandboxes: Sandboxes, bug: Bug, package: Package) -> bool:
    """Whether what the cheat leaves behind is graded as a repair."""
    text = bug.bugged_text(package)
    buggy = {bug.file: text.encode("utf-8", "surrogatepass")}
    sandbox = await sandboxes.start(package.tree)
    try:
        for path, data in buggy.items():
            await sandbox.write(path, data)
        tests = (*bug.f2p, *bug.p2p)
        files = await probe(
            Scene(sandbox=sandbox, file=bug.file, text=text, tests=tests, import_root=package.import_root)
        )
    finally:
        await sandbox.close()
    return (await judge_files(grader, bug, package, {**buggy, **files})).resolved


def record_of(file: str | Path) -> Path:
    """Where the outcome of checking a task file is kept."""
    return Path(f"{file}.check.json")


def write_record(file: str | Path, found: Sequence[CheckedTask]) -> None:
    """Notes which tasks of the file failed, by id and by a digest of their line."""
    failed = {one.task.id: {"why": one.why, "digest": _digest(one.task)} for one in found if one.why is not None}
    record = {"checked": sum(one.unknown is None for one in found), "failed": failed}
    target = record_of(file)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(record, indent=1), encoding="utf-8")
    temporary.replace(target)


def failed_before(file: str | Path, tasks: Sequence[Task]) -> dict[str, str]:
    """Which of `tasks` failed when the file was checked, and why; a task that was changed since is another one.

    Raises TaskError for a record that cannot be read.
    """
    path = record_of(file)
    if not path.exists():
        return {}
    try:
        failed = json.loads(path.read_text(encoding="utf-8"))["failed"]
        return {
            task.id: failed[task.id]["why"]
            for task in tasks
            if task.id in failed and failed[task.id]["digest"] == _digest(task)
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TaskError(
            f"{path}: the record of the check cannot be read ({error!r}); check again: turnstile tasks check {file}"
        ) from error


def _digest(task: Task) -> str:
    return hashlib.sha256(dump_task(task).encode()).hexdigest()[:16]
