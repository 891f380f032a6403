"""A run in the terminal: one line a step, and below it what is under way and how long it will take.

Where the output is no terminal (a log file, CI) the same comes as plain lines.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
)
from rich.text import Text

from turnstile.tracking.base import Scalars

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("rate/completion", "compl", ".2f"),
    ("rate/modification", "modif", ".2f"),
    ("rate/resolution", "resol", ".2f"),
    ("reward/total", "reward", "+.3f"),
    ("reward/outcome", "outcome", "+.3f"),
    ("turns", "turns", ".1f"),
    ("tokens/per_second", "tok/s", ".0f"),
)
"""(metric, how a step's line calls it, format); metrics that a step did not log are left out of its line."""

NO_BAR = TaskID(-1)
STYLES = {"info": "", "warning": "yellow", "alarm": "bold red"}


class ConsoleTracker:
    """Prints to standard output, or to `file`. `plain=None` means: plain unless it is a terminal.

    `columns` adds metrics to a step's line, by name. In plain mode a phase under way prints a line at most
    every `every` seconds.
    """

    def __init__(
        self,
        run: Path | None = None,
        *,
        columns: Sequence[str] = (),
        every: float = 10.0,
        plain: bool | None = None,
        file: TextIO | None = None,
    ) -> None:
        self._console = Console(file=file or sys.stdout, highlight=False, soft_wrap=True)
        self._columns = (*COLUMNS, *((name, name, ".4g") for name in columns))
        self._every = every
        self._plain = not self._console.is_terminal if plain is None else plain
        self._phases: dict[str, _Phase] = {}
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            _Left(),
            console=self._console,
            transient=True,
        )

    def log(self, step: int, metrics: Scalars) -> None:
        self._console.print(Text(step_line(step, metrics, self._columns)))

    def say(self, line: str, *, level: str = "info") -> None:
        text = line if level == "info" else f"{level}: {line}"
        self._console.print(Text(text, style=STYLES.get(level, "")))

    def progress(self, label: str, done: int, total: int) -> None:
        now = time.monotonic()
        phase = self._phases.get(label)
        if phase is None:
            phase = self._phases[label] = _Phase(began=now, begun_with=done, said=now)
            if not self._plain:
                self._bars.start()
                phase.bar = self._bars.add_task(label, total=total, phase=phase)
        phase.done, phase.total, phase.seen = done, total, now
        if done >= total:
            self._end(label, phase)
        elif not self._plain:
            self._bars.update(phase.bar, completed=done, total=total)
        elif now - phase.said >= self._every:
            phase.said = now
            self.say(f"{label}: {done}/{total}, {left_text(phase.left(now))}")

    def resume_at(self, step: int) -> None:
        """Nothing to drop: what was printed was printed."""

    def sync(self) -> None:
        """Nothing to bring to the disk."""

    def close(self) -> None:
        if not self._plain:
            self._bars.stop()

    def _end(self, label: str, phase: _Phase) -> None:
        del self._phases[label]
        if not self._plain:
            self._bars.remove_task(phase.bar)
            if not self._phases:
                self._bars.stop()
        seconds = phase.seen - phase.began
        if seconds >= 3 * self._every:  # short phases come with every step and would drown its line
            self.say(f"{label}: {phase.total} done in {duration(seconds)}")


@dataclass(kw_only=True, slots=True)
class _Phase:
    """A long phase under way; times are of the monotonic clock, in seconds."""

    began: float
    begun_with: int
    said: float
    bar: TaskID = NO_BAR
    done: int = 0
    total: int = 0
    seen: float = 0.0  # when `done` was last reported

    def left(self, now: float) -> float | None:
        """Seconds to go at the pace so far; None before there is a pace."""
        paced = self.done - self.begun_with
        if paced <= 0:
            return None
        ahead = (self.seen - self.began) / paced * (self.total - self.done)
        return max(0.0, ahead - (now - self.seen))


class _Left(ProgressColumn):
    def render(self, task: Task) -> Text:
        phase: _Phase = task.fields["phase"]
        return Text(left_text(phase.left(time.monotonic())), style="cyan")


def step_line(step: int, metrics: Scalars, columns: Sequence[tuple[str, str, str]] = COLUMNS) -> str:
    """One step in one line: the chosen metrics, the share of open gates by reward term (`gate/*`), then the
    seconds of each phase (`seconds/*`)."""
    parts = [f"step {step:>3}"]
    for name, label, form in columns:
        value = metrics.get(name)
        if isinstance(value, int | float):
            parts.append(f"{label} {float(value):{form}}")
    parts += [f"gate {name} {value:.2f}" for name, value in _under("gate/", metrics).items()]
    parts += _seconds(metrics)
    return "  ".join(parts)


def _under(prefix: str, metrics: Scalars) -> dict[str, float]:
    return {
        name.removeprefix(prefix): float(value)
        for name, value in metrics.items()
        if name.startswith(prefix) and isinstance(value, int | float)
    }


def _seconds(metrics: Scalars) -> list[str]:
    spent = _under("seconds/", metrics)
    whole = spent.pop("step", sum(spent.values()))
    phases = ", ".join(f"{name} {value:.1f}" for name, value in spent.items())
    return [f"{whole:.0f} s" + (f" ({phases})" if phases else "")] if whole or phases else []


def left_text(seconds: float | None) -> str:
    return "time left unknown yet" if seconds is None else f"{duration(seconds)} left"


def duration(seconds: float) -> str:
    """Seconds as a person says them: 42 s, 3:05 min, 2:07 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}:{rest:02} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02} h"
