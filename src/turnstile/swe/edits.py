"""Apply edits to a text, leaving everything else in it the same, byte for byte.

An edit is (line, column, old, new). Lines count from 1, columns from 0 in characters.
"""

from __future__ import annotations

import io
from collections.abc import Iterable


def source_lines(text: str) -> list[str]:
    """Return the lines as Python counts them (a form feed does not end a line), line ends included."""
    return io.StringIO(text).readlines()


def apply(text: str, line: int, col: int, old: str, new: str) -> str:
    """Return the text with `old` at (line, col) replaced by `new`. Raises ValueError if `old` is not there."""
    at = sum(map(len, source_lines(text)[: line - 1])) + col if line > 0 else 0
    found = text[at : at + len(old)] if line <= text.count("\n") + 1 else ""
    if found != old:
        raise ValueError(f"line {line}, column {col}: expected {old!r}, found {found!r}")
    return text[:at] + new + text[at + len(old) :]


def apply_all(text: str, edits: Iterable[tuple[int, int, str, str]]) -> str:
    """Return the text with several edits applied, which must not overlap. Raises ValueError as `apply` does."""
    for line, col, old, new in sorted(edits, reverse=True):
        text = apply(text, line, col, old, new)
    return text


def changed_lines(edits: Iterable[tuple[int, int, str, str]]) -> int:
    """Count the lines that the edits change, remove or add."""
    return sum(max(len(old.splitlines()), len(new.splitlines()), 1) for _, _, old, new in edits)
