"""Judge a candidate by its tests, which either make it a task or give a reason to reject it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress

from turnstile.errors import VerifierError
from turnstile.swe import edits
from turnstile.swe.bug import ENV, Bug, read_source
from turnstile.swe.bugs import mutate
from turnstile.swe.bugs.candidates import Candidate
from turnstile.swe.bugs.statement import problem_statement
from turnstile.swe.grading.bench import Files
from turnstile.swe.grading.grader import CodeGrader
from turnstile.swe.grading.judge import fault
from turnstile.swe.grading.testrun import Report
from turnstile.swe.packages.source import Package
from turnstile.types import Task


class Validator:
    """Judges the candidates of one package by running their tests with the grader."""

    def __init__(self, package: Package, grader: CodeGrader) -> None:
        self._package = package
        self._grader = grader

    async def verdict(self, candidate: Candidate) -> Task | str | None:
        """Return a task, or a phrase that says why the candidate is rejected; None if no verdict could be reached."""
        for _ in range(2):
            with suppress(VerifierError):  # a single error may be a coincidence
                return await self._verdict(candidate)
        return None

    async def _verdict(self, candidate: Candidate) -> Task | str:
        sound = await self._sound_tests(candidate)
        if not sound:
            return "tests unsound alone"
        mutant = candidate.mutant
        text = read_source(self._package.tree / candidate.file)
        for edit in mutant.edits if mutant.also else ():
            alone = await self._run(candidate, {candidate.file: edits.apply(text, *edit).encode("utf-8")})
            if all(map(alone.passed, sound)):
                return "one of the two survives alone"
        bugged = edits.apply_all(text, mutant.edits).encode("utf-8")
        first = await self._run(candidate, {candidate.file: bugged})
        if first.problem is not None:
            return "hangs or crashes"
        if first.uncollected:
            return "breaks the import"
        if all(map(first.passed, sound)):
            return "survives"
        second = await self._run(candidate, {candidate.file: bugged}, reverse=True)
        if second.problem is not None:
            return "hangs or crashes"
        p2p = tuple(test for test in sound if first.passed(test) and second.passed(test))
        f2p = [test for test in sound if not first.passed(test) and not second.passed(test)]
        telling = next((test for test in f2p if first.outcomes[test] != "missing" and first.messages.get(test)), None)
        if telling is None:
            return "no steady failure"
        f2p.sort(key=lambda test: test != telling)
        messages = {test: steady(message) for test, message in first.messages.items()}
        bug = self._bug(candidate, bugged.decode("utf-8"), tuple(f2p), p2p, messages)
        if await fault(self._grader, bug, self._package) is not None:
            return "no steady failure"
        return Task(id=candidate.id, env=ENV, data=bug.data())

    async def _sound_tests(self, candidate: Candidate) -> list[str]:
        """Return the candidate's tests that pass on the pristine tree in both orders, run without other tests."""
        runs = [await self._run(candidate, {}, reverse=reverse) for reverse in (False, True)]
        return [test for test in candidate.nodes if all(run.passed(test) for run in runs)]

    async def _run(self, candidate: Candidate, files: Files, *, reverse: bool = False) -> Report:
        report = await self._grader.run_tests(
            self._package.tree, files, candidate.nodes, env=self._package.environment, reverse=reverse
        )
        if report.waited_out:  # the code or a busy machine may be the cause, so record nothing
            raise VerifierError(f"the tests of {candidate.id} {report.problem} on the wall clock")
        return report

    def _bug(
        self, candidate: Candidate, text: str, f2p: tuple[str, ...], p2p: tuple[str, ...], messages: Mapping[str, str]
    ) -> Bug:
        package, mutant, patch = self._package, candidate.mutant, candidate.patch
        function = mutant.function
        if not mutant.is_small:  # the bug may have moved its lines
            function = next(
                found
                for found in mutate.functions(text)
                if (found.qualname, found.start) == (function.qualname, function.start)
            )
        return Bug(
            source=package.spec,
            package=package.name,
            version=package.version,
            licence=package.licence,
            requires=package.requires,
            digest=package.digest[:16],
            file=candidate.file,
            function=mutant.function.qualname,
            kind=mutant.kind,
            line=mutant.line,
            col=mutant.col,
            old=mutant.old,
            new=mutant.new,
            buggy=patch.buggy,
            fixed=patch.fixed,
            unique=patch.unique,
            shown=(function.start, function.end),
            hidden=function.hidden,
            f2p=f2p,
            p2p=p2p,
            message=messages[f2p[0]],
            statement=problem_statement(package.name, f2p, len(p2p), messages),
            difficulty=candidate.sites,
            also=mutant.also,
            lines=mutant.lines,
            failing=len(f2p),
        )


_LONGEST_MESSAGE = 200  # characters


def steady(message: str) -> str:
    """Return a shortened message without memory addresses and the path of the working copy, which vary by run."""
    message = re.sub(r"\b(at )?0x(?(1)[0-9a-fA-F]*|[0-9a-fA-F]{6,}\b)", r"\g<1>0x...", message[:_LONGEST_MESSAGE])
    return re.sub(r"[^\s'\"]*/turnstile-sandboxes-[^/\s'\"]*/(?:sandbox-\d+/)?(?:(?:work|scratch)/)?", "", message)
