"""A whole tiny run of the guessing game, which may be killed: `python guess_run.py INPUTS RUN HOW STEP`.

HOW is `playing` (in the middle of the step's episodes) or `saving` (while its checkpoint is written).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from helpers import tiny_llama, tiny_tokenizer
from turnstile.build.train import train
from turnstile.config import Recipe, make_recipe
from turnstile.envs.base import Start
from turnstile.envs.guess import GuessEnv, guess_tasks
from turnstile.tasks.base import write_tasks
from turnstile.trainer import checkpoint
from turnstile.types import Task

GROUPS, ATTEMPTS = 2, 4
CONCURRENT = 5  # episodes


def recipe(inputs: Path, *, sections: Mapping[str, Any] | None = None, **train: Any) -> Recipe:
    """Everything a run can do, tiny, and repeatable to the last bit; its model and tasks lie in `inputs`. `sections`
    stand in the place of its own."""
    if not (inputs / "model").exists():
        words = tiny_tokenizer()
        tiny_llama(len(words), hidden=32).save_pretrained(inputs / "model")
        words.save_pretrained(inputs / "model")
        write_tasks(inputs / "train.jsonl", guess_tasks(5, seed=1))
        write_tasks(inputs / "heldout.jsonl", guess_tasks(2, seed=2))
    lines = {"kind": "lines"}
    return make_recipe(
        {
            "model": {"id": str(inputs / "model"), "device": "cpu", "threads": 1},
            "engine": {"deterministic": True},
            "agent": {"renderer": lines, "parser": lines},
            "sampling": {"max_tokens": 4, "top_k": 12},
            "env": {"kind": "guess"},
            "tasks": {"train": str(inputs / "train.jsonl"), "heldout": str(inputs / "heldout.jsonl")},
            "episode": {"turns": 5, "concurrent": CONCURRENT},
            "rewards": {
                "terms": [
                    {"kind": "signal", "name": "resolved", "level": 1},
                    {"kind": "valid_format", "weight": 0.2, "level": 1},
                ]
            },
            "credit": {"kind": "gae", "scale": "std"},
            "regularizers": [{"kind": "kl", "coef": 0.01}],
            "warmstart": {"demos": 30, "demonstrator": {"kind": "guess"}, "batch": 3, "lr": 1e-2},
            "train": {
                "steps": 4, "groups": GROUPS, "attempts": ATTEMPTS, "lr": 3e-3, "warmup": 1, "minibatches": 2,
                "epochs": 2, "budget": 256, "checkpoint_every": 1, **train,
            },
            "eval": {"every": 2},
            "trackers": [{"kind": "jsonl"}],
            **(sections or {}),
        }
    )  # fmt: skip


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Playing(GuessEnv):
    """Dies when the sixth episode of a step begins."""

    step_of_death = 0
    started = 0

    async def reset(self, task: Task) -> Start:
        if task.id.startswith("guess-1") and checkpoint_of(RUN) == self.step_of_death - 1:
            Playing.started += 1
            if Playing.started == 6:
                die()
        return await super().reset(task)


RUN = Path()


def checkpoint_of(run: Path) -> int:
    """The last step whose checkpoint stands, -1 for none."""
    return max((int(path.name[5:]) for path in (run / "checkpoints").glob("step-*")), default=-1)


def main(inputs: Path, run: Path, how: str, step: int) -> None:
    global RUN
    RUN = run
    torch.set_num_threads(1)
    Playing.step_of_death = step if how == "playing" else 0
    if how == "saving":
        write = checkpoint.save_model

        def save_model(model: Any, tokenizer: Any, into: Path) -> None:
            write(model, tokenizer, into)
            if checkpoint_of(RUN) == step - 1:
                die()

        checkpoint.save_model = save_model
    train(recipe(inputs), run=run, env=Playing)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
