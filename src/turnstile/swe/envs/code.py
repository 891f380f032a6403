"""Show an agent one function of a file, and edit the shown part by search and replace."""

from __future__ import annotations

import ast
import difflib
import warnings
from dataclasses import dataclass, replace


class EditError(Exception):
    """An edit that cannot be applied; the message tells the agent why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Code:
    """The text of a file, and the function in it that is shown.

    The shown lines are those from `start` to `end` (from 1, both included), except the `hidden` ones.
    """

    text: str
    start: int
    end: int
    hidden: frozenset[int] = frozenset()

    def view(self) -> str:
        """Return the shown lines without the function's own indentation."""
        return "\n".join(line for _, line in self._shown())

    def replaced(self, old: str, new: str) -> Code:
        """Return the code with the one occurrence of `old` in the view replaced with `new`.

        Both may span lines, as the view shows them. Raises EditError if `old` does not occur exactly once or spans
        hidden lines, nothing would change, or the function would no longer be valid Python.
        """
        if old == new:
            raise EditError("no change: both sides are the same")
        shown = self._shown()
        view = "\n".join(line for _, line in shown)
        at = view.find(old) if old else -1
        if at < 0:
            raise EditError(f"no match; nearest: {nearest_line(old, [line for _, line in shown])}")
        if view.find(old, at + 1) >= 0:
            raise EditError(f"{_count(view, old)} matches, give more of the line")
        first, last = view.count("\n", 0, at), view.count("\n", 0, at + len(old))
        numbers = [number for number, _ in shown[first : last + 1]]
        if numbers != list(range(numbers[0], numbers[-1] + 1)):
            raise EditError("no match: hidden lines lie between")
        begin = sum(len(line) + 1 for _, line in shown[:first])
        block = "\n".join(line for _, line in shown[first : last + 1])
        inserted = (block[: at - begin] + new + block[at - begin + len(old) :]).split("\n")
        edited = self._with_lines(numbers[0], numbers[-1], inserted)
        if not edited.is_python():
            raise EditError("syntax error, not applied")
        return edited

    def is_python(self) -> bool:
        """Return whether the function can be parsed on its own."""
        block = "\n".join(self.text.split("\n")[self.start - 1 : self.end]) + "\n"
        source = f"if True:\n{block}" if block[:1].isspace() else block
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                ast.parse(source)
            except (SyntaxError, ValueError, RecursionError, MemoryError):  # what the parser raises for bad text
                return False
        return True

    def line_with(self, text: str) -> str:
        """Return the first shown line that contains `text`, without its indentation; "" if there is none."""
        return next((line.strip() for _, line in self._shown() if text in line), "")

    def _shown(self) -> list[tuple[int, str]]:
        """Return each shown line as (number, text without the function's indentation)."""
        lines = self.text.split("\n")
        indent = self._indent(lines)
        return [
            (number, lines[number - 1].removeprefix(indent).rstrip("\r"))
            for number in range(self.start, self.end + 1)
            if number not in self.hidden
        ]

    def _indent(self, lines: list[str]) -> str:
        first = lines[self.start - 1]
        return first[: len(first) - len(first.lstrip())]

    def _with_lines(self, first: int, last: int, inserted: list[str]) -> Code:
        """Return the code with lines `first` to `last` replaced with `inserted`, which have the form of the view."""
        lines = self.text.split("\n")
        indent = self._indent(lines)
        ending = "\r" if lines[first - 1].endswith("\r") else ""
        kept = [indent if lines[number - 1].startswith(indent) else "" for number in range(first, last + 1)]
        kept += [indent] * (len(inserted) - len(kept))
        new = [(prefix if line else "") + line + ending for prefix, line in zip(kept, inserted, strict=False)]
        moved = len(inserted) - (last - first + 1)
        return replace(
            self,
            text="\n".join([*lines[: first - 1], *new, *lines[last:]]),
            end=self.end + moved,
            hidden=frozenset(number + moved if number > last else number for number in self.hidden),
        )


def nearest_line(text: str, lines: list[str]) -> str:
    """Return the line most similar to `text`, without its indentation."""

    def likeness(line: str) -> float:
        matcher = difflib.SequenceMatcher(a=line.strip(), b=text.strip(), autojunk=False)
        return sum(block.size for block in matcher.get_matching_blocks()) / max(len(text.strip()), 1)

    return max(lines, key=likeness, default="").strip()


def _count(text: str, part: str) -> int:
    """Count the occurrences of `part`, including overlapping ones."""
    return sum(text.startswith(part, at) for at in range(len(text)))
