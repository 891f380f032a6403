from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from turnstile.evaluation.plots import block_means, curves, draw, one_run, series

Row = dict[str, Any]


def rows(steps: int = 10, rise: float = 0.05) -> list[Row]:
    logged = [
        {"step": s, "rate/resolution": rise * s, "reward/total": -0.5 + rise * s, "reward/step_granted": 0.1}
        for s in range(1, steps + 1)
    ]
    return [
        *logged,
        {"step": 0, "eval/rate/resolution": 0.1, "eval/rate/resolution_low": 0.05, "eval/rate/resolution_high": 0.2},
    ]


def panel(figure: Figure, title: str) -> Axes:
    return next(ax for ax in figure.axes if ax.get_title(loc="left") == title)


def test_series_keeps_the_last_value_of_a_step_and_drops_missing_ones() -> None:
    logged = [
        {"step": 2, "a": 1.0},
        {"step": 1, "a": 5},
        {"step": 2, "a": 3.0},
        {"step": 3, "a": math.nan},
        {"step": 4, "a": None},
        {"step": 5, "b": 9.0},
        {"step": 6, "a": math.inf},
    ]
    steps, values = series(logged, "a", "b")
    assert (steps.tolist(), values.tolist()) == ([1, 2], [5, 3])
    assert series(logged, "missing", "b")[1].tolist() == [9]
    assert series(logged, "missing")[0].size == 0
    assert series([{"step": 1, "gate/tests": 0.5}], "gate/")[1].tolist() == [0.5]
    assert series([{"step": 1, "gate/tests": 0.5}], "gate")[1].tolist() == []


def test_block_means_by_hand() -> None:
    steps = np.array([1, 2, 3, 4, 5, 6, 9], dtype=np.float64)
    at, means = block_means(steps, np.array([0, 1, 2, 3, 10, 20, 7], dtype=np.float64))
    assert at.tolist() == [2.5, 5.5, 9]
    assert means.tolist() == [1.5, 15, 7]


def test_a_panel_for_each_metric_that_was_logged() -> None:
    figure = draw(one_run(rows()))
    titles = [ax.get_title(loc="left") for ax in figure.axes if ax.get_visible()]
    assert titles == ["Resolution", "Total reward", "Step rewards"]


def test_steps_block_means_and_held_out_are_drawn() -> None:
    ax = panel(draw(one_run(rows(8))), "Resolution")
    dots, means, bar, diamond = ax.lines
    np.testing.assert_allclose(dots.get_ydata(), 0.05 * np.arange(1, 9))
    np.testing.assert_allclose(means.get_xydata(), [[2.5, 0.125], [6.5, 0.325]])
    np.testing.assert_allclose(bar.get_xydata(), [[0, 0.05], [0, 0.2]])
    np.testing.assert_allclose(diamond.get_xydata(), [[0, 0.1]])


def test_seeds_show_their_mean_and_spread() -> None:
    runs = {"G-RA": [rows(4, rise=0.1), rows(4, rise=0.05)], "D-RA": [rows(4, rise=0.0)]}
    figure = draw(runs)
    ax = panel(figure, "Resolution")
    np.testing.assert_allclose(ax.lines[2].get_xydata(), [[2.5, (0.25 + 0.125) / 2]])
    band = ax.collections[0].get_paths()[0].get_extents()
    assert (band.y0, band.y1) == pytest.approx((0.125, 0.25))
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend[:2] == ["G-RA (2 seeds)", "D-RA"]
    assert legend[-1] == "held out, lowest to highest seed"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_curves_are_a_reproducible_png(theme: Any) -> None:
    data = curves(one_run(rows()), theme=theme, dpi=50)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 2 * height
    assert data == curves(one_run(rows()), theme=theme, dpi=50)
    assert data != curves(one_run(rows(rise=0.01)), theme=theme, dpi=50)


@pytest.mark.parametrize("runs", [{}, one_run([]), one_run([{"step": 0}]), one_run([{"step": 1, "turns": 3.0}])])
def test_curves_are_drawn_of_little_or_no_data(runs: Any) -> None:
    assert curves(runs, dpi=40)[:4] == b"\x89PNG"
