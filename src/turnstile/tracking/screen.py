"""The lower end of a terminal while a run goes: where its episodes are, how fast it is, what the last steps came to.

What is printed meanwhile goes above it and stays. Nothing of the terminal is changed that a killed process would leave
changed: the cursor is not hidden, and there is no second screen.
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
from turnstile.tracking.pace import Phase, duration, time_left

TRAINING = "training"
"""The phase that is the whole of a run's steps."""
REFRESH_RATE = 2  # how often it is drawn
WINDOW = 60.0  # seconds over which tokens are counted
SMALL_HEIGHT = 20  # lines of a terminal that may have no room for all of it
RECENT_STEPS = 6  # that are looked back on
OUTCOME = "reward/outcome"
SHARES = ("generate", "environment", "train", "other")


class Terminal:
    """A terminal to write to. Python's own text files lose a part of what they write to one when a signal comes in
    between, as Ctrl-C is."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.encoding = file.encoding

    def write(self, text: str) -> int:
        self._file.flush()  # what was written past this comes first
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
    """Writes for one thread at a time: what is drawn and what is printed above it each begin where the other ended."""

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
    """Draws while it is started, in a thread; what it shows is given to it as it happens, which costs nothing."""

    def __init__(self, console: SharedConsole, board: StatusBoard, title: str, *, redirect: bool) -> None:
        """`redirect`: what is printed to standard output, and to standard error where that is the terminal too, is kept
        out of the drawing."""
        self._board = board
        self._title = title
        self._phases: Mapping[str, Phase] = {}
        self._steps: deque[tuple[int, dict[str, float]]] = deque(maxlen=RECENT_STEPS)
        self._token_samples: deque[tuple[float, int]] = deque()  # (when, tokens by then)
        self._changed = time.monotonic()
        self._console = console
        self._live = Live(
            console=console,
            get_renderable=self.draw,
            auto_refresh=False,  # rich's own thread does not wait for its turn
            transient=True,
            redirect_stdout=redirect,
            redirect_stderr=redirect and sys.stderr.isatty(),
            vertical_overflow="crop",
        )
        self._ended = threading.Event()
        self._drawing: threading.Thread | None = None

    @property
    def is_on(self) -> bool:
        return self._live.is_started

    def start(self) -> None:
        if not self.is_on:
            with self._console:
                self._live.start(refresh=True)
                self._console.show_cursor(True)
            self._ended.clear()
            self._drawing = threading.Thread(target=self._redraw, name="screen", daemon=True)
            self._drawing.start()

    def stop(self) -> None:
        if self._drawing is not None:
            self._ended.set()
            self._drawing.join()
            self._drawing = None
            for stream in (sys.stdout, sys.stderr):
                stream.flush()  # the begun line, which the drawing has kept back
            with self._console:
                self._live.stop()

    def _redraw(self) -> None:
        while not self._ended.wait(1.0 / REFRESH_RATE):
            with self._console:
                self._live.refresh()

    def show(self, phases: Mapping[str, Phase]) -> None:
        """What is under way has changed."""
        self._phases = dict(phases)
        self._changed = time.monotonic()

    def log(self, step: int, metrics: Scalars) -> None:
        self._steps.append((step, {name: float(v) for name, v in metrics.items() if isinstance(v, int | float)}))

    def draw(self) -> RenderableType:
        now = time.monotonic()
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold", ratio=1)
        grid.expand = True
        for name, shown in self._rows(now):
            grid.add_row(Text(name), shown)
        high = self._console.height
        panel = Panel(
            grid,
            title=Text(self._title_line(now)),
            title_align="left",
            border_style="dim",
            height=high - 1 if high < SMALL_HEIGHT else None,
        )
        return Group(panel, Text(""))  # what a killed process leaves ends with a line of its own

    def _title_line(self, now: float) -> str:
        training = self._phases.get(TRAINING)
        if training is None:
            return self._title
        return f"{self._title}, step {training.done} of {training.total} done, {time_left(training.seconds_left(now))}"

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
            line.add_row(Text(f"{label} {phase.done}/{phase.total}"), bar, Text(time_left(phase.seconds_left(now))))
            return line
        training = self._phases.get(TRAINING)
        if training is None:
            return Text("")
        return Text(f"step {training.done + 1}, computing for {duration(now - self._changed)}")

    def _speed(self, now: float) -> str:
        """Tokens of the turns that ended of late, by the second."""
        self._token_samples.append((now, self._board.tokens))
        while len(self._token_samples) > 2 and self._token_samples[1][0] <= now - WINDOW:
            self._token_samples.popleft()
        (began, before), (_, tokens) = self._token_samples[0], self._token_samples[-1]
        return f"{(tokens - before) / max(now - began, 1.0 / REFRESH_RATE):.0f} in the last {duration(now - began)}"


def _step_rows(steps: Sequence[tuple[int, dict[str, float]]]) -> Iterable[tuple[str, RenderableType]]:
    """What the last steps came to."""
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
    """What part of the time of steps is spent on what: sampling; waiting for environments while nothing is sampled;
    the update; everything else. Where another process plays, sampling goes on during the update, and the parts come to
    more than the whole."""
    spent = {name: sum(metrics.get(f"seconds/{name}", 0.0) for metrics in steps) for name in _PARTS}
    whole = max(spent["step"], 1e-9)
    found = (
        spent["generate"],
        max(0.0, spent["rollout"] - spent["generate"]),
        spent["update"],
        max(0.0, spent["step"] - spent["rollout"] - spent["update"]),
    )
    return {name: seconds / whole for name, seconds in zip(SHARES, found, strict=True)}


_PARTS = ("step", "rollout", "generate", "update")
