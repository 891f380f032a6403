"""`turnstile train` as a process that gets SIGKILL at a named point: `python killed.py POINT STEP NTH COMMAND...`.

POINT is one of `POINTS`, or `moment`, for which NTH is the milliseconds from the beginning of step STEP. The process
kills itself the NTH time (from 1) that it comes by the point in that step. What it runs is the command itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

POINTS = (
    "rollout",
    "turn written",
    "before training",
    "optimizer",
    "record",
    "settle",
    "checkpoint",
    "commit",
    "prune",
)


def train(point: str, step: int, nth: int, recipe: Path, run: Path) -> None:
    """Trains in a process of its own, which must die at the point."""
    command = [sys.executable, __file__, point, str(step), str(nth), "train", str(recipe), "--out", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, (point, step, nth, done.returncode, done.stdout, done.stderr)


class _Death:
    """Knows which step it is, and how often the point was come by."""

    def __init__(self, point: str, step: int, nth: int) -> None:
        self.point, self.step, self.nth = point, step, nth
        self.now = 0
        self.passed = 0

    def begins(self, step: int) -> None:
        self.now = step
        if self.point == "moment" and step == self.step:
            threading.Timer(self.nth / 1000, die).start()

    def come_by(self, point: str) -> None:
        if point == self.point and self.now == self.step:
            self.passed += 1
            if self.passed == self.nth:
                die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner: Any, name: str, do: Callable[..., Any]) -> None:
    """Has `do` called before a function of a class or module, with its arguments."""
    function = getattr(owner, name)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        do(*arguments, **named)
        return function(*arguments, **named)

    setattr(owner, name, wrapped)


def arrange(death: _Death) -> None:
    """Puts the points where the run comes by."""
    import torch

    from turnstile.envs.guess import GuessEnv
    from turnstile.rollout.books import Books
    from turnstile.rollout.journal import Journal
    from turnstile.rollout.ledger import Ledger
    from turnstile.rollout.record import Recorder
    from turnstile.trainer import checkpoint, loop

    def at(point: str) -> Callable[..., None]:
        return lambda *_, **__: death.come_by(point)

    commit = Ledger.commit

    def traced(ledger: Ledger, *arguments: Any) -> None:
        """Each statement that names a checkpoint is a place to die: PRAGMA, BEGIN, INSERT, COMMIT, PRAGMA."""
        ledger._db.set_trace_callback(lambda statement: death.come_by("commit"))
        commit(ledger, *arguments)
        ledger._db.set_trace_callback(None)

    before(Books, "watch", lambda _, step: death.begins(step))
    before(GuessEnv, "step", at("rollout"))
    before(Journal, "_write", at("turn written"))
    before(loop, "prepare", at("before training"))
    before(torch, "_fused_adamw_", at("optimizer"))  # the one kernel of an optimiser step, of which a step has four
    before(Recorder, "write", at("record"))
    before(Ledger, "settle", at("settle"))
    before(checkpoint, "flush", at("checkpoint"))
    before(checkpoint, "save_model", at("checkpoint"))
    Ledger.commit = traced  # type: ignore[method-assign]
    before(checkpoint, "keep", at("prune"))


def main(point: str, step: str, nth: str, *command: str) -> int:
    import torch

    from turnstile.cli.main import run

    torch.set_num_threads(1)
    arrange(_Death(point, int(step), int(nth)))
    return run(command)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
