"""Learning curves as PNG, with faint steps, bold four-step means, marked held-out evaluations, and bands over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from math import isfinite
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

F64 = NDArray[np.float64]
Rows = Sequence[Mapping[str, Any]]
"""The rows that one run logged, as mappings with `step` and slash-separated metric names."""
Runs = Mapping[str, Sequence[Rows]]
"""The rows of each seed, by label (an algorithm, a recipe)."""
Theme = Literal["light", "dark"]

HELD_OUT = "eval/"
"""Prefix of metrics on held-out tasks. The suffixes `_low` and `_high` mark the ends of the interval."""
BLOCK = 4

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito, colour-blind safe
_DARK_COLOURS = ("#56B4E9", "#E69F00", "#2BC79A", "#E39BC4", "#F0784A", "#F0E442")
INK: Mapping[Theme, Mapping[str, str]] = {
    "light": {"paper": "#ffffff", "text": "#1f2328", "faint": "#656d76", "grid": "#e4e7eb"},
    "dark": {"paper": "#171a21", "text": "#e6e8eb", "faint": "#9aa3ad", "grid": "#2c323b"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One metric of a panel. The first of `names` that a run has is drawn.

    A name that ends in a slash stands for the first metric with that prefix.
    """

    names: tuple[str, ...]
    label: str = ""
    dashed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One subplot. If `share`, the values are shares, so the axis starts at 0."""

    title: str
    lines: tuple[Line, ...]
    share: bool = False


def _panel(title: str, *names: str, share: bool = False) -> Panel:
    return Panel(title=title, lines=(Line(names=names),), share=share)


PANELS: tuple[Panel, ...] = (
    _panel("Total reward", "reward/total"),
    _panel("Outcome reward", "reward/outcome"),
    Panel(
        title="Step rewards",
        lines=(
            Line(names=("reward/step_granted",), label="granted"),
            Line(names=("reward/step_withheld",), label="withheld", dashed=True),
        ),
    ),
    _panel("Gates open", "gate/", share=True),
    _panel("Turns per episode", "turns"),
    _panel("Seconds per step", "seconds/step"),
)


def series(rows: Rows, *names: str) -> tuple[F64, F64]:
    """Return (steps, values), each f64[n], of the first of `names` that a row has.

    If a step has several values, the last one counts. Values that are missing or not finite are left out.
    """
    name = next((key for name in names for row in rows for key in row if _is(key, name)), None)
    found: dict[int, float] = {}
    for row in rows:
        value = row.get(name) if name else None
        if value is not None and isfinite(float(value)):
            found[int(row["step"])] = float(value)
    steps = sorted(found)
    return np.array(steps, dtype=np.float64), np.array([found[step] for step in steps], dtype=np.float64)


def block_means(steps: F64, values: F64, size: int = BLOCK) -> tuple[F64, F64]:
    """Return (mean steps, mean values) of the blocks of steps 1..size, size+1..2 size and so on."""
    blocks = (steps - 1) // size
    edges = np.unique(blocks)
    return (
        np.array([steps[blocks == block].mean() for block in edges], dtype=np.float64),
        np.array([values[blocks == block].mean() for block in edges], dtype=np.float64),
    )


def one_run(rows: Rows, label: str = "run") -> Runs:
    """Return a single run in the form that `curves` accepts."""
    return {label: (rows,)}


def curves(runs: Runs, *, theme: Theme = "light", dpi: int = 144) -> bytes:
    """Return the figure of `draw` as a PNG file."""
    out = BytesIO()
    draw(runs, theme=theme).savefig(out, format="png", dpi=dpi)
    return out.getvalue()


def draw(runs: Runs, *, panels: Sequence[Panel] | None = None, theme: Theme = "light", columns: int = 3) -> Figure:
    """Return a figure with a panel for each metric that any run has, coloured by run.

    `panels` defaults to the runs' rates and `PANELS`. Dots are steps and lines are means over four steps; with several
    seeds the line is their mean and the band spans the lowest to the highest. Diamonds are held-out evaluations with
    their intervals, or, with several seeds, the seeds' mean with a bar from the lowest to the highest.
    """
    panels = (*_rates(runs), *PANELS) if panels is None else panels
    panels = [panel for panel in panels if any(_has(rows, panel) for seeds in runs.values() for rows in seeds)]
    ink = INK[theme]
    height = max(1, -(-len(panels) // columns))
    figure = Figure(figsize=(3.4 * columns, 2.35 * height + 0.5), facecolor=ink["paper"], layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)  # type: ignore[union-attr, call-arg]
    last_step = (
        max((float(row["step"]) for seeds in runs.values() for rows in seeds for row in rows), default=1.0) or 1.0
    )
    axes = figure.subplots(height, columns, squeeze=False).ravel()
    for spare in axes[len(panels) :]:
        spare.set_visible(False)
    for place, (panel, ax) in enumerate(zip(panels, axes, strict=False)):
        _style(ax, panel, ink, last=place + columns >= len(panels))
        for index, (colour, seeds) in enumerate(zip(_palette(theme, len(runs)), runs.values(), strict=True)):
            for line in panel.lines:
                _draw(ax, seeds, line, colour, shift=(index - (len(runs) - 1) / 2) * last_step / 60)
        ax.set_xlim(-0.03 * last_step, 1.03 * last_step)
        if panel.share:
            top = max(0.25, np.ceil(4 * (ax.dataLim.y1 - 1e-9)) / 4) if isfinite(ax.dataLim.y1) else 1.0
            ax.set_ylim(-0.03 * top, 1.03 * top)
        if len(panel.lines) > 1:
            handles = [
                Line2D([], [], color=ink["faint"], ls="--" if line.dashed else "-", label=line.label)
                for line in panel.lines
            ]
            ax.legend(handles=handles, frameon=False, fontsize=8, labelcolor=ink["text"])
    if panels:
        _legend(figure, runs, theme)
    return figure


def _rates(runs: Runs) -> list[Panel]:
    names = dict.fromkeys(key for seeds in runs.values() for rows in seeds for row in rows for key in row)
    return [_panel(name[5:].capitalize(), name, share=True) for name in names if name.startswith("rate/")]


def _has(rows: Rows, panel: Panel) -> bool:
    return any(_is(key, name) for line in panel.lines for name in line.names for row in rows for key in row)


def _is(key: str, name: str) -> bool:
    return key.startswith(name) if name.endswith("/") else key == name


def _palette(theme: Theme, count: int) -> list[str]:
    base = COLOURS if theme == "light" else _DARK_COLOURS
    return [base[place % len(base)] for place in range(count)]


def style(ax: Axes, title: str, ink: Mapping[str, str]) -> None:
    """Apply the style that all figures share to a subplot."""
    ax.set_facecolor(ink["paper"])
    ax.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=ink["text"])
    ax.grid(axis="y", color=ink["grid"], linewidth=0.8)
    ax.set_axisbelow(True)
    for side, spine in ax.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(ink["grid"])
    ax.tick_params(colors=ink["faint"], labelsize=8.5, length=0)


def _style(ax: Axes, panel: Panel, ink: Mapping[str, str], *, last: bool) -> None:
    style(ax, panel.title, ink)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    ax.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    if last:
        ax.set_xlabel("step", fontsize=8, color=ink["faint"])


def _draw(ax: Axes, seeds: Sequence[Rows], line: Line, colour: str, shift: float) -> None:
    """Draw one metric of one run, with every seed's steps, the mean of their blocks, and held-out evaluations."""
    style = "--" if line.dashed else "-"
    blocks: dict[float, list[float]] = {}
    for rows in seeds:
        steps, values = series(rows, *line.names)
        ax.plot(steps, values, ".", color=colour, alpha=0.35, markersize=5, markeredgewidth=0)
        for step, value in zip(*block_means(steps, values), strict=True):
            blocks.setdefault(step, []).append(value)
    at = sorted(blocks)
    ax.plot(at, [np.mean(blocks[step]) for step in at], style, color=colour, linewidth=2)
    if len(seeds) > 1:
        low, high = ([extreme(blocks[step]) for step in at] for extreme in (min, max))
        ax.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
    for name in line.names:
        _held_out(ax, seeds, name, colour, shift)


def _held_out(ax: Axes, seeds: Sequence[Rows], name: str, colour: str, shift: float) -> None:
    found: dict[str, dict[float, list[float]]] = {"": {}, "_low": {}, "_high": {}}
    for rows in seeds:
        for end, by_step in found.items():
            for step, value in zip(*series(rows, f"{HELD_OUT}{name}{end}"), strict=True):
                by_step.setdefault(step, []).append(value)
    for step, values in found[""].items():
        alone = len(seeds) == 1 and step in found["_low"] and step in found["_high"]
        low, high = (found["_low"][step][0], found["_high"][step][0]) if alone else (min(values), max(values))
        at = step + shift
        ax.plot([at, at], [low, high], "-", color=colour, linewidth=1.4, zorder=4)
        ax.plot(at, np.mean(values), "D", color=colour, markersize=6.5, markeredgecolor=ax.get_facecolor(), zorder=5)


def _legend(figure: Figure, runs: Runs, theme: Theme) -> None:
    ink, colours = INK[theme], _palette(theme, len(runs))
    key = ink["faint"] if len(runs) > 1 else colours[0]
    handles = [
        Line2D([], [], color=colour, linewidth=3, label=f"{label} ({len(seeds)} seeds)" if len(seeds) > 1 else label)
        for colour, (label, seeds) in zip(colours, runs.items(), strict=True)
        if len(runs) > 1 or len(seeds) > 1
    ]
    handles += [
        Line2D([], [], color=key, alpha=0.4, ls="", marker=".", label="training, one step"),
        Line2D([], [], color=key, linewidth=2, label=f"mean of {BLOCK} steps"),
    ]
    bar = "lowest to highest seed" if any(len(seeds) > 1 for seeds in runs.values()) else "95 % interval"
    if any(name.startswith(HELD_OUT) for seeds in runs.values() for rows in seeds for row in rows for name in row):
        handles.append(Line2D([], [], color=key, ls="", marker="D", markersize=5, label=f"held out, {bar}"))
    figure.legend(
        handles=handles,
        loc="outside upper left",
        ncols=len(handles),
        frameon=False,
        fontsize=8.5,
        labelcolor=ink["text"],
    )
