"""The screen at the bottom of the terminal during a run: episode statuses, speed, and the last steps' results.

Printed lines appear above it and stay. The terminal is left in a usable state even if the process is killed: the cursor
stays visible, and no alternate screen is used.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from turnstile.tracking.base import Scalars
from turnstile.tracking.board import StatusBoard
from turnstile.tracking.pace import Phase, duration, format_time_left

TRAINING = "training"
"""The label of the phase that spans all steps of a run."""
REFRESH_RATE = 2  # redraws per second
WINDOW = 60.0  # seconds over which the speed is measured
SMALL_HEIGHT = 20  # lines; a smaller terminal may not have room for the whole screen
RECENT_STEPS = 6  # number of steps shown
OUTCOME = "reward/outcome"
SHARES = ("generate", "environment", "train", "other")


class Terminal:
    """A terminal as a text file whose writes are always complete.

    Python's own text files lose part of a write to a terminal when a signal (Ctrl-C, for example) arrives during the
    write.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.encoding = file.encoding

    def write(self, text: str) -> int:
        self._file.flush()  # write out text that is buffered in the file first
        left = memoryview(text.encode(self.encoding, "replace"))
        while left:
            left = left[os.write(self._file.fileno(), left) :]
        return len(text)

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def isatty(self) -> bool:
        return True


class SharedConsole(Console):
    """A console that only one thread uses at a time, so that the screen and printed lines never interleave."""

    def __init__(self, file: TextIO | None, **knobs: Any) -> None:
        self._lock = threading.RLock()
        if file is None and sys.stdout.isatty():
            file = cast("TextIO", Terminal(sys.stdout))
        super().__init__(file=file, **knobs)

    def __enter__(self) -> Self:
        self._lock.acquire()
        super().__enter__()
        return self

    def __exit__(self, *what: Any) -> None:
        try:
            super().__exit__(*what)
        finally:
            self._lock.release()


class Screen:
    """Draws the run's state in a thread between `start` and `stop`. Updating that state costs almost nothing."""

    def __init__(self, console: SharedConsole, board: StatusBoard, title: str, *, redirect: bool) -> None:
        """Prepare the screen.

        With `redirect`, output to standard output (and to standard error if that is a terminal) is printed above the
        screen.
        """
        self._board = board
        self._title = title
        self._phases: Mapping[str, Phase] = {}
        self._steps: deque[tuple[int, dict[str, float]]] = deque(maxlen=RECENT_STEPS)
        self._token_samples: deque[tuple[float, int]] = deque()  # (time, tokens so far)
        self._changed = time.monotonic()
        self._console = console
        self._live = Live(
            console=console,
            get_renderable=self.draw,
            auto_refresh=False,  # rich's own thread does not take the console's lock
            transient=True,
            redirect_stdout=redirect,
            redirect_stderr=redirect and sys.stderr.isatty(),
            vertical_overflow="crop",
        )
        self._ended = threading.Event()
        self._drawing: threading.Thread | None = None

    @property
    def is_on(self) -> bool:
        """Whether the screen is being drawn."""
        return self._live.is_started

    def start(self) -> None:
        """Start drawing, unless the screen is already being drawn."""
        if not self.is_on:
            with self._console:
                self._live.start(refresh=True)
                self._console.show_cursor(True)
            self._ended.clear()
            self._drawing = threading.Thread(target=self._redraw, name="screen", daemon=True)
            self._drawing.start()

    def stop(self) -> None:
        """Stop drawing and clear the screen."""
        if self._drawing is not None:
            self._ended.set()
            self._drawing.join()
            self._drawing = None
            for stream in (sys.stdout, sys.stderr):
                stream.flush()  # write an unfinished line that the redirection held back
            with self._console:
                self._live.stop()

    def _redraw(self) -> None:
        while not self._ended.wait(1.0 / REFRESH_RATE):
            with self._console:
                self._live.refresh()

    def show(self, phases: Mapping[str, Phase]) -> None:
        """Set the running phases."""
        self._phases = dict(phases)
        self._changed = time.monotonic()

    def log(self, step: int, metrics: Scalars) -> None:
        """Add a step's metrics."""
        self._steps.append((step, {name: float(v) for name, v in metrics.items() if isinstance(v, int | float)}))

    def draw(self) -> RenderableType:
        """Return the screen's contents."""
        now = time.monotonic()
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold", ratio=1)
        grid.expand = True
        for name, shown in self._rows(now):
            grid.add_row(Text(name), shown)
        height = self._console.height
        panel = Panel(
            grid,
            title=Text(self._title_line(now)),
            title_align="left",
            border_style="dim",
            height=height - 1 if height < SMALL_HEIGHT else None,
        )
        return Group(panel, Text(""))  # puts the shell's prompt on its own line after a kill

    def _title_line(self, now: float) -> str:
        training = self._phases.get(TRAINING)
        if training is None:
            return self._title
        left = format_time_left(training.seconds_left(now))
        return f"{self._title}, step {training.done} of {training.total} done, {left}"

    def _rows(self, now: float) -> Iterable[tuple[str, RenderableType]]:
        yield "now", self._now(now)
        counts = self._board.counts()
        yield "episodes", Text(", ".join(f"{count} {place.value}" for place, count in counts.items()))
        yield "tokens/s", Text(self._speed(now))
        failures = ", ".join(f"{kind} {count}" for kind, count in list(self._board.failures.items()))
        yield "failures", Text(failures or "none", style="yellow" if failures else "")
        steps = list(self._steps)
        if steps:
            yield from _step_rows(steps)

    def _now(self, now: float) -> RenderableType:
        under_way = [(label, phase) for label, phase in self._phases.items() if label != TRAINING]
        if under_way:
            label, phase = under_way[-1]
            line = Table.grid(padding=(0, 2))
            line.add_column(no_wrap=True)
            bar = ProgressBar(total=max(1, phase.total), completed=phase.done, width=20)
            line.add_row(
                Text(f"{label} {phase.done}/{phase.total}"), bar, Text(format_time_left(phase.seconds_left(now)))
            )
            return line
        training = self._phases.get(TRAINING)
        if training is None:
            return Text("")
        return Text(f"step {training.done + 1}, computing for {duration(now - self._changed)}")

    def _speed(self, now: float) -> str:
        """Return the tokens sampled per second over the last `WINDOW` seconds, as a phrase."""
        self._token_samples.append((now, self._board.tokens))
        while len(self._token_samples) > 2 and self._token_samples[1][0] <= now - WINDOW:
            self._token_samples.popleft()
        (began, before), (_, tokens) = self._token_samples[0], self._token_samples[-1]
        return f"{(tokens - before) / max(now - began, 1.0 / REFRESH_RATE):.0f} in the last {duration(now - began)}"


def _step_rows(steps: Sequence[tuple[int, dict[str, float]]]) -> Iterable[tuple[str, RenderableType]]:
    """Yield the screen's rows about the last steps."""
    _, last = steps[-1]
    yield (
        "time",
        Text(", ".join(f"{name} {100 * share:.0f} %" for name, share in time_shares([m for _, m in steps]).items())),
    )
    if "staleness/mean" in last:
        yield (
            "staleness",
            Text(f"{last['staleness/mean']:.2f} versions in the mean, {last['staleness/max']:.0f} at most"),
        )
    gates = {name.removeprefix("gate/"): value for name, value in last.items() if name.startswith("gate/")}
    if gates:
        yield "gates open", Text(", ".join(f"{name} {100 * value:.0f} %" for name, value in gates.items()))
    yield "steps", Text("".join(f"{step:>7}" for step, _ in steps))
    logged = dict.fromkeys(name for _, metrics in steps for name in metrics)
    for name in [*(name for name in logged if name.startswith("rate/")), OUTCOME]:
        if name in logged:
            yield (
                name.rpartition("/")[2],
                Text("".join(f"{m[name]:7.2f}" if name in m else f"{'-':>7}" for _, m in steps)),
            )


def time_shares(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the shares of the steps' time for sampling, waiting for environments, the update, and everything else.

    Waiting counts only while nothing is sampled. If another process plays, sampling continues during the update, and
    the shares add up to more than 1.
    """
    totals = {name: sum(metrics.get(f"seconds/{name}", 0.0) for metrics in steps) for name in _PARTS}
    whole = max(totals["step"], 1e-9)
    parts = (
        totals["generate"],
        max(0.0, totals["rollout"] - totals["generate"]),
        totals["update"],
        max(0.0, totals["step"] - totals["rollout"] - totals["update"]),
    )
    return {name: seconds / whole for name, seconds in zip(SHARES, parts, strict=True)}


_PARTS = ("step", "rollout", "generate", "update")
