"""One measured step of Turnstile at the game of `game.py`: a process of its own, started by `vs_trl.py`.

    python -m benchmarks.peers.ours SHAPE MODEL SEED OUT

SHAPE is a `Shape` in JSON, MODEL a folder, OUT a file to write.

The first step, of one turn, warms up; the second is the one that counts.
"""

from __future__ import annotations

import itertools
import json
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

import turnstile
from benchmarks.peers.game import ATTEMPTS, LEARNING_RATE, TEMPERATURE, TURN_TOKENS, WARM_UP_ROUNDS, Game, Shape
from turnstile.envs.guess import guess_tasks
from turnstile.records.record import read_record
from turnstile.tracking.jsonl import read_metrics


def main() -> None:
    shape, model, seed, out = Shape(**json.loads(sys.argv[1])), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        played = itertools.count()

        def env() -> Game:
            return Game(rounds=WARM_UP_ROUNDS if next(played) < shape.episodes else shape.rounds)

        turnstile.train(recipe(shape, model, seed), env=env, tasks=guess_tasks(64, seed=seed), heldout=[], run=run)
        found = report(run)
    out.write_text(json.dumps(found), encoding="utf-8")


def recipe(shape: Shape, model: str, seed: int) -> dict[str, Any]:
    return {
        "name": "vs-trl",
        "seed": seed,
        "model": {
            "id": model, "train": shape.train, "top_layers": shape.top, "lora_rank": shape.lora_rank,
        },
        "sampling": {"max_tokens": TURN_TOKENS, "temperature": TEMPERATURE},
        "episode": {
            "turns": shape.rounds + 1, "context": shape.context, "unparsed": 1, "seconds": 1e5, "retries": 0,
        },
        "rewards": {"terms": [{"kind": "signal", "name": "worth", "level": 1}]},
        "rollout": {"tasks_per_step": shape.groups, "group_size": ATTEMPTS},
        "train": {
            "steps": 2, "lr": LEARNING_RATE, "max_tokens_per_microbatch": shape.budget, "checkpoint_every": 0,
        },
        "eval": {"before": False},
        "trackers": ["jsonl"],
    }  # fmt: skip


def report(run: Path) -> dict[str, Any]:
    """What the second step took and did."""
    before, step = read_metrics(run)
    episodes = [
        trajectory for entry in read_record(run, phase="train", step=2) for trajectory in entry.group.trajectories
    ]
    seconds = {
        "step": step["time"] - before["time"],
        "rollout": step["seconds/rollout"],
        "generate": step["seconds/generate"],
        "environment": step["seconds/environment"],
        "train": step["seconds/update"],
    }
    seconds["rest"] = seconds["step"] - seconds["generate"] - seconds["environment"] - seconds["train"]
    return {
        "seconds": seconds,
        "episodes": len(episodes),
        "turns": sum(len(episode.turns) for episode in episodes),
        "prompt tokens": len(episodes[0].turns[0].context_ids),
        "new tokens": int(step["tokens/sampled"]),
        "computed tokens": int(step["tokens/computed"]),
        "rows tokens": int(step["tokens/rows"]),
        "trained tokens": int(step["tokens/unique"]),
        "flat groups": int(step["groups/zero_advantage"]),
        "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "metrics": {key: value for key, value in step.items() if isinstance(value, float)},
    }


if __name__ == "__main__":
    main()
