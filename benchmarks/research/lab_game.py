"""Learning curves on the number game: a network of 75,000 parameters with random weights, every part of training real.

A part of `lab.py` (`--only game`). Each of five seeds is a network, which learns from demonstrations how a
guess is written, and from 40 steps of RL, with each estimator, to listen to higher and lower. A step plays each of the
seven secrets twelve times. What is measured is kept run by run; started again, it goes on with what is missing.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from turnstile.config import Recipe, make_recipe
from turnstile.lab.curves import half_width
from turnstile.lab.measure import label
from turnstile.lab.table import Grid
from turnstile.runs.train import train
from turnstile.tasks.demonstration import DemoStep, call
from turnstile.types import Task

Body = dict[str, Any]
HIGH, ROUNDS, STEPS, ATTEMPTS, LAST = 7, 3, 40, 12, 5
PLAIN = "rloo"
SUBJECTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    (PLAIN, {}),
    ("grpo", {}),
    ("grpo", {"scale": "none"}),
    ("reinforce_pp", {}),
    ("turn_return", {}),
    ("gigpo", {}),
    ("salt", {}),
    ("empg", {}),
    ("igpo", {}),
    ("entropy_aware", {}),
    ("threshold", {}),
)
TASKS = [Task(id=f"game-{secret}", env="guess", data={"secret": secret}) for secret in range(1, HIGH + 1)]
TEXTS = (
    f"Find the number from 1 to {HIGH}.",
    "Commands: guess NUMBER",
    f"guess from 1 to {HIGH}",
    *("higher", "lower", "right"),
    *(f"guess {number}" for number in range(1, HIGH + 1)),
)


def blind(task: Task, rng: random.Random) -> list[DemoStep]:
    """Any numbers until the secret is among them: how a guess is written, and nothing of the answers."""
    steps: list[DemoStep] = []
    while len(steps) < ROUNDS:
        number = rng.randint(1, HIGH)
        steps.append(DemoStep(message=call("guess", number=number)))
        if number == task.data["secret"]:
            break
    return steps


def play_out(kept: Sequence[Body], keep: Callable[[Body], None], *, seeds: int) -> list[Body]:
    """Every estimator with every seed; what is among `kept` is not run again, and `keep` is given each run that is."""
    runs = list(kept)
    done = {(run["estimator"], run["seed"]) for run in runs}
    for seed in range(seeds):
        for kind, knobs in SUBJECTS:
            if (label(kind, knobs), seed) not in done:
                runs.append({"estimator": label(kind, knobs), "seed": seed, "curve": learn(kind, knobs, seed)})
                keep(runs[-1])
                print(f"game: {runs[-1]['estimator']}, seed {seed}: {fmean(runs[-1]['curve'][-LAST:]):.2f}", flush=True)
    return runs


def learn(kind: str, knobs: Mapping[str, Any], seed: int) -> list[float]:
    """The share of games won in each step, by the policy that the step began with."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        network(seed, folder / "model")
        train(recipe(kind, knobs, seed, folder / "model"), run=folder / "run", tasks=TASKS, heldout=[])
        lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [round(body["rate/resolution"], 4) for body in map(json.loads, lines) if "rate/resolution" in body]


def recipe(kind: str, knobs: Mapping[str, Any], seed: int, model: Path) -> Recipe:
    lines = {"kind": "lines"}
    return make_recipe(
        {
            "seed": seed,
            "model": {"id": str(model), "device": "cpu", "threads": 1},
            "agent": {"renderer": lines, "parser": lines},
            "sampling": {"max_tokens": 4},
            "env": {"kind": "guess", "high": HIGH, "rounds": ROUNDS},
            "episode": {"turns": ROUNDS},
            "rewards": {
                "terms": [
                    {"kind": "signal", "name": "resolved", "level": 1},
                    {"kind": "turn_signal", "name": "consistent", "offset": -1.0, "weight": 0.3, "level": 1},
                ]
            },
            "credit": {"kind": kind, **knobs},
            "sft": {"demos": 98, "demonstrator": {"kind": "benchmarks.research.lab_game:blind"}, "lr": 3e-3},
            "rollout": {"tasks_per_step": HIGH, "group_size": ATTEMPTS},
            "train": {
                "steps": STEPS, "lr": 4e-3, "warmup": 2, "checkpoint_every": 0,
            },
            "eval": {"before": False},
            "trackers": [{"kind": "jsonl"}],
        }
    )  # fmt: skip


def network(seed: int, folder: Path) -> None:
    """Random weights, three times as large as usual: small ones hardly tell one history from another."""
    split = pre_tokenizers.Split(Regex(r"\n| ?[^\s]+| "), behavior="isolated")
    pieces = (piece for text in TEXTS for piece, _ in split.pre_tokenize_str(text))
    words = dict.fromkeys(["<pad>", "<eos>", "<unk>", "\n", *pieces])
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = split, decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    ).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.05,
        pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    model.save_pretrained(folder)


def table(runs: Sequence[Body]) -> Grid:
    """One row an estimator: the area under its curve, how far that is from leave-one-out's with the same seeds, and
    where it came to."""
    curves: dict[str, dict[int, list[float]]] = {}
    for run in runs:
        curves.setdefault(run["estimator"], {})[run["seed"]] = run["curve"]
    plain = curves.get(PLAIN, {})
    rows = []
    for name, own in curves.items():
        areas = [fmean(curve) for curve in own.values()]
        gaps = [fmean(curve) - fmean(plain[seed]) for seed, curve in own.items() if seed in plain]
        ends = [fmean(curve[-LAST:]) for curve in own.values()]
        rows.append((name, str(len(own)), spread(areas), "-" if name == PLAIN else spread(gaps), spread(ends)))
    head = ("estimator", "seeds", "area", f"more than {PLAIN}", f"last {LAST} steps")
    return Grid(title="Learning the number game", columns=head, rows=tuple(rows), note=NOTE)


NOTE = (
    f"A network of 75,000 parameters is trained for {STEPS} steps of {HIGH * ATTEMPTS} games, with {ROUNDS} guesses "
    f"of a number from 1 to {HIGH}. The reward is the game's outcome minus 0.3 for each guess that earlier answers "
    "rule out. The area is the mean share of games won over the steps, with a 95 % interval over seeds. Runs with "
    "the same seed share the network and the demonstrations, so the difference is computed seed by seed. All runs "
    "use the same learning rate."
)


def spread(values: Sequence[float]) -> str:
    """The mean and its interval; the mean alone of one value."""
    middle = f"{fmean(values):.3f}"
    half = half_width(values)
    return middle if len(values) < 2 else f"{middle} [{fmean(values) - half:.3f}, {fmean(values) + half:.3f}]"
