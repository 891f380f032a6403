"""Making repository tasks: a package, its bugs, and the tests' word on which of them are good.

Every candidate is judged by running the tests that call its function, through the grader that episodes are
graded by, whose verdict on the bug and on its repair is the last word. Good ones are appended to the task file
as they are found, the others are remembered in `FILE.rejected.jsonl`, so a run that was killed goes on where
it stopped, and the same call with a larger number only adds to the file.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from turnstile.errors import TaskError, VerifierError
from turnstile.tasks.base import dump_task, load_tasks
from turnstile.tasks.swe import edits
from turnstile.tasks.swe.bug import ENV, Bug, read_source
from turnstile.tasks.swe.bugs import mutate
from turnstile.tasks.swe.bugs.families import larger_mutants, pairs
from turnstile.tasks.swe.bugs.profile import Profile, profile
from turnstile.tasks.swe.bugs.statement import problem_statement
from turnstile.tasks.swe.grading.bench import Files
from turnstile.tasks.swe.grading.grader import Grader, local_grader
from turnstile.tasks.swe.grading.judge import fault
from turnstile.tasks.swe.grading.testrun import Report
from turnstile.tasks.swe.packages.source import Package, Source, fetch
from turnstile.types import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Filter:
    """Which bugs are wanted. 0 is no limit."""

    max_line: int = 0  # characters of the buggy line without its indentation
    max_shown: int = 0  # lines shown of the function
    unique: bool = False  # the search text occurs once in the function
    kinds: tuple[str, ...] = mutate.TOKEN_KINDS

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in mutate.KINDS:
                raise TaskError(f"unknown bug kind {kind!r}; known: {', '.join(mutate.KINDS)}")

    def takes(self, candidate: Candidate) -> bool:
        function, patch = candidate.mutant.function, candidate.patch
        return (
            candidate.mutant.kind in self.kinds
            and not (self.max_line and candidate.line_length > self.max_line)
            and not (self.max_shown and function.shown > self.max_shown)
            and (patch.unique or not self.unique)
        )


DEMO_FILTER = Filter(max_line=56, max_shown=12, unique=True)
"""Bugs that a model of a hundred million parameters can be shown whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A bug that has not met the tests yet; `nodes` are the tests that will judge it."""

    id: str
    file: str
    mutant: mutate.Mutant
    patch: mutate.Patch
    line_length: int
    sites: int
    nodes: tuple[str, ...]


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


def candidates(package: Package, measured: Profile, seed: int, wanted: Filter, cap: int) -> list[list[Candidate]]:
    """The candidates of each function in the order they are tried, functions in an order drawn from `seed`.

    Within a function the kinds take turns, so that a function full of numbers still shows other bugs.
    """
    chosen = random.Random(f"make/{package.label}/{seed}")
    by_function: list[list[Candidate]] = []
    for file in package.modules:
        try:
            text = read_source(package.tree / file)
            found = mutate.mutants(text)
            larger = larger_mutants(text, wanted.kinds)
        except (SyntaxError, UnicodeDecodeError):
            continue  # a source file for another Python, or of another encoding
        sites = mutate.site_count(found)
        others = random.Random(f"make/{package.label}/{seed}/{file}")  # so that what is drawn for tokens stays
        groups, more = _by_function(found), _by_function(larger)
        for key in dict.fromkeys((*groups, *more)):
            group, rest = groups.get(key, []), more.get(key, [])
            if "pair" in wanted.kinds:
                rest = [*rest, *pairs(group, others)]
            order = _mixed(group, chosen) if group else []
            if rest:
                order = _mixed([*(mutant for mutant in order if mutant.kind in wanted.kinds), *rest], others)
            row = list(_candidates_of(package, measured, file, text, order, sites.get(key[0], 0), cap))
            row = [candidate for candidate in row if wanted.takes(candidate)]
            if row:
                by_function.append(row)
    chosen.shuffle(by_function)
    return by_function


def _by_function(found: Sequence[mutate.Mutant]) -> dict[tuple[str, int], list[mutate.Mutant]]:
    groups: dict[tuple[str, int], list[mutate.Mutant]] = {}
    for mutant in found:
        groups.setdefault((mutant.function.qualname, mutant.function.start), []).append(mutant)
    return groups


def _mixed(group: list[mutate.Mutant], chosen: random.Random) -> list[mutate.Mutant]:
    kinds: dict[str, list[mutate.Mutant]] = {}
    for mutant in group:
        kinds.setdefault(mutant.kind, []).append(mutant)
    piles = list(kinds.values())
    chosen.shuffle(piles)
    for pile in piles:
        chosen.shuffle(pile)
    return [pile[turn] for turn in range(max(map(len, piles))) for pile in piles if turn < len(pile)]


def _candidates_of(
    package: Package, measured: Profile, file: str, text: str, group: Sequence[mutate.Mutant], sites: int, cap: int
) -> Iterator[Candidate]:
    module = file.rsplit("/", 1)[-1].removesuffix(".py")
    module = file.split("/")[-2] if module == "__init__" and "/" in file else module
    lines = edits.source_lines(text)
    for mutant in group:
        nodes = measured.tests_of(file, mutant.scope, cap)
        if not nodes:
            continue
        where = f"{module}.{mutant.function.qualname}"
        yield Candidate(
            id=f"{package.label}/{where}/l{mutant.line}-{mutant.kind}-{mutant.index}",
            file=file,
            mutant=mutant,
            patch=mutate.patch(text, mutant),
            line_length=_longest_line(lines, mutant),
            sites=sites,
            nodes=nodes,
        )


def _longest_line(lines: Sequence[str], mutant: mutate.Mutant) -> int:
    """Characters of the buggy line without its indentation; of several, the longest one, with the bug or without."""
    if mutant.is_small:
        return len(lines[mutant.line - 1].strip()) + len(mutant.new) - len(mutant.old)
    changed = [line for _, _, old, new in mutant.edits for line in (*old.splitlines(), *new.splitlines())]
    return max(len(line.strip()) for line in (*changed, *(lines[edit[0] - 1] for edit in mutant.edits)))


@dataclass(slots=True)
class _Ledger:
    """The task file and its side file: what has been judged already, and where new verdicts go."""

    out: Path
    package: Package
    tasks: dict[str, Task] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    undecided: set[str] = field(default_factory=set)  # of this call alone

    @property
    def side(self) -> Path:
        return self.out.with_name(f"{self.out.name}.rejected.jsonl")

    def open(self) -> None:
        """Reads both files; a line that a killed run left half-written is cut off."""
        self.out.parent.mkdir(parents=True, exist_ok=True)
        for path in (self.out, self.side):
            if path.exists():
                content = path.read_bytes()
                whole = content[: content.rfind(b"\n") + 1]
                if whole != content:
                    path.write_bytes(whole)
        if self.out.exists() and self.out.stat().st_size:
            prefix = f"{self.package.label}/"
            self.tasks = {task.id: task for task in load_tasks(self.out) if task.id.startswith(prefix)}
        if self.side.exists():
            for line in self.side.read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                self.rejected[record["id"]] = record["why"]

    def verdict_on(self, candidate: Candidate) -> Task | str | None:
        return self.tasks.get(candidate.id) or self.rejected.get(candidate.id)

    def add(self, candidate: Candidate, verdict: Task | str | None) -> None:
        if verdict is None:
            self.undecided.add(candidate.id)
            return
        if isinstance(verdict, Task):
            self.tasks[candidate.id] = verdict
            path, line = self.out, dump_task(verdict)
        else:
            self.rejected[candidate.id] = verdict
            path, line = self.side, json.dumps({"id": candidate.id, "why": verdict})
        with path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(line + "\n")


class _Validator:
    """Validates candidates of one package: what the grader's runs of their tests say of them."""

    def __init__(self, package: Package, grader: Grader) -> None:
        self._package = package
        self._grader = grader

    async def verdict(self, candidate: Candidate) -> Task | str | None:
        """A task, or the word for why the candidate is none; None where no verdict can be had."""
        for _ in range(2):
            with suppress(VerifierError):  # once may be an accident
                return await self._verdict(candidate)
        return None

    async def _verdict(self, candidate: Candidate) -> Task | str:
        sound = await self._sound(candidate)
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
        said = {test: _steady(message) for test, message in first.messages.items()}
        bug = self._bug(candidate, bugged.decode("utf-8"), tuple(f2p), p2p, said)
        if await fault(self._grader, bug, self._package) is not None:
            return "no steady failure"
        return Task(id=candidate.id, env=ENV, data=bug.data())

    async def _sound(self, candidate: Candidate) -> list[str]:
        """The candidate's tests that pass on the pristine tree when only they are run, in either order."""
        runs = [await self._run(candidate, {}, reverse=reverse) for reverse in (False, True)]
        return [test for test in candidate.nodes if all(run.passed(test) for run in runs)]

    async def _run(self, candidate: Candidate, files: Files, *, reverse: bool = False) -> Report:
        report = await self._grader.run_tests(
            self._package.tree, files, candidate.nodes, env=self._package.environment, reverse=reverse
        )
        if report.waited_out:  # as the code alone brings about, or a busy machine: no fact to be written down
            raise VerifierError(f"the tests of {candidate.id} {report.problem} on the wall clock")
        return report

    def _bug(
        self, candidate: Candidate, text: str, f2p: tuple[str, ...], p2p: tuple[str, ...], said: Mapping[str, str]
    ) -> Bug:
        package, mutant, patch = self._package, candidate.mutant, candidate.patch
        function = mutant.function
        if not mutant.is_small:  # its lines may have moved
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
            message=said[f2p[0]],
            statement=problem_statement(package.name, f2p, len(p2p), said),
            difficulty=candidate.sites,
            also=mutant.also,
            lines=mutant.lines,
            failing=len(f2p),
        )


_LONGEST_MESSAGE = 200  # characters


def _steady(message: str) -> str:
    """A message, cut, without what differs between two runs: addresses and the place of the working copy."""
    message = re.sub(r"\b(at )?0x(?(1)[0-9a-fA-F]*|[0-9a-fA-F]{6,}\b)", r"\g<1>0x...", message[:_LONGEST_MESSAGE])
    return re.sub(r"[^\s'\"]*/turnstile-sandboxes-[^/\s'\"]*/(?:sandbox-\d+/)?(?:(?:work|scratch)/)?", "", message)


async def make(
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
    grader: Grader | None = None,
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
    name = source if isinstance(source, str) else source.spec
    package = await asyncio.to_thread(
        fetch, source, extra=extra, cache=cache,
        progress=lambda message: progress(Progress(package=name, stage="fetch", message=message)),
    )  # fmt: skip
    ledger = _Ledger(out=Path(out), package=package)
    ledger.open()
    before = len(ledger.tasks)

    def report(stage: str, message: str = "", candidates: int = 0) -> None:
        progress(
            Progress(package=package.label, stage=stage, message=message, valid=len(ledger.tasks), wanted=n,
                     judged=len(ledger.tasks) + len(ledger.rejected), candidates=candidates)
        )  # fmt: skip

    async with AsyncExitStack() as stack:
        if grader is None:
            grader = await stack.enter_async_context(local_grader(workers))
        measured = await profile(
            package, grader.bench, runs=runs, seconds=suite_seconds, progress=lambda message: report("profile", message)
        )
        rows = candidates(package, measured, seed, wanted or Filter(), tests_per_bug)
        total = sum(map(len, rows))
        validator = _Validator(package, grader)
        exhausted = await _rounds(
            rows, ledger, validator, n, per_function, workers, lambda: report("validate", candidates=total)
        )
    report("done", candidates=total)
    reasons: dict[str, int] = {}
    for candidate in (candidate for row in rows for candidate in row):
        why = ledger.rejected.get(candidate.id)
        if why is not None:
            reasons[why] = reasons.get(why, 0) + 1
    return Made(
        tasks=tuple(ledger.tasks.values()),
        added=len(ledger.tasks) - before,
        rejected=reasons,
        undecided=len(ledger.undecided),
        exhausted=exhausted,
    )


async def _rounds(
    rows: Sequence[Sequence[Candidate]],
    ledger: _Ledger,
    validator: _Validator,
    n: int,
    per_function: int,
    workers: int,
    report: Callable[[], None],
) -> bool:
    """Tries one candidate of every function, then the next of each, until n are found; True when none is left.

    Verdicts are written in the order of the candidates, so the file does not depend on who was quicker.
    """
    for turn in range(max(map(len, rows), default=0)):
        queue = [row[turn] for row in rows if turn < len(row) and _kept(row[:turn], ledger) < per_function]
        for start in range(0, len(queue), 4 * workers):
            if len(ledger.tasks) >= n:
                return False
            block = queue[start : start + 4 * workers]
            running = {
                candidate.id: asyncio.ensure_future(validator.verdict(candidate))
                for candidate in block
                if ledger.verdict_on(candidate) is None
            }
            try:
                for candidate in block:
                    if candidate.id in running and len(ledger.tasks) < n:
                        ledger.add(candidate, await running[candidate.id])
                        report()
            finally:
                for future in running.values():
                    future.cancel()
                await asyncio.gather(*running.values(), return_exceptions=True)
    return len(ledger.tasks) < n


def _kept(row: Sequence[Candidate], ledger: _Ledger) -> int:
    return sum(candidate.id in ledger.tasks for candidate in row)
