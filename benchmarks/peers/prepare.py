"""The model that both sides of `vs_trl.py` start from: SmolLM2 with a chat template that knows tools (the one that TRL
brings for Qwen2.5), taught by a few demonstrations to call the game's tool.

    python -m benchmarks.peers.prepare TEMPLATE OUT
"""

from __future__ import annotations

import functools
import random
import shutil
import sys
import tempfile
from pathlib import Path

import turnstile
from benchmarks.peers.game import HIGH, LOW, TURN_TOKENS, Game
from turnstile.envs.guess import demonstrate, guess_tasks
from turnstile.models.load import load_model, load_tokenizer
from turnstile.tasks.demonstration import DemoStep
from turnstile.types import Task

MODEL = "smollm2-135m"
DEMOS, ROUNDS = 24, 12


def demonstration(task: Task, rng: random.Random) -> list[DemoStep]:
    return demonstrate(task, rng, low=LOW, high=HIGH, rounds=ROUNDS)


def main() -> None:
    template, out = Path(sys.argv[1]), Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as scratch:
        model, run = Path(scratch) / "model", Path(scratch) / "run"
        load_model(MODEL).save_pretrained(model)
        tokenizer = load_tokenizer(MODEL)
        tokenizer.chat_template = template.read_text(encoding="utf-8")
        tokenizer.pad_token = "<|endoftext|>"  # not the token that ends a turn, which is learnt
        tokenizer.save_pretrained(model)
        turnstile.train(
            recipe(str(model)),
            env=functools.partial(Game, rounds=ROUNDS - 1),
            tasks=guess_tasks(DEMOS, seed=1),
            heldout=[],
            run=run,
        )
        (trained,) = (run / "checkpoints").glob("*/model")
        for part in trained.iterdir():
            shutil.copy(part, model / part.name)
        tokenizer.save_pretrained(model)
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(model, out)


def recipe(model: str) -> dict[str, object]:
    return {
        "name": "vs-trl-model",
        "model": {"id": model},
        "sampling": {"max_tokens": TURN_TOKENS},
        "episode": {"turns": ROUNDS, "context": 4096},
        "rewards": {"terms": [{"kind": "signal", "name": "worth", "level": 1}]},
        "sft": {
            "demos": DEMOS, "demonstrator": {"kind": "benchmarks.peers.prepare:demonstration"}, "batch": 2,
            "lr": 3e-4, "warmup": 2,
        },
        "train": {"steps": 0, "max_tokens_per_microbatch": 2048},
        "eval": {"before": False},
        "trackers": ["console"],
    }  # fmt: skip


if __name__ == "__main__":
    main()
