"""Every table of the lab's results, made from what `lab.py` measured; `lab.py` writes each as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.research import lab_game
from turnstile.lab.curves import Race, race_of
from turnstile.lab.judge import SIGNIFICANT, Figures
from turnstile.lab.processes import PROCESSES
from turnstile.lab.regularisers import REGULARISERS, VALUE
from turnstile.lab.study import Line, line_of
from turnstile.lab.table import Grid, details, directions, learning, mark, number, progress

UNSWEPT = ("branch", "tree", "vine")
"""Kinds that have nothing to compare in independent attempts."""
SHAPES = {"none": "none", "potential": "at the highest level", "gated": "behind the outcome's gate"}
Body = dict[str, Any]


def lines_of(body: Body) -> list[Line]:
    return [line_of(each) for each in body["lines"]]


def sweeps_of(body: Body) -> dict[str, list[Line]]:
    return {knob: [line_of(each) for each in found] for knob, found in body["sweeps"].items()}


def races_of(body: Body) -> list[Race]:
    return [race_of(each) for each in body["races"]]


def tables(kept: Mapping[str, Body]) -> dict[str, Grid]:
    """Return every table by the name of its file. A part that was not measured has none."""
    found: dict[str, Grid] = {}
    if "gradients" in kept:
        lines = lines_of(kept["gradients"])
        found |= {"direction": directions(lines), "progress": progress(lines), "figures": every_figure(lines)}
    if "curves" in kept:
        found["learning"] = learning(races_of(kept["curves"]))
    if "game" in kept:
        found["game"] = lab_game.table(kept["game"]["runs"])
    if "branched" in kept:
        lines = lines_of(kept["branched"])
        found |= {"branched_direction": directions(lines), "branched_progress": progress(lines)}
    for name in ("sweeps", "loss_sweeps"):
        if name in kept:
            found |= {f"{name}_{knob}": swept(knob, lines) for knob, lines in sweeps_of(kept[name]).items()}
    if "losses" in kept:
        found |= dict(of_losses(kept["losses"]))
    if "factors" in kept:
        lines = lines_of(kept["factors"])
        found |= {"factors_direction": directions(lines), "factors": bias_and_noise(lines)}
    if "hacking" in kept:
        found["hacking"] = hacking(kept["hacking"]["found"])
    if "shaping" in kept:
        found["shaping"] = shaping(kept["shaping"]["found"])
    return found


def to_csv(grid: Grid) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([grid.columns, *grid.rows])
    return out.getvalue()


def plain(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> Grid:
    return Grid(title=title, columns=tuple(columns), rows=tuple(map(tuple, rows)), note=note)


def every_figure(lines: Sequence[Line]) -> Grid:
    """All figures of every estimator on every process."""
    grids = [details(lines, name) for name in PROCESSES]
    rows = [(grid.title, *row) for grid in grids for row in grid.rows]
    return plain("Every figure", ("process", *grids[0].columns), rows, grids[0].note)


def swept(knob: str, lines: Sequence[Line]) -> Grid:
    """Bias with the mark of its direction, and noise, of each estimator at each value of a knob."""
    cells = {(line.estimator, line.size if knob == "size" else line.knobs[knob]): line.figures for line in lines}
    names, values = list(dict.fromkeys(name for name, _ in cells)), list(dict.fromkeys(value for _, value in cells))

    def cell(f: Figures | None) -> str:
        return f"{number(f.bias_scaled)}{mark([f])}, {number(f.episodes, 1)}" if f else "-"

    rows = [(name, *(cell(cells.get((name, value))) for value in values)) for name in names]
    return plain(f"By {knob}", (knob, *map(str, values)), rows)


def of_losses(body: Body) -> Iterator[tuple[str, Grid]]:
    every = lines_of(body)
    aside = [line for line in every if line.kind in {*REGULARISERS, VALUE}]
    lines = [line for line in every if line not in aside]
    yield "losses_direction", directions(lines)
    yield "losses_progress", progress(lines)
    yield "regularisers_direction", directions(aside)
    yield "regularisers_progress", progress(aside)
    yield "regularisers_whole", directions([line_of(each) for each in body["whole"]])
    rows = [(name, *(cosine(f) for f in by.values())) for name, by in body["weights"].items()]
    head = ("aggregation", *next(iter(body["weights"].values())))
    yield "aggregation", plain("Direction by loss aggregation", head, rows)


def cosine(f: Body, *, surely: bool = False) -> str:
    """A cosine, with ! where the direction is surely wrong."""
    return f"{number(f['cosine'])}{'!' if surely or f['z_direction'] > SIGNIFICANT else ''}"


def bias_and_noise(lines: Sequence[Line]) -> Grid:
    """What each loss multiplier does to bias and noise where the sampler differs from the trainer."""
    found = {(line.estimator, line.column): line.figures for line in lines}
    columns = tuple(dict.fromkeys(line.column for line in lines))

    def cell(name: str, column: str) -> str:
        f = found.get((name, column))
        return f"{number(f.bias)}, {number(f.episodes, 1)}" if f else "-"

    rows = [(name, *(cell(name, column) for column in columns)) for name in dict.fromkeys(x.estimator for x in lines)]
    return plain("Bias and noise with loss multipliers", ("multiplier", *columns), rows)


def hacking(found: Sequence[Body]) -> Grid:
    rows = [
        (
            each["estimator"],
            each["composition"],
            "{:.2f} to {:.2f}".format(*each["total"]),
            "{:.2f} to {:.2f}".format(*each["outcome"]),
            f"{sum(each['published'])} of {len(each['published'])}",
        )
        for each in found
    ]
    head = ("estimator", "accumulation", "total", "outcome", "seeds as published")
    return plain("Gated against direct accumulation", head, rows)


def shaping(found: Sequence[Body]) -> Grid:
    rows = []
    for each in found:
        low, high = each["added"]
        cells = [
            f"{f['length']:.2f}, {cosine(f, surely=f['length'] < 0)}, {f['episodes']:.1f}"
            for f in each["figures"].values()
        ]
        span = number(low, 2) if low == high else f"{number(low, 2)} to {number(high, 2)}"
        rows.append((each["process"], SHAPES[each["shape"]], span, number(each["best"], 2), *cells))
    head = ("process", "potential", "added to an episode", "return of the best policy", *found[0]["figures"])
    return plain("Potential-based shaping", head, rows)


def only(grid: Grid, names: Sequence[str]) -> Grid:
    """The rows of those names."""
    return replace(grid, rows=tuple(row for row in grid.rows if row[0] in names))
