"""A repair as search and replace in what an agent is shown of the function, where it can be said so.

The view of a function has its lines without the docstring, comments and blank lines, and without the indentation of
the whole. A fix replaces text that occurs in it once by other text; both may span lines that follow each other in
the file. That expresses every kind of bug, but not each bug: not one in a run of shown lines that stands in the
function twice, and none that took away a text which begins further left than the function does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count

from turnstile.errors import TaskError
from turnstile.swe.bug import Bug
from turnstile.swe.edits import apply_all

Fix = tuple[str, str]
"""old, new"""


def fixes(bug: Bug, pristine: str) -> list[Fix]:
    """What repairs the function of `bug`, one fix for each place, to be made in this order; `pristine` is the text of
    its file without the bug. Raises TaskError for a bug that cannot be expressed so."""
    view = View.of(bug, apply_all(pristine, bug.edits))
    if bug.unique and view.occurs_once(bug.buggy):
        return [(bug.buggy, bug.fixed)]
    found = []
    for hunk in reversed(hunks(bug, pristine)):  # the last first: the lines of the others stay where they are
        found.append(view.fix(hunk, bug))
        view = view.after(hunk)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Hunk:
    """Lines `first` to `last` of the text with the bug are to become `lines`; `last` is `first - 1` where they were
    all left out."""

    first: int
    last: int
    lines: tuple[str, ...]


def hunks(bug: Bug, pristine: str) -> list[Hunk]:
    """The whole lines that the bug's edits changed, as what takes them back."""
    before = pristine.split("\n")
    found: list[Hunk] = []
    moved = 0  # lines that the edits so far have added
    for line, col, old, new in sorted(bug.edits):
        first, last = line, line + old.count("\n")
        grown = new.count("\n") - old.count("\n")
        whole = col == 0 and old.endswith("\n") and (not new or new.endswith("\n"))
        if whole:  # the line after it is as it was
            last -= 1
        begin, end = first + moved, last + moved + grown
        found.append(Hunk(first=begin, last=end, lines=tuple(before[first - 1 : last])))
        moved += grown
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """The shown lines of a function by their numbers, without the indentation of the whole."""

    shown: dict[int, str]
    indent: str

    @classmethod
    def of(cls, bug: Bug, text: str) -> View:
        lines = text.split("\n")
        head = lines[bug.shown[0] - 1]
        indent = head[: len(head) - len(head.lstrip())]
        return cls(shown={number: _bare(lines[number - 1], indent) for number in bug.shown_lines()}, indent=indent)

    def fix(self, hunk: Hunk, bug: Bug) -> Fix:
        """The least run of shown lines at the hunk that occurs once. Raises TaskError where there is none."""
        if not any(line.strip() and not line.startswith(self.indent) for line in hunk.lines):
            hunk = self._in_sight(hunk)
            for first, last in self._runs(hunk):
                old = "\n".join(self.shown[number] for number in range(first, last + 1))
                if old.strip() and self.occurs_once(old):
                    head = [self.shown[number] for number in range(first, hunk.first)]
                    tail = [self.shown[number] for number in range(hunk.last + 1, last + 1)]
                    return old, "\n".join([*head, *self._bare(hunk), *tail])
        raise TaskError(
            f"a bug of kind {bug.kind} in {bug.function} of {bug.file} (line {bug.line}) cannot be repaired by search "
            "and replace in what is shown of the function; leave its task out"
        )

    def after(self, hunk: Hunk) -> View:
        """The view when the hunk is taken back, up to it."""
        shown = {number: line for number, line in self.shown.items() if number < hunk.first}
        rest = {number: line for number, line in self.shown.items() if number > hunk.last}
        return replace(self, shown={**shown, **dict(zip(count(hunk.first), self._bare(hunk))), **rest})

    def _bare(self, hunk: Hunk) -> list[str]:
        return [_bare(line, self.indent) for line in hunk.lines]

    def _in_sight(self, hunk: Hunk) -> Hunk:
        """Lines that were left out before hidden ones may as well come after those."""
        if hunk.first <= hunk.last or hunk.first - 1 in self.shown:
            return hunk
        place = next((number for number in self.shown if number >= hunk.first), hunk.first)
        return replace(hunk, first=place, last=place - 1)

    def _runs(self, hunk: Hunk) -> list[tuple[int, int]]:
        """Runs of lines, all shown, that hold the hunk or, if it has no lines, touch it; smaller ones first."""
        if any(number not in self.shown for number in range(hunk.first, hunk.last + 1)):
            return []
        lowest, highest = hunk.first, hunk.last
        while lowest - 1 in self.shown:
            lowest -= 1
        while highest + 1 in self.shown:
            highest += 1
        runs = [
            (first, last)
            for first in range(lowest, hunk.first + 1)
            for last in range(hunk.last, highest + 1)
            if first <= last
        ]
        return sorted(runs, key=lambda run: (run[1] - run[0], -run[0]))

    def occurs_once(self, old: str) -> bool:
        """Whether the view holds the text once, counted as an edit counts: overlapping places too."""
        whole = "\n".join(self.shown.values())
        at = whole.find(old)
        return at >= 0 and whole.find(old, at + 1) < 0


def _bare(line: str, indent: str) -> str:
    return line.removeprefix(indent).rstrip("\r")
