"""A whole tiny run of the guessing game, as a recipe and as the file of one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helpers import tiny_llama, tiny_tokenizer
from turnstile.config import Recipe, load_recipe, make_recipe
from turnstile.envs.guess import guess_tasks
from turnstile.tasks.base import write_tasks

GROUPS, ATTEMPTS = 2, 4
CONCURRENT = 5  # episodes


def recipe(inputs: Path, *, sections: Mapping[str, Any] | None = None, **train: Any) -> Recipe:
    """Everything a run can do, tiny, and repeatable to the last bit unless it plays ahead; its model and tasks lie in
    `inputs`. `sections` stand in the place of its own."""
    return make_recipe(_with(_data(inputs, train), sections or {}))


def recipe_file(inputs: Path, *, sections: Mapping[str, Any] | None = None, threads: int = 1, **train: Any) -> Path:
    """The same as a file that `turnstile train` takes."""
    file = inputs / "guess.toml"
    data = _with(_data(inputs, train), sections or {})
    data["model"] = {**data["model"], "threads": threads}
    file.write_text("".join(f"{key} = {_toml(value)}\n" for key, value in data.items()))
    return file


def shipped_file(inputs: Path) -> Path:
    """`recipes/guess.toml`, shortened, as a file that `turnstile train` takes: SmolLM2, whose top layers learn in two
    threads, repeatable to the last bit."""
    write_tasks(inputs / "train.jsonl", guess_tasks(6, seed=1))
    write_tasks(inputs / "heldout.jsonl", guess_tasks(2, seed=2))
    shorter = [
        "engine.deterministic=true", "model.threads=2", "model.device=cpu", "train.steps=2", "rollout.tasks_per_step=3",
        "rollout.group_size=4", "train.checkpoint_every=1", "train.warmup=1", "eval.before=false",
        "eval.samples=1", "eval.policies={}", f"tasks.train={inputs}/train.jsonl",
        f"tasks.heldout={inputs}/heldout.jsonl",
    ]  # fmt: skip
    found = load_recipe(Path(__file__).parents[2] / "recipes" / "guess.toml", shorter)
    data = found.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    file = inputs / "shipped.toml"
    file.write_text("".join(f"{key} = {_toml(value)}\n" for key, value in data.items()))
    return file


def _with(data: dict[str, Any], sections: Mapping[str, Any]) -> dict[str, Any]:
    """The sections in the place of those that are there; what is played ahead is not repeatable."""
    rollout = {**data["rollout"], **sections.get("rollout", {})}
    ahead = {"engine": {"deterministic": False}} if rollout.get("max_staleness") else {}
    return {**data, **ahead, **sections, "rollout": rollout}


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    return f"[{', '.join(map(_toml, value))}]" if isinstance(value, list) else json.dumps(value)


def _data(inputs: Path, train: dict[str, Any]) -> dict[str, Any]:
    if not (inputs / "model").exists():
        words = tiny_tokenizer()
        tiny_llama(len(words), hidden=32).save_pretrained(inputs / "model")
        words.save_pretrained(inputs / "model")
        write_tasks(inputs / "train.jsonl", guess_tasks(5, seed=1))
        write_tasks(inputs / "heldout.jsonl", guess_tasks(2, seed=2))
    lines = {"kind": "lines"}
    return {
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
        "sft": {"demos": 30, "demonstrator": {"kind": "guess"}, "batch": 3, "lr": 1e-2},
        "rollout": {"tasks_per_step": GROUPS, "group_size": ATTEMPTS},
        "train": {
            "steps": 4, "lr": 3e-3, "warmup": 1, "minibatches": 2,
            "epochs": 2, "max_tokens_per_microbatch": 256, "checkpoint_every": 1, **train,
        },
        "eval": {"every": 2},
        "trackers": [{"kind": "jsonl"}],
    }  # fmt: skip
