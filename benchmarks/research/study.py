"""The runs behind `make results`: which they are, doing them, and keeping what each came to."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from turnstile.config import PATHS, Recipe, load_recipe
from turnstile.evaluation.metrics import EpisodeResult
from turnstile.runs.run_folder import read_resolved, read_results, versions
from turnstile.tracking.jsonl import read_metrics

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "recipes/demo.toml"
RUNS = Path("runs/results")
KEPT = Path("docs/results/demo")
ARMS = {"gated": "G-RA", "direct": "D-RA"}
OTHER_SEEDS = ["eval.policies={}", "eval.baseline_tasks=1"]  # the baselines do not depend on it
Body = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Study:
    """What all runs share. Paths are relative to the project's folder, which must be the current one."""

    steps: int
    tasks: int
    samples: int
    threads: int = 0

    def reinforce(self, seed: int, arm: str) -> None:
        """RL from the seed's warm start, which is made and evaluated first; what is kept is not done again."""
        if not self.read(warm(seed)):
            turnstile(warm(seed), self.overrides(warm(seed)))
            self._keep(warm(seed))
        name = run_of(seed, arm)
        if not self.read(name):
            self._weights(seed)
            turnstile(name, self.overrides(name))
            self._keep(name)

    def overrides(self, name: str) -> list[str]:
        """What the run `name` changes in the recipe."""
        _, seed, arm = name.split("-")
        common = [f"seed={seed}", f"eval.tasks={self.tasks}", f"eval.samples={self.samples}"]
        common.append(f"model.threads={self.threads}")
        if arm == "warm":
            return [*common, "train.steps=0", *(OTHER_SEEDS if int(seed) else [])]
        rest = ["sft.demos=0", "eval.before=false", "eval.policies={}", f"rewards.compose={arm}"]
        return [*common, f"model.id=./{weights_of(int(seed))}", f"train.steps={self.steps}", *rest]

    def read(self, name: str) -> Body:
        """What a run came to; empty if it is not kept. Ends the program where that was another recipe's run."""
        if not kept(name).is_file():
            return {}
        body: Body = json.loads(gzip.decompress(kept(name).read_bytes()))
        here, there = settings(load_recipe(RECIPE, self.overrides(name))), body["recipe"]
        new = {key: value for key, value in settings(Recipe()).items() if key in here and key not in there}
        there = {**there, **new}  # a key that came later had its default
        if changed := [key for key in sorted({*here, *there}) if here.get(key) != there.get(key)]:
            was = ", ".join(f"{key} is {here.get(key)}, was {there.get(key)}" for key in changed[:3])
            sys.exit(
                f"error: {kept(name)} is of another recipe ({was}); give the options it was made with, or delete it to "
                "run it again"
            )
        found = {key: [EpisodeResult.read(one) for one in many] for key, many in body["evaluations"].items()}
        return {**body, "evaluations": found}

    def _keep(self, name: str) -> None:
        folder = RUNS / name
        body = {
            "recipe": settings(load_recipe(RECIPE, self.overrides(name))),
            "git": read_resolved(folder)["git"].get("commit", ""),
            "versions": versions(),
            "costs": json.loads((folder / "costs.json").read_text(encoding="utf-8")),
            "metrics": read_metrics(folder),
            "evaluations": {key: [asdict(one) for one in found] for key, found in read_results(folder).items()},
        }
        if name.endswith("-warm"):
            body["weights"] = digest(weights_of(int(name.split("-")[1])))
        KEPT.mkdir(parents=True, exist_ok=True)
        scratch = kept(name).with_suffix(".writing")
        scratch.write_bytes(gzip.compress(json.dumps(body).encode(), mtime=0))
        scratch.replace(kept(name))

    def _weights(self, seed: int) -> None:
        """Makes the warm start's weights again where only its evaluation was kept, and takes no others for them."""
        folder, name = weights_of(seed), warm(seed)
        if not folder.is_dir():
            turnstile(name, self.overrides(name))
        if digest(folder) != self.read(name)["weights"]:
            sys.exit(
                f"error: the warm start in {RUNS / name} is not the one whose evaluation is in {kept(name)} (another "
                f"kind of machine makes another one); delete {KEPT / f'seed-{seed}-*'} to do the seed anew"
            )


def turnstile(name: str, overrides: Sequence[str]) -> None:
    """One run in a process of its own, so that memory is given back."""
    print(f"== {name}", flush=True)
    command = [sys.executable, "-m", "turnstile", "train", RECIPE, *overrides, "--out", str(RUNS / name)]
    subprocess.run(command, check=True)


def warm(seed: int) -> str:
    return run_of(seed, "warm")


def run_of(seed: int, arm: str) -> str:
    return f"seed-{seed}-{arm}"


def weights_of(seed: int) -> Path:
    return RUNS / warm(seed) / "checkpoints" / "step-000000" / "model"


def kept(name: str) -> Path:
    return KEPT / f"{name}.json.gz"


def digest(model: Path) -> str:
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()[:16]


def settings(recipe: Recipe) -> dict[str, Any]:
    """The recipe, flat, with paths as seen from the project; less the number of threads, which is the machine's."""
    body = recipe.model_dump(mode="json")
    for section, key in PATHS:
        if Path(body[section].get(key) or "").is_absolute():  # some are knobs of one kind alone
            body[section][key] = os.path.relpath(body[section][key])
    found = dict(_flat(body))
    del found["model.threads"]
    return found


def _flat(body: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in body.items():
        pairs += _flat(value, f"{before}{key}.") if isinstance(value, dict) and value else [(before + key, value)]
    return pairs
