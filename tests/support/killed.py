"""`turnstile train` as a process that something happens to: `python killed.py WHAT POINT STEP NTH COMMAND...`.

POINT is one of `POINTS`, or `moment`, for which NTH is the milliseconds from the beginning of step STEP. WHAT is
`kill`: it gets SIGKILL the NTH time (from 1) that it comes by the point in that step; `kill worker`: the process that
plays for it gets it; `fill`: the disk that it works on is full from there on; `clock`: from there on the clock goes
back a year with each look at it. What it runs is the command itself. A step begins when its tasks are drawn, which is a
step sooner where episodes are played ahead.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

POINTS = {
    "rollout": 30,
    "turn written": 100,
    "before training": 1,
    "optimizer": 4,
    "record": 2,
    "finalize": 1,
    "checkpoint": 12,
    "commit": 5,
    "prune": 1,
}
"""How often a step comes by each, more or less."""


def start(what: str, point: str, step: int, nth: int, recipe: Path, run: Path) -> subprocess.CompletedProcess[str]:
    """Trains in a process of its own, to its end, whichever that is."""
    command = [sys.executable, __file__, what, point, str(step), str(nth), "train", str(recipe), "--out", str(run)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=run.parent)


def train(point: str, step: int, nth: int, recipe: Path, run: Path) -> None:
    """Trains in a process of its own, which must die at the point."""
    done = start("kill", point, step, nth, recipe, run)
    assert done.returncode == -signal.SIGKILL, (point, step, nth, done.returncode, done.stdout, done.stderr)


class _Fate:
    """Knows which step it is, and how often the point was come by."""

    def __init__(self, happens: Callable[[], None], point: str, step: int, nth: int) -> None:
        self.happens = happens
        self.point, self.step, self.nth = point, step, nth
        self.now = 0
        self.passed = 0

    def begins(self, step: int) -> None:
        self.now = step
        if self.point == "moment" and step == self.step:
            threading.Timer(self.nth / 1000, self.happens).start()

    def come_by(self, point: str) -> None:
        if point == self.point and self.now == self.step:
            self.passed += 1
            if self.passed == self.nth:
                self.happens()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_worker() -> None:
    from turnstile.rollout.workers import MODULE

    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid() and MODULE.encode() in (entry / "cmdline").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)


def fill() -> None:
    """Leaves no byte on the disk of the current folder."""
    with Path("ballast").open("ab", buffering=0) as file:
        for size in (2**16, 2**10, 1):
            try:
                while True:
                    file.write(b"0" * size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


def turn_back() -> None:
    """What time it is gets earlier and earlier."""
    real, looks = time.time, itertools.count(1)
    time.time = lambda: real() - 365 * 86400 * next(looks)


def before(owner: Any, name: str, do: Callable[..., Any]) -> None:
    """Has `do` called before a function of a class or module, with its arguments. One that is `async` stays so."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        do(*arguments, **named)
        return function(*arguments, **named)

    @functools.wraps(function)
    async def awaited(*arguments: Any, **named: Any) -> Any:
        do(*arguments, **named)
        return await function(*arguments, **named)

    setattr(owner, name, awaited if inspect.iscoroutinefunction(function) else wrapped)


def arrange(fate: _Fate) -> None:
    """Puts the points where the run comes by."""
    import torch

    from turnstile.envs.guess import GuessEnv
    from turnstile.records.journal import Journal
    from turnstile.records.ledger import Ledger
    from turnstile.records.record import Recorder
    from turnstile.rollout.run_records import RunRecords
    from turnstile.trainer import checkpoint, loop

    def at(point: str) -> Callable[..., None]:
        return lambda *_, **__: fate.come_by(point)

    commit = Ledger.commit

    def traced(ledger: Ledger, *arguments: Any) -> None:
        """Each statement that names a checkpoint is a place to die: PRAGMA, BEGIN, INSERT, COMMIT, PRAGMA."""
        ledger._db.set_trace_callback(lambda statement: fate.come_by("commit"))
        commit(ledger, *arguments)
        ledger._db.set_trace_callback(None)

    before(RunRecords, "callback", lambda _, step: fate.begins(step))
    before(GuessEnv, "step", at("rollout"))
    before(Journal, "_write", at("turn written"))
    before(loop, "prepare", at("before training"))
    before(torch, "_fused_adamw_", at("optimizer"))  # the one kernel of an optimiser step, of which a step has four
    before(Recorder, "write", at("record"))
    before(Ledger, "finalize", at("finalize"))
    before(checkpoint, "flush", at("checkpoint"))
    before(checkpoint, "save_model", at("checkpoint"))
    Ledger.commit = traced  # type: ignore[method-assign]
    before(checkpoint, "prune", at("prune"))


def main(what: str, point: str, step: str, nth: str, *command: str) -> int:
    import torch

    from turnstile.cli.main import run

    torch.set_num_threads(2)
    arrange(
        _Fate(
            {"kill": die, "kill worker": kill_worker, "fill": fill, "clock": turn_back}[what],
            point,
            int(step),
            int(nth),
        )
    )
    return run(command)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
