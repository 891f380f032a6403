"""What a problem's verdicts are worth: its repair and no change graded, and what cheats come to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from turnstile.tasks.swe.grading.grader import Verdict, normal
from turnstile.tasks.swe.grading.probes import Probe, Scene
from turnstile.tasks.swe.problems.base import Problem
from turnstile.tasks.swe.problems.copy import Change


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The verdicts on the repair (none where the task carries none) and on no change, one a repeat; the cheats that
    were `tried`, and those of them that were graded as a repair."""

    gold: tuple[Verdict, ...]
    empty: tuple[Verdict, ...]
    tried: tuple[str, ...]
    wins: tuple[str, ...]

    @property
    def trouble(self) -> str | None:
        """What speaks against the task but cheats, in a clause."""
        for verdict in self.gold:
            if not verdict.resolved:
                first = verdict.failed[0]
                return f"the repair scores 0: {verdict.problem or f'{first} ({verdict.messages.get(first)})'}"
        return "no change scores 1" if any(verdict.resolved for verdict in self.empty) else None


async def try_problem(problem: Problem, *, repeats: int, probes: Mapping[str, Probe]) -> Trial:
    """Grades repair and no change `repeats` times and every probe once. Raises TaskError and InfrastructureError."""
    repair = await problem.gold()
    gold = [] if repair is None else [await problem.grade(repair, repeat=number) for number in range(repeats)]
    empty = [await problem.grade(Change(), repeat=number) for number in range(repeats)]
    wins = await _winning(problem, probes) if probes else None
    return Trial(
        gold=tuple(gold), empty=tuple(empty), tried=() if wins is None else tuple(probes), wins=tuple(wins or ())
    )


async def _winning(problem: Problem, probes: Mapping[str, Probe]) -> list[str] | None:
    """The cheats that are graded as a repair; None where no file is known for them to begin with."""
    copy = await problem.open()
    try:
        file = next((file for file in sorted(problem.suspects) if file.endswith(".py") and file in copy.base), None)
        text = "" if file is None else (await copy.sandbox.read(file)).decode("utf-8", "surrogateescape")
    finally:
        await copy.close()
    if file is None:
        return None
    tests = (*problem.fail_to_pass, *problem.pass_to_pass)
    wins = []
    for name, probe in probes.items():
        copy = await problem.open()
        try:
            files = await probe(Scene(sandbox=copy.sandbox, file=file, text=text, tests=tests))
        finally:
            await copy.close()
        if (await problem.grade(Change(files={normal(path): data for path, data in files.items()}))).resolved:
            wins.append(name)
    return wins
