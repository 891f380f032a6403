"""Express a repair as search and replace in the part of a function that an agent is shown, if possible.

The view of a function leaves out docstrings, comments and blank lines, and the indentation of the function as a whole.
A fix replaces text that occurs once in the view; both its texts may span lines that are consecutive in the file. Every
kind of bug can be expressed like this, but not every bug. The exceptions are a bug in a run of shown lines that occurs
twice in the function, and one that removed text indented less than the function.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count

from turnstile.errors import TaskError
from turnstile.swe.bug import Bug
from turnstile.swe.edits import apply_all

Fix = tuple[str, str]
"""(old, new)"""


def fixes(bug: Bug, pristine: str) -> list[Fix]:
    """Return the fixes that repair the bug, one for each place, in the order to apply them.

    `pristine` is the text of the file without the bug. Raises TaskError for a bug that cannot be repaired by fixes.
    """
    view = View.of(bug, apply_all(pristine, bug.edits))
    if bug.unique and view.occurs_once(bug.buggy):
        return [(bug.buggy, bug.fixed)]
    found = []
    for hunk in reversed(hunks(bug, pristine)):  # from last to first, so that the lines of the others do not move
        found.append(view.fix(hunk, bug))
        view = view.after(hunk)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Hunk:
    """A replacement of lines `first` to `last` of the buggy text with `lines`.

    `last` is `first - 1` if the bug removed all of them.
    """

    first: int
    last: int
    lines: tuple[str, ...]


def hunks(bug: Bug, pristine: str) -> list[Hunk]:
    """Return the hunks of whole lines that undo the bug's edits, in order."""
    before = pristine.split("\n")
    found: list[Hunk] = []
    moved = 0  # lines added by the edits so far
    for line, col, old, new in sorted(bug.edits):
        first, last = line, line + old.count("\n")
        grown = new.count("\n") - old.count("\n")
        whole = col == 0 and old.endswith("\n") and (not new or new.endswith("\n"))
        if whole:  # the edit ends before the next line
            last -= 1
        begin, end = first + moved, last + moved + grown
        found.append(Hunk(first=begin, last=end, lines=tuple(before[first - 1 : last])))
        moved += grown
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """The shown lines of a function by line number, without the function's own indentation."""

    shown: dict[int, str]
    indent: str

    @classmethod
    def of(cls, bug: Bug, text: str) -> View:
        lines = text.split("\n")
        head = lines[bug.shown[0] - 1]
        indent = head[: len(head) - len(head.lstrip())]
        return cls(shown={number: _bare(lines[number - 1], indent) for number in bug.shown_lines()}, indent=indent)

    def fix(self, hunk: Hunk, bug: Bug) -> Fix:
        """Return a fix that makes the hunk's change in the smallest run of shown lines that occurs once.

        Raises TaskError if there is none.
        """
        if not any(line.strip() and not line.startswith(self.indent) for line in hunk.lines):
            hunk = self._move_into_view(hunk)
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
        """Return the view with the hunk applied; line numbers after the hunk are no longer right."""
        shown = {number: line for number, line in self.shown.items() if number < hunk.first}
        rest = {number: line for number, line in self.shown.items() if number > hunk.last}
        return replace(self, shown={**shown, **dict(zip(count(hunk.first), self._bare(hunk))), **rest})

    def _bare(self, hunk: Hunk) -> list[str]:
        return [_bare(line, self.indent) for line in hunk.lines]

    def _move_into_view(self, hunk: Hunk) -> Hunk:
        """Return the hunk; one that only inserts lines next to hidden ones is moved to the next shown line.

        The inserted lines work as well there, since the hidden lines do nothing.
        """
        if hunk.first <= hunk.last or hunk.first - 1 in self.shown:
            return hunk
        place = next((number for number in self.shown if number >= hunk.first), hunk.first)
        return replace(hunk, first=place, last=place - 1)

    def _runs(self, hunk: Hunk) -> list[tuple[int, int]]:
        """Return the runs of shown lines that contain the hunk, or touch it if it only inserts, smallest first."""
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
        """Return whether the view contains the text once; overlapping occurrences count too, as they do for an edit."""
        whole = "\n".join(self.shown.values())
        at = whole.find(old)
        return at >= 0 and whole.find(old, at + 1) < 0


def _bare(line: str, indent: str) -> str:
    return line.removeprefix(indent).rstrip("\r")
