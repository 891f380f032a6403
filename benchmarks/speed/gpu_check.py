"""Does a run work on this machine's accelerator: it trains, is stopped, resumes, and ends like one that was not.

    make gpu                       on CUDA, in some minutes; docs/results/gpu_check.json keeps what came of it
    make gpu ARGS='--device cpu'   the rehearsal: the same on a CPU, of which nothing is kept
    make gpu ARGS='--full'         then gpu_speed.py: larger networks, against the matrix peak

For each way to learn (all weights, the top layers, adapters) and each type of numbers: a run of the guessing game with
SmolLM2-135M, and one that is stopped in its second step and started again. Kept are seconds of loading, of playing and
of updating, tokens a second, the memory at its peak, the gap between the sampler's log-probabilities and the trainer's
on the same weights, by how much ratios are off 1, and whether the resumed run ended in the same weights. A way fails
where it raises, where a number is not finite, or where the mean gap is beyond what the type of numbers explains. Ways
that would begin after `--minutes` are left out, and said to be.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.page import ROOT, commit
from turnstile.config import Recipe, load_recipe
from turnstile.envs.guess import GuessEnv, guess_tasks
from turnstile.errors import StoppedError
from turnstile.models.load import load_model, pick_device
from turnstile.runs.train import train
from turnstile.tasks.base import write_tasks
from turnstile.tracking.jsonl import read_metrics

RESULT = ROOT / "docs" / "results" / "gpu_check.json"
STEPS = 3
WAYS = {
    "all, float32": ("all", 0, "float32"),
    "top, bfloat16": ("top", 6, "bfloat16"),
    "lora, float32": ("lora", 0, "float32"),
    "lora, bfloat16": ("lora", 0, "bfloat16"),
}
"""Name -> model.train, model.top_layers, model.dtype."""
GAPS = {"float32": 0.01, "bfloat16": 0.25}
"""The largest mean gap, in nats, that rounding explains."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--full", action="store_true", help="run gpu_speed.py too")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--groups", type=int, default=6, help="tasks a step")
    parser.add_argument("--minutes", type=float, default=10.0)
    args = parser.parse_args()
    latest = time.monotonic() + 60 * args.minutes
    device = pick_device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    found: dict[str, Any] = {"device": name, "torch": torch.__version__, "commit": commit(), "ways": {}}
    with tempfile.TemporaryDirectory(prefix="turnstile-device-") as folder:
        for way in args.ways:
            if time.monotonic() > latest:
                found["ways"][way] = {"left out": f"{args.minutes:g} minutes were over"}
                continue
            try:
                found["ways"][way] = checked(way, measure(Path(folder), way, args.device, args.groups))
            except StoppedError:
                raise  # by somebody else: it says nothing of the device
            except Exception as error:  # what does not work on a device is what is looked for
                found["ways"][way] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
            print(way, json.dumps(found["ways"][way], indent=1), flush=True)
            if device.type == "cuda":
                RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if args.full:
        subprocess.run(
            [sys.executable, "-m", "benchmarks.speed.gpu_speed", "--device", args.device], cwd=ROOT, check=True
        )
    if any("failed" in each for each in found["ways"].values()):
        sys.exit("something does not work on this device; see above")


def measure(folder: Path, way: str, device: str, groups: int) -> dict[str, Any]:
    """What came of one way to learn."""
    recipe = made(folder, way, device, groups)
    began = time.monotonic()
    load_model(recipe.model.id, device=device, dtype=recipe.model.dtype)
    loading = time.monotonic() - began
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    whole, stopped = folder / "whole", folder / "stopped"
    for run in (whole, stopped):
        shutil.rmtree(run, ignore_errors=True)
    train(recipe, run=whole, env=GuessEnv, plain=True)
    peak = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None
    Stopping.left = recipe.sft.demos + recipe.rollout.tasks_per_step * recipe.rollout.group_size + 2
    try:
        train(recipe, run=stopped, env=Stopping, plain=True)
    except StoppedError:
        pass
    else:
        raise AssertionError("the run was not stopped")
    train(recipe, run=stopped, env=GuessEnv, plain=True)
    steps = [line for line in read_metrics(whole) if "loss/total" in line]
    return {
        "seconds of loading": round(loading, 2),
        "seconds of playing": [round(float(line["seconds/rollout"]), 2) for line in steps],
        "seconds of updating": [round(float(line["seconds/update"]), 2) for line in steps],
        "tokens sampled a second": [round(float(line["tokens/per_second"])) for line in steps],
        "tokens trained a second": [round(float(line["tokens/unique"] / line["seconds/update"])) for line in steps],
        "memory at its peak, MB": peak and round(peak),
        "gap, nats": [float(f"{line['policy/logprob_gap']:.3g}") for line in steps],
        "ratio - 1": [float(f"{line['loss/ratio'] - 1:.3g}") for line in steps],
        "resumed": difference(whole, stopped),
    }


def checked(way: str, found: dict[str, Any]) -> dict[str, Any]:
    """What was found, with what is wrong with it under "failed"."""
    bound = GAPS[WAYS[way][2]]
    off = [gap for gap in found["gap, nats"] if not gap <= bound]
    if off or not all(math.isfinite(ratio) for ratio in found["ratio - 1"]):
        return {**found, "failed": f"sampler and trainer are {off or found['ratio - 1']} apart; at most {bound} nats"}
    return found


def made(folder: Path, way: str, device: str, groups: int) -> Recipe:
    """The recipe of the guessing game, shortened."""
    learns, layers, dtype = WAYS[way]
    write_tasks(folder / "train.jsonl", guess_tasks(24, seed=1))
    write_tasks(folder / "heldout.jsonl", guess_tasks(4, seed=2))
    return load_recipe(
        ROOT / "recipes" / "guess.toml",
        [
            f"model.train={learns}", f"model.top_layers={layers}", f"model.dtype={dtype}", f"model.device={device}",
            f"train.steps={STEPS}", f"rollout.tasks_per_step={groups}", "train.checkpoint_every=1",
            "train.drop_zero_advantage_groups=false",
            "eval.before=false", "eval.policies={}", "eval.samples=1", "sft.demos=8",
            f"tasks.train={folder}/train.jsonl", f"tasks.heldout={folder}/heldout.jsonl",
        ],
    )  # fmt: skip


class Stopping(GuessEnv):
    """Has the run stopped after so many episodes have begun, as a scheduler does that wants the machine back."""

    left = 0

    async def reset(self, task: Any) -> Any:
        type(self).left -= 1
        if type(self).left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return await super().reset(task)


def difference(one: Path, other: Path) -> str:
    """How far the last weights of two runs are apart."""
    last = Path("checkpoints", f"step-{STEPS:06d}", "model", "model.safetensors")
    first, second = load_file(one / last), load_file(other / last)
    if all(torch.equal(value, second[name]) for name, value in first.items()):
        return "the same weights"
    worst = max(float((value.double() - second[name].double()).abs().max()) for name, value in first.items())
    return f"weights differ by {worst:.2g} at most"


if __name__ == "__main__":
    main()
