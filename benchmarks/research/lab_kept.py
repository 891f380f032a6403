"""What `lab.py` keeps, read back, and what the page's modules share."""

from __future__ import annotations

from typing import Any

from turnstile.lab.curves import Race, race_of
from turnstile.lab.study import Line, line_of
from turnstile.lab.table import Grid, to_markdown

UNSWEPT = ("branch", "tree", "vine")
"""Kinds that have nothing to compare in independent attempts."""
Body = dict[str, Any]


def lines_of(body: Body) -> list[Line]:
    return [line_of(each) for each in body["lines"]]


def sweeps_of(body: Body) -> dict[str, list[Line]]:
    return {knob: [line_of(each) for each in found] for knob, found in body["sweeps"].items()}


def races_of(body: Body) -> list[Race]:
    return [race_of(each) for each in body["races"]]


def section(grid: Grid, level: int = 2, *, note: bool = True) -> str:
    return f"{'#' * level} {grid.title}\n\n{grid.note + chr(10) * 2 if note else ''}{to_markdown(grid)}"
