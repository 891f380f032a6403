"""Plots of the lab's figures in the project's style."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from turnstile.evaluation.plots import COLOURS, INK, style
from turnstile.lab.curves import Race
from turnstile.lab.judge import EPISODES
from turnstile.lab.study import Line

_LIGHT = INK["light"]
BIASED, STRAIGHT = COLOURS[1], COLOURS[0]


def to_png(figure: Figure, *, dpi: int = 144) -> bytes:
    """Return the figure as the bytes of a PNG file with `dpi` dots per inch."""
    out = BytesIO()
    figure.savefig(out, format="png", dpi=dpi)
    return out.getvalue()


def panels(titles: Sequence[str], *, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Return a figure, and its subplots in the project's style, one per title."""
    rows = max(1, -(-len(titles) // columns))
    figure = Figure(figsize=(width * columns, height * rows + 0.5), facecolor=_LIGHT["paper"], layout="constrained")
    axes: list[Axes] = list(figure.subplots(rows, columns, squeeze=False).ravel())
    for spare in axes[len(titles) :]:
        spare.set_visible(False)
    for ax, title in zip(axes, titles, strict=False):
        style(ax, title, _LIGHT)
    return figure, axes[: len(titles)]


def draw_study(lines: Sequence[Line]) -> Figure:
    """Plot the progress of each estimator on each process: one dot per policy, orange if the direction is biased."""
    processes = list(dict.fromkeys(line.column for line in lines))
    names = list(dict.fromkeys(line.estimator for line in lines))[::-1]
    figure, axes = panels(processes, columns=4, width=3.2, height=0.8 + 0.17 * len(names))
    for place, (ax, process) in enumerate(zip(axes, processes, strict=True)):
        ax.grid(axis="x", color=_LIGHT["grid"], linewidth=0.8)
        for line in lines:
            if line.column == process and (figures := line.figures) is not None:
                colour = BIASED if figures.biased else STRAIGHT
                ax.plot(figures.aligned, names.index(line.estimator), "o", color=colour, markersize=4, alpha=0.7)
        ax.set_yticks(range(len(names)), names if place % 4 == 0 else [""] * len(names))
        ax.set_ylim(-0.7, len(names) - 0.3)
        ax.axvline(0.0, color=_LIGHT["faint"], linewidth=0.8)
        ax.set_xlabel(f"progress of {EPISODES} episodes", fontsize=8, color=_LIGHT["faint"])
    handles = [
        axes[0].plot([], [], "o", color=colour, label=label)[0]
        for colour, label in ((STRAIGHT, "direction not surely wrong"), (BIASED, "direction surely biased"))
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=2, frameon=False, labelcolor=_LIGHT["text"])
    return figure


def draw_sweeps(sweeps: Mapping[str, Sequence[Line]]) -> Figure:
    """Plot bias after rescaling (top) and the episodes at which noise equals signal (bottom) against each swept knob.

    `size` is the group's size; the other knobs are the process's.
    """
    titles = [f"{what}, by {knob}" for what in ("bias", "episodes") for knob in sweeps]
    figure, axes = panels(titles, columns=len(sweeps), width=3.6, height=2.6)
    for place, ax in enumerate(axes):
        knob = list(sweeps)[place % len(sweeps)]
        names = list(dict.fromkeys(line.estimator for line in sweeps[knob]))
        for index, name in enumerate(names):
            own = [line for line in sweeps[knob] if line.estimator == name and line.figures]
            x = [line.size if knob == "size" else line.knobs[knob] for line in own]
            found = [line.figures for line in own if line.figures]
            y = [f.bias_scaled if place < len(sweeps) else f.episodes for f in found]
            ax.plot(x, y, _marks(index), color=COLOURS[index % len(COLOURS)], markersize=4, label=name)
            ax.set_xticks(x)
        ax.set_ylim(bottom=0.0)
    legend(figure, axes[0])
    return figure


def draw_races(races: Sequence[Race]) -> Figure:
    """Plot the expected reward by step: for each estimator, the mean over seeds at its best learning rate."""
    processes = list(dict.fromkeys(race.process for race in races))
    names = list(dict.fromkeys(race.estimator for race in races))
    figure, axes = panels(processes, columns=4, width=3.2, height=2.4)
    for ax, process in zip(axes, processes, strict=True):
        for index, name in enumerate(names):
            for race in races:
                if (race.estimator, race.process) == (name, process) and race.curve:
                    colour = COLOURS[index % len(COLOURS)]
                    ax.plot(race.curve, _marks(index).strip("os"), color=colour, linewidth=1.6, label=name)
        ax.set_xlabel("step", fontsize=8, color=_LIGHT["faint"])
    legend(figure, axes[0])
    return figure


def _marks(index: int) -> str:
    """Return the marker and line style of a series: solid for as many as there are colours, then dashed."""
    return "o-" if index < len(COLOURS) else "s--"


def legend(figure: Figure, ax: Axes, columns: int = 4) -> None:
    """Add a legend for the lines of `ax` above the figure, in `columns` columns."""
    figure.legend(
        handles=ax.get_lines(), loc="outside upper left", ncols=columns, frameon=False, fontsize=8.5,
        labelcolor=_LIGHT["text"],
    )  # fmt: skip
