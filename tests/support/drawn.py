"""What a run tells a console, quickly: `python drawn.py [what happens in step 2]`."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path

from turnstile.tracking import screen
from turnstile.tracking.board import EpisodeStatus, StatusBoard
from turnstile.tracking.console import ConsoleTracker

STEPS, EPISODES, LINES = 3, 6, 100
METRICS = {
    "rate/completion": 0.5, "reward/outcome": 0.25, "reward/total": 0.1, "gate/outcome": 0.75, "staleness/mean": 0.5,
    "staleness/max": 1.0, "seconds/step": 2.0, "seconds/rollout": 1.2, "seconds/generate": 0.9, "seconds/update": 0.5,
}  # fmt: skip


def main(happens: str = "") -> None:
    board = StatusBoard()
    tracker = ConsoleTracker(Path("runs/demo"), board=board, plain=True if happens == "plain" else None)
    try:
        tracker.progress("training", 0, STEPS)
        for step in range(1, STEPS + 1):
            play(tracker, board, step)
            print(f"printed in step {step}")
            print(f"an error of step {step}", file=sys.stderr)
            logging.getLogger("drawn").warning("a warning of step %d, %s", step, "long " * 40)
            if step == 2 and happens:
                {"raise": fail, "kill": die, "interrupt": interrupt, "plain": lambda: None}[happens]()
            tracker.log(step, METRICS)
            print("begun, " if step == STEPS else "", end="")
            tracker.progress("training", step, STEPS)
    finally:
        tracker.close()
    print("ended")


def crowd() -> None:
    """Draws and prints as often as it can, and what is drawn is higher every other time; signals come all the while."""
    screen.REFRESH_RATE = 200
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
    tracker = ConsoleTracker(Path("runs/demo"))
    tracker.progress("training", 0, LINES)
    for number in range(LINES):
        tracker.log(number, METRICS if number % 2 else {"seconds/step": 1.0})
        tracker.say(f"said {number}")
        print(f"printed {number}")
    signal.setitimer(signal.ITIMER_REAL, 0)
    tracker.close()


def play(tracker: ConsoleTracker, board: StatusBoard, step: int) -> None:
    keys = [(f"g{step}", number) for number in range(EPISODES)]
    board.set_status(keys)
    board.set_status(keys[:2], EpisodeStatus.GENERATING)
    board.set_status(keys[2:3], EpisodeStatus.ACTING)
    board.failures["SandboxError"] = step
    tracker.progress(f"step {step}, episodes", 0, EPISODES)
    time.sleep(0.6)  # for as long as it takes to be drawn
    tracker.progress(f"step {step}, episodes", EPISODES, EPISODES)
    board.remove(keys)


def fail() -> None:
    raise LookupError("no such thing")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    crowd() if sys.argv[1:] == ["crowd"] else main(*sys.argv[1:])
