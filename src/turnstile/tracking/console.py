"""A run in the terminal: one line per step, and below the lines a screen that shows what is running.

If the output is not a terminal (a log file, CI), progress is printed as plain lines instead of a screen.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from pydantic import NonNegativeFloat
from rich.text import Text

from turnstile.tracking.base import Scalars
from turnstile.tracking.board import StatusBoard
from turnstile.tracking.pace import Phase, duration, format_time_left
from turnstile.tracking.screen import Screen, SharedConsole

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("reward/total", "reward", "+.3f"),
    ("reward/outcome", "outcome", "+.3f"),
    ("turns", "turns", ".1f"),
    ("tokens/per_second", "tok/s", ".0f"),
)
"""(metric, its label in a step's line, format); the line omits metrics that the step did not log."""
SHORT = 5  # characters of a rate's name in a step's line

STYLES = {"info": "", "warning": "yellow", "alarm": "bold red"}


class ConsoleTracker:
    """Prints to standard output, or to `file`. With `plain` None, output is plain unless it goes to a terminal.

    `columns` adds metrics to a step's line, by name. In plain mode a running phase prints a line at most every `every`
    seconds; otherwise a screen below the lines shows running phases and the status of the episodes on `board`.
    """

    def __init__(
        self,
        run: Path | None = None,
        *,
        columns: Sequence[str] = (),
        every: NonNegativeFloat = 10.0,
        plain: bool | None = None,
        file: TextIO | None = None,
        board: StatusBoard | None = None,
    ) -> None:
        self._console = SharedConsole(file, highlight=False, soft_wrap=True)
        self._columns = (*COLUMNS, *((name, name, ".4g") for name in columns))
        self._every = every
        able = self._console.file.isatty() and self._console.is_interactive  # rich alone would obey FORCE_COLOR
        self._phases: dict[str, Phase] = {}
        self._screen: Screen | None = None
        if able if plain is None else not plain:
            self._screen = Screen(self._console, board or StatusBoard(), str(run or ""), redirect=file is None)

    def log(self, step: int, metrics: Scalars) -> None:
        if self._screen is not None:
            self._screen.log(step, metrics)
        self._console.print(Text(step_line(step, metrics, self._columns)))

    def say(self, line: str, *, level: str = "info") -> None:
        text = line if level == "info" else f"{level}: {line}"
        self._console.print(Text(text, style=STYLES.get(level, "")))

    def progress(self, label: str, done: int, total: int) -> None:
        now = time.monotonic()
        phase = self._phases.get(label)
        if phase is None:
            phase = self._phases[label] = Phase(began=now, done_at_start=done, printed_at=now)
        phase.done, phase.total, phase.updated_at = done, total, now
        if done >= total:
            self._end(label, phase)
        elif self._screen is None and now - phase.printed_at >= self._every:
            phase.printed_at = now
            self.say(f"{label}: {done}/{total}, {format_time_left(phase.seconds_left(now))}")
        if self._screen is not None:
            self._screen.show(self._phases)
            if self._phases:
                self._screen.start()
            else:
                self._screen.stop()

    def resume_at(self, step: int) -> None:
        """Do nothing: printed lines stay."""

    def sync(self) -> None:
        """Do nothing: the console has no file."""

    def close(self) -> None:
        if self._screen is not None:
            self._screen.stop()

    def _end(self, label: str, phase: Phase) -> None:
        del self._phases[label]
        seconds = phase.updated_at - phase.began
        if seconds >= 3 * self._every:  # reporting short phases would drown the steps' lines
            self.say(f"{label}: {phase.total} done in {duration(seconds)}")


def step_line(step: int, metrics: Scalars, columns: Sequence[tuple[str, str, str]] = COLUMNS) -> str:
    """Return the line of one step.

    It contains the rates (`rate/*`, with shortened names), the metrics of `columns`, the share of open gates by reward
    term (`gate/*`), and the seconds of each phase (`seconds/*`).
    """
    parts = [f"step {step:>3}"]
    parts += [f"{name[:SHORT]} {value:.2f}" for name, value in _metrics_under("rate/", metrics).items()]
    for name, label, form in columns:
        value = metrics.get(name)
        if isinstance(value, int | float):
            parts.append(f"{label} {float(value):{form}}")
    parts += [f"gate {name} {value:.2f}" for name, value in _metrics_under("gate/", metrics).items()]
    parts += _phase_seconds(metrics)
    return "  ".join(parts)


def _metrics_under(prefix: str, metrics: Scalars) -> dict[str, float]:
    return {
        name.removeprefix(prefix): float(value)
        for name, value in metrics.items()
        if name.startswith(prefix) and isinstance(value, int | float)
    }


def _phase_seconds(metrics: Scalars) -> list[str]:
    spent = _metrics_under("seconds/", metrics)
    whole = spent.pop("step", sum(spent.values()))
    phases = ", ".join(f"{name} {value:.1f}" for name, value in spent.items())
    return [f"{whole:.0f} s" + (f" ({phases})" if phases else "")] if whole or phases else []
