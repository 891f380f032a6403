"""The gate before training: a task's repair must score 1 and no change 0, each time, and cheats must score 0."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from turnstile.errors import InfrastructureError, TaskError, VerifierKilledError
from turnstile.swe.grading.cases import Case, Cases
from turnstile.swe.grading.findings import Ask, CheckedTask
from turnstile.swe.grading.grader import Verdict
from turnstile.swe.grading.judge import check_settled
from turnstile.swe.grading.notes import Notes
from turnstile.swe.split import shuffle_tasks
from turnstile.types import Task

Play = Callable[[Task], Awaitable[bool]]
"""One episode of an agent at a task: whether it came to be resolved."""

KILLS = 3  # gradings in a row that must be killed before the task is blamed


async def check(
    tasks: Sequence[Task],
    cases: Cases,
    *,
    repeats: int = 2,
    probed: int | None = 2,
    play: Play | None = None,
    workers: int = 2,
    seed: int = 0,
    notes: Notes | None = None,
    done: Callable[[CheckedTask], None] = lambda checked: None,
) -> list[CheckedTask]:
    """Check tasks of one kind, and return what was found in the order of the tasks.

    Repair and empty change of every task are graded `repeats` times. Cheats and `play`, the random agent, are tried on
    `probed` tasks of each pile (None: all), drawn by `seed`: they depend on the tests and on the grader more than on
    the single task. What is known from `notes` is not checked again, and new findings are noted as they come. Raises
    nothing for errors of a task or of the infrastructure: these are in the result.
    """
    piles: dict[str, list[str]] = {}
    for task in shuffle_tasks(tasks, seed):
        piles.setdefault(cases.pile(task), []).append(task.id)
    chosen = {name for pile in piles.values() for name in (pile if probed is None else pile[:probed])}
    asks = [
        Ask(repeats=repeats, cheats=tuple(cases.cheats), random=play is not None)
        if task.id in chosen
        else Ask(repeats=repeats)
        for task in tasks
    ]
    known = [notes.of(task, ask) if notes is not None else None for task, ask in zip(tasks, asks, strict=True)]
    for found in filter(None, known):
        done(found)
    places = asyncio.Semaphore(workers)

    async def one(task: Task, ask: Ask, before: CheckedTask | None) -> CheckedTask:
        if before is not None:
            return before
        async with places:
            found = await _Examination(task=task, ask=ask, play=play).run(cases)
            if notes is not None:
                notes.add(found, ask)
        done(found)
        return found

    return list(await asyncio.gather(*map(one, tasks, asks, known)))


@dataclass(kw_only=True, slots=True)
class _Examination:
    """The gradings of one task."""

    task: Task
    ask: Ask
    play: Play | None
    killed: int = 0  # gradings that ended by SIGKILL
    wins: list[str] = field(default_factory=list)

    async def run(self, cases: Cases) -> CheckedTask:
        pile = cases.pile(self.task)
        try:
            case = await cases.open(self.task)
        except TaskError as error:
            return CheckedTask(task=self.task, pile=pile, unready=str(error))
        except InfrastructureError as error:
            return CheckedTask(task=self.task, pile=pile, unknown=str(error))
        try:
            repeats = range(self.ask.repeats)
            gold = [await self._grade_again(case.gold, number) for number in repeats] if await case.has_repair() else []
            empty = [await self._grade_again(case.empty, number) for number in repeats]
            tried = [name for name in self.ask.cheats if await self._tempt(case, name)]
            random = int(await self.play(self.task)) if self.play is not None and self.ask.random else None
        except TaskError as error:
            return CheckedTask(task=self.task, pile=pile, killed=self.killed, trouble=str(error))
        except VerifierKilledError as error:
            trouble = f"its gradings end by SIGKILL ({KILLS} of {KILLS}): {error}"
            return CheckedTask(task=self.task, pile=pile, killed=self.killed, trouble=trouble)
        except InfrastructureError as error:
            return CheckedTask(task=self.task, pile=pile, killed=self.killed, unknown=str(error))
        return CheckedTask(
            task=self.task,
            pile=pile,
            gold=tuple(int(verdict.resolved) for verdict in gold),
            empty=tuple(int(verdict.resolved) for verdict in empty),
            flaky=tuple(dict.fromkeys((*_flaky_tests(gold), *_flaky_tests(empty)))),
            wins=tuple(self.wins),
            tried=tuple(tried),
            random=random,
            killed=self.killed,
            trouble=case.trouble(gold[0] if gold else None, empty[0]),
        )

    async def _grade_again(self, grade: Callable[[int], Awaitable[Verdict]], repeat: int) -> Verdict:
        """Return a verdict; a killed grading is repeated, since the machine may have been short of memory."""
        for left in reversed(range(KILLS)):
            try:
                return check_settled(await grade(repeat))
            except VerifierKilledError:
                self.killed += 1
                if left == 0:
                    raise
        raise AssertionError("unreachable")

    async def _tempt(self, case: Case, name: str) -> bool:
        """Try a cheat, and return whether it could be tried.

        It wins if what it hands in is graded as a repair; one that kills its judge does not.
        """
        try:
            verdict = await case.cheat(name)
        except VerifierKilledError:
            self.killed += 1
            return True
        if verdict is not None and verdict.resolved:
            self.wins.append(name)
        return verdict is not None


def _flaky_tests(verdicts: Sequence[Verdict]) -> list[str]:
    """Return the tests that failed in some of the runs, but not in all."""
    failed = [set(verdict.failed) for verdict in verdicts]
    return sorted(test for test in set().union(*failed) if not all(test in each for each in failed))
