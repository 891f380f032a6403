"""Show an agent a file's text with line numbers, and edit it by search and replace with explained failures."""

from __future__ import annotations

import re
from collections.abc import Sequence

from turnstile.swe.envs.code import EditError, nearest_line

_NUMBERED = re.compile(r" *\d+\t")
_SHOWN = 3  # most places named in a message


def decode(data: bytes) -> str:
    """Return a file's bytes as text; `encode` restores bytes that are not UTF-8."""
    return data.decode("utf-8", "surrogateescape")


def encode(text: str) -> bytes:
    """Return text as bytes, restoring those that `decode` could not read."""
    return text.encode("utf-8", "surrogateescape")


def number_lines(text: str, start: int, end: int, chars: int) -> str:
    """Return lines `start` to `end` (from 1, both included) with their numbers, as many as fit into `chars`."""
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    last = min(end, len(lines))
    shown: list[str] = []
    size = 0
    for number in range(start, last + 1):
        line = f"{number:6}\t{_clean(lines[number - 1])}"
        size += len(line) + 1
        if size > chars and shown:
            shown.append(f"[lines {number} to {last} are left out here; view them with start={number}]")
            break
        shown.append(line if len(line) <= chars else f"{line[:chars]} [{len(line) - chars} characters left out]")
    else:
        if last < len(lines):
            shown.append(f"[{len(lines) - last} more lines]")
    return "\n".join(shown)


def _clean(line: str) -> str:
    """Return a line without its carriage return, and with question marks for bytes that are not text."""
    return line.removesuffix("\r").encode("utf-8", "replace").decode()


def replace_once(text: str, old: str, new: str) -> tuple[str, int]:
    """Return the text with the one occurrence of `old` replaced with `new`, and the line where it begins.

    In a file with CRLF line ends, `old` and `new` get them too. Raises EditError saying why `old` cannot be replaced.
    """
    if not old:
        raise EditError("old is empty; give the text that is to be replaced, or use create for a new file")
    if old == new:
        raise EditError("no change: old and new are the same")
    if "\r\n" in text and "\r" not in old + new:
        old, new = old.replace("\n", "\r\n"), new.replace("\n", "\r\n")
    places = _line_numbers(text, old)
    if len(places) > 1:
        named = ", ".join(map(str, places[:10])) + (", ..." if len(places) > 10 else "")
        raise EditError(f"old occurs {len(places)} times, at lines {named}; give more of the lines around it")
    if not places:
        raise EditError(_why_not(text, old.replace("\r\n", "\n")))
    at = text.index(old)
    return text[:at] + new + text[at + len(old) :], places[0]


def _line_numbers(text: str, part: str) -> list[int]:
    """Return the numbers of the lines in which `part` begins, overlapping occurrences included."""
    found, at = [], text.find(part)
    while at >= 0:
        found.append(text.count("\n", 0, at) + 1)
        at = text.find(part, at + 1)
    return found


def _why_not(text: str, old: str) -> str:
    lines = text.replace("\r\n", "\n").split("\n")
    wanted = old.strip("\n").split("\n")
    if all(_NUMBERED.match(line) for line in wanted if line.strip()):
        bare = "\n".join(_NUMBERED.sub("", line, count=1) for line in wanted)
        if bare in "\n".join(lines):
            return "old is not in the file; it holds the line numbers that view shows, leave them out"
    same = _find_ignoring_space(lines, wanted)
    if same:
        first = same[0]
        shown = "\n".join(lines[first - 1 : first - 1 + len(wanted)])
        more = f" (and at {', '.join(map(str, same[1:_SHOWN]))})" if len(same) > 1 else ""
        return (
            f"old is not in the file as written: whitespace or indentation differs. From line {first}{more} it is:\n"
            f"{_clean(shown)}"
        )
    sought = max(wanted, key=lambda line: len(line.strip()))
    nearest = nearest_line(sought, [line for line in lines if line.strip()])
    numbers = [number for number, line in enumerate(lines, 1) if line.strip() == nearest][:_SHOWN]
    if not nearest:
        return "old is not in the file, which is empty"
    around = number_lines("\n".join(lines), max(numbers[0] - 1, 1), numbers[0] + 1, 600)
    return f"old is not in the file; the nearest that is there:\n{around}"


def _find_ignoring_space(lines: Sequence[str], wanted: Sequence[str]) -> list[int]:
    """Return the number of the first line of each place that differs from `wanted` only in white space."""
    bare = ["".join(line.split()) for line in lines]
    sought = ["".join(line.split()) for line in wanted]
    if not any(sought):
        return []
    if len(sought) == 1:
        return [number for number, line in enumerate(bare, 1) if sought[0] in line]
    ends = range(len(bare) - len(sought) + 1)
    return [first + 1 for first in ends if bare[first : first + len(sought)] == sought]
