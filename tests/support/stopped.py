"""`turnstile train` as a process that is told to stop, with parts that hang."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from turnstile.envs.base import Step
from turnstile.envs.guess import GuessEnv
from turnstile.types import Message, Task, Trajectory

HERE = Path(__file__).parent


class HangingEnv(GuessEnv):
    """Its methods are plain functions, and at the third game its step takes no end."""

    begun = 0

    def reset(self, task: Task) -> object:  # type: ignore[override]
        HangingEnv.begun += 1
        return super().reset(task)

    def step(self, message: Message) -> Step:  # type: ignore[override]
        if HangingEnv.begun > 20:
            print("hangs", flush=True)
            time.sleep(1000)
        return super().step(message)  # type: ignore[return-value]


def slow_reward(task: Task, trajectory: Trajectory) -> float:
    """Computes for longer than anyone waits, in the step's own thread."""
    print("hangs", flush=True)
    for _ in range(100_000):
        time.sleep(0.01)
    return 1.0


def start(recipe: Path, run: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", MAIN, "train", str(recipe), "--out", str(run), *overrides]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=HERE)


MAIN = "import torch; torch.set_num_threads(1); from turnstile.cli.main import main; main()"
