"""Check tasks before training: repairs must always score 1, and unchanged code and cheats 0."""

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
"""Plays one episode of an agent at a task, and returns whether the task was resolved."""

KILLS = 3  # killed gradings in a row after which the task is blamed


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
    """Check tasks, and return the findings in the order of the tasks.

    The repair and the unchanged code of every task are graded `repeats` times. Cheats and `play`, the random agent, are
    tried on `probed` tasks of each pile (None for all), drawn by `seed`, because they depend more on the tests and the
    grader than on the single task. A task is not checked again if `notes` already answer the check, and new findings
    are noted as they come. Errors of a task or of the infrastructure are not raised but returned in the findings.
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
    """The check of one task."""

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
            gold = (
                [await self._grade_with_retries(case.gold, number) for number in repeats]
                if await case.has_repair()
                else []
            )
            empty = [await self._grade_with_retries(case.empty, number) for number in repeats]
            tried = [name for name in self.ask.cheats if await self._try_cheat(case, name)]
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

    async def _grade_with_retries(self, grade: Callable[[int], Awaitable[Verdict]], repeat: int) -> Verdict:
        """Return a verdict, repeating a killed grading, since the machine may have been short of memory."""
        for left in reversed(range(KILLS)):
            try:
                return check_settled(await grade(repeat))
            except VerifierKilledError:
                self.killed += 1
                if left == 0:
                    raise
        raise AssertionError("unreachable")

    async def _try_cheat(self, case: Case, name: str) -> bool:
        """Try a cheat, and return whether it could be tried.

        It wins if what it hands in is graded as a repair. A cheat that kills its grading does not win.
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
    """Return the tests that failed in some of the runs, but not in all of them."""
    failed = [set(verdict.failed) for verdict in verdicts]
    return sorted(test for test in set().union(*failed) if not all(test in each for each in failed))
