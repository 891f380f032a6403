"""Choose which bugs to try, and in what order, before any test has judged them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from turnstile.errors import TaskError
from turnstile.swe import edits
from turnstile.swe.bug import read_source
from turnstile.swe.bugs import mutate
from turnstile.swe.bugs.families import larger_mutants, pairs
from turnstile.swe.bugs.profile import Profile
from turnstile.swe.packages.source import Package


@dataclass(frozen=True, kw_only=True, slots=True)
class Filter:
    """Conditions on the bugs to try. A limit of 0 means no limit."""

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
"""Accepts bugs that fit completely into the prompt of a model of a hundred million parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A bug that has not been judged yet; `nodes` are the tests that will judge it."""

    id: str
    file: str
    mutant: mutate.Mutant
    patch: mutate.Patch
    line_length: int
    sites: int
    nodes: tuple[str, ...]


def candidates(package: Package, measured: Profile, seed: int, wanted: Filter, cap: int) -> list[list[Candidate]]:
    """Return the candidates of each function in the order to try them, with the functions shuffled by `seed`.

    Within a function the kinds take turns, so that a function full of numbers still yields other bugs. `cap` limits the
    tests of one candidate.
    """
    rng = random.Random(f"make/{package.label}/{seed}")
    by_function: list[list[Candidate]] = []
    for file in package.modules:
        try:
            text = read_source(package.tree / file)
            found = mutate.mutants(text)
            larger = larger_mutants(text, wanted.kinds)
        except (SyntaxError, UnicodeDecodeError):
            continue  # written for another Python version, or not in UTF-8
        sites = mutate.site_count(found)
        larger_rng = random.Random(f"make/{package.label}/{seed}/{file}")  # keeps the draw of one-token bugs as it is
        groups, more = _by_function(found), _by_function(larger)
        for key in dict.fromkeys((*groups, *more)):
            group, rest = groups.get(key, []), more.get(key, [])
            if "pair" in wanted.kinds:
                rest = [*rest, *pairs(group, larger_rng)]
            order = _interleave_kinds(group, rng) if group else []
            if rest:
                order = _interleave_kinds(
                    [*(mutant for mutant in order if mutant.kind in wanted.kinds), *rest], larger_rng
                )
            row = list(_candidates_of(package, measured, file, text, order, sites.get(key[0], 0), cap))
            row = [candidate for candidate in row if wanted.takes(candidate)]
            if row:
                by_function.append(row)
    rng.shuffle(by_function)
    return by_function


def _by_function(found: Sequence[mutate.Mutant]) -> dict[tuple[str, int], list[mutate.Mutant]]:
    groups: dict[tuple[str, int], list[mutate.Mutant]] = {}
    for mutant in found:
        groups.setdefault((mutant.function.qualname, mutant.function.start), []).append(mutant)
    return groups


def _interleave_kinds(group: list[mutate.Mutant], rng: random.Random) -> list[mutate.Mutant]:
    kinds: dict[str, list[mutate.Mutant]] = {}
    for mutant in group:
        kinds.setdefault(mutant.kind, []).append(mutant)
    piles = list(kinds.values())
    rng.shuffle(piles)
    for pile in piles:
        rng.shuffle(pile)
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
    """Return the length of the longest line that the bug touches, without indentation.

    For a bug within one line, that is the line with the bug. For others, the lines with and without the bug count.
    """
    if mutant.is_small:
        return len(lines[mutant.line - 1].strip()) + len(mutant.new) - len(mutant.old)
    changed = [line for _, _, old, new in mutant.edits for line in (*old.splitlines(), *new.splitlines())]
    return max(len(line.strip()) for line in (*changed, *(lines[edit[0] - 1] for edit in mutant.edits)))
