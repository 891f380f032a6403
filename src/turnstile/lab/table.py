"""Tables of the lab's figures: overviews of all processes, and the details of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from turnstile.lab.curves import Race
from turnstile.lab.judge import EPISODES, Figures
from turnstile.lab.study import Line

Show = Callable[[Figures], str]
ShowAll = Callable[[Sequence[Figures]], str]
NOTHING = "-"
OUTCOME = 0.99
"""An estimator follows the outcome alone if its cosine to the outcome's gradient exceeds this, ..."""
APART = 0.005
"""... and exceeds its cosine to the gradient of the total by this."""


def number(value: float, digits: int = 3) -> str:
    """Return a number with `digits` decimals, such as 0.974 or -0.300; a dash for NaN, and "inf" for infinity."""
    if math.isnan(value):
        return NOTHING
    return "inf" if math.isinf(value) else f"{value:.{digits}f}"


def direction(found: Sequence[Figures]) -> str:
    """Return the mean cosine over policies followed by its `mark`, or "none" if no policy has a gradient."""
    heard = [figures for figures in found if not math.isnan(figures.cosine)]
    if not heard:
        return "none"
    return number(fmean(figures.cosine for figures in heard)) + mark(heard)


def mark(found: Sequence[Figures]) -> str:
    """Return "!" if a direction is significantly biased, "o" if it is then that of the outcome alone, otherwise ""."""
    heard = [figures for figures in found if not math.isnan(figures.cosine)]
    if not any(figures.biased for figures in heard):
        return ""
    cosine, outcome = (fmean(getattr(f, name) for f in heard) for name in ("cosine", "cosine_outcome"))
    return "o" if outcome > max(OUTCOME, cosine + APART) else "!"


def advance(found: Sequence[Figures]) -> str:
    """Return the mean progress over policies as text."""
    return number(fmean(figures.aligned for figures in found))


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """A table with one row per estimator, a title and an explanatory note."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str


DIRECTION_NOTE = (
    "Each cell gives the cosine between the mean gradient and the exact one. ! marks a significantly biased "
    "direction (4 standard deviations), and o an estimator that uses the outcome alone, whose gradient has another "
    "direction. none means that the gradient is zero. breaks lists the invariants that do not hold."
)
PROGRESS_NOTE = (
    f"Each cell gives the progress of one step of {EPISODES} episodes. 1 is the progress of the exact gradient, and "
    "0 is no progress. Both bias and noise reduce it."
)


def overview(lines: Sequence[Line], title: str, show: ShowAll, note: str) -> Grid:
    """Return a table of estimators (rows) by process (columns); `show` formats all figures of a cell."""
    processes = tuple(dict.fromkeys(line.column for line in lines))
    found: dict[tuple[str, str], list[Figures]] = {}
    for line in lines:
        if line.figures is not None:
            found.setdefault((line.estimator, line.column), []).append(line.figures)
    rows = [
        (name, *(show(found[name, at]) if (name, at) in found else NOTHING for at in processes))
        for name in dict.fromkeys(line.estimator for line in lines)
    ]
    return Grid(title=title, columns=("estimator", *processes), rows=tuple(rows), note=note)


def directions(lines: Sequence[Line]) -> Grid:
    """Return the table of cosines, with a last column for the invariants that each estimator breaks."""
    grid = overview(lines, "Direction", direction, DIRECTION_NOTE)
    broken = {line.estimator: " ".join(map(str, line.broken)) or NOTHING for line in lines}
    return replace(grid, columns=(*grid.columns, "breaks"), rows=tuple((*row, broken[row[0]]) for row in grid.rows))


def progress(lines: Sequence[Line]) -> Grid:
    """Return the table of the progress of one step of each estimator, relative to a step along the exact gradient."""
    return overview(lines, "Progress", advance, PROGRESS_NOTE)


LEARNING_NOTE = (
    "Each cell gives the area under the learning curve divided by that of the exact gradient, with a 95 % interval "
    "over seeds. 1 means that training is as fast as with the exact gradient. Each estimator uses the best of the "
    "learning rates tried."
)


def learning(races: Sequence[Race]) -> Grid:
    """Return a table of areas relative to the exact gradient's, by estimator (rows) and process (columns)."""

    def cell(race: Race) -> str:
        low, high = race.interval
        return NOTHING if race.refused else f"{race.share:.2f} [{low:.2f}, {high:.2f}]"

    processes = tuple(dict.fromkeys(race.process for race in races))
    cells = {(race.estimator, race.process): cell(race) for race in races}
    rows = [
        (name, *(cells.get((name, process), NOTHING) for process in processes))
        for name in dict.fromkeys(race.estimator for race in races)
    ]
    return Grid(title="Learning", columns=("estimator", *processes), rows=tuple(rows), note=LEARNING_NOTE)


DETAILS: dict[str, Show] = {
    "length": lambda f: (
        number(f.length) if f.exact or f.length_se < 5e-4 else f"{f.length:.3f}±{1.96 * f.length_se:.3f}"
    ),
    "cosine": lambda f: direction([f]),
    "95 %": lambda f: "listed" if f.exact else f"{number(f.cosine_low)} {number(f.cosine_high)}",
    "bias": lambda f: number(f.bias),
    "scaled": lambda f: number(f.bias_scaled),
    "z": lambda f: number(min(f.z, 99.0), 1),
    "z dir": lambda f: number(min(f.z_direction, 99.0), 1),
    "episodes": lambda f: number(f.episodes, 1),
    "progress": lambda f: number(f.aligned),
    "outcome": lambda f: number(f.cosine_outcome),
}
DETAILS_NOTE = (
    "length: the length of the mean gradient along the exact one. bias: |mean - exact| as a fraction of |exact|. "
    "scaled: the same after the best rescaling of the mean. z: the number of standard deviations between mean and "
    "exact, and between their directions. episodes: the number of episodes with which the noise is as large as the "
    "gradient. outcome: the cosine to the gradient of the outcome alone. breaks: the invariants that do not hold."
)


def details(lines: Sequence[Line], process: str) -> Grid:
    """Return the table of all figures on one process, for the smallest seed of `lines` only."""
    rows = []
    first = min((line.seed for line in lines), default=0)
    for line in lines:
        if line.column == process and line.seed == first:
            shown = [show(line.figures) for show in DETAILS.values()] if line.figures else [NOTHING] * len(DETAILS)
            rows.append((line.estimator, *shown, " ".join(map(str, line.broken)) or NOTHING))
    return Grid(title=process, columns=("estimator", *DETAILS, "breaks"), rows=tuple(rows), note=DETAILS_NOTE)


def to_rich(grid: Grid) -> RichTable:
    """Return the grid as a table for the terminal; cells that end in `!` are bold."""
    shown = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=grid.title, title_justify="left")
    for place, name in enumerate(grid.columns):
        shown.add_column(name, justify="right" if place else "left", no_wrap=place > 0)
    for row in grid.rows:
        shown.add_row(*(Text(cell, style="bold" if cell.endswith("!") else "") for cell in row))
    return shown


def to_markdown(grid: Grid) -> str:
    """Return the grid as a Markdown table, without its title and note."""
    lines = [
        f"| {' | '.join(grid.columns)} |",
        "|---" + "|---:" * (len(grid.columns) - 1) + "|",
        *(f"| {' | '.join(row)} |" for row in grid.rows),
    ]
    return "\n".join(lines)
