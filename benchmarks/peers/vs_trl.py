"""Turnstile beside TRL's GRPOTrainer: seconds of a training step at the same game, model, template and weights.

    make bench-peers                             TRL, in an environment of its own (.peers/trl)
    python -m benchmarks.peers.vs_trl            every case, three times; what is kept is not measured again
    python -m benchmarks.peers.vs_trl --cases 8x4 --train top lora
    python -m benchmarks.peers.vs_trl --cases 8x4 --only ours --repeats 1
    python -m benchmarks.peers.vs_trl --tables   only writes the tables of what is kept

A case EPISODESxROUNDS is measured a step at a time, each in a process of its own: ours, theirs, and the bare rates of
the model on this machine, in turns. Results are kept in docs/results/performance/vs_trl.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.page import ROOT, Body, Kept, spread, table, write
from benchmarks.peers.game import Shape

PEER = ROOT / ".peers/trl"
MODEL = ROOT / "runs/peers/model"
SIDES = ("ours", "theirs", "bare")
CASES = ("8x4", "32x4", "8x20", "32x20")
GOALS = {"8x4": (2.5, 5), "32x4": (3, 5), "8x20": (3, 10), "32x20": (4, 10)}  # the step, its rollout
TRIES = 4
WHOLE = 0.97  # of a step's turns: a case of few episodes must have them all
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="EPISODESxROUNDS")
    parser.add_argument("--train", nargs="+", default=["all"], choices=["all", "top", "lora"], help="what learns")
    parser.add_argument("--only", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--again", action="store_true", help="measure again what is kept")
    parser.add_argument("--tables", action="store_true", help="only write the tables of what is kept")
    args = parser.parse_args()
    kept = Kept("vs_trl")
    if not args.tables:
        prepare()
        for case, train in itertools.product(args.cases, args.train):
            for repeat, side in itertools.product(range(args.repeats), args.only):
                key = f"{case} {train} {side} {repeat}"
                if args.again or key not in kept.results:
                    print(f"measuring {key}", flush=True)
                    kept.put(key, whole(shape_of(case, train), side, repeat))
                    print(json.dumps({k: v for k, v in kept.results[key].items() if k != "metrics"}), flush=True)
    write("vs_trl", parts(kept.results))


def shape_of(case: str, train: str) -> Shape:
    episodes, rounds = map(int, case.split("x"))
    return Shape(episodes=episodes, rounds=rounds, train=train, rows=4 if rounds < 10 else 2)


def prepare() -> None:
    """The model that both sides start from."""
    templates = sorted(PEER.glob("lib/python3*/site-packages/trl/chat_templates/qwen2_5.jinja"))
    if not templates:
        sys.exit(f"error: TRL is not in {PEER.relative_to(ROOT)}; install it with: make bench-peers")
    if not (MODEL / "config.json").is_file():
        print("teaching the model to call the game's tool, some minutes", flush=True)
        python(Path(sys.executable), "benchmarks.peers.prepare", str(templates[0]), str(MODEL))


def whole(shape: Shape, side: str, repeat: int) -> Body:
    """The measurement of a step in which the episodes had all their turns, or nearly: another is measured again with
    another seed, so that both sides do the same work."""
    for number in range(TRIES):
        found = measure(shape, side, repeat + 100 * number)
        if found.get("turns", shape.turns) >= WHOLE * shape.turns:
            return {**found, "cut short before": number}
        print(f"{found['turns']} turns of {shape.turns}: episodes ended early; once more", flush=True)
    sys.exit(f"error: {TRIES} steps of {side} had episodes that ended early; teach the model more (peers/prepare.py)")


def measure(shape: Shape, side: str, seed: int) -> Body:
    """What one process of that side came to."""
    interpreter = PEER / "bin/python" if side == "theirs" else Path(sys.executable)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out.json"
        python(interpreter, f"benchmarks.peers.{side}", json.dumps(asdict(shape)), str(MODEL), str(seed), str(out))
        found: Body = json.loads(out.read_text(encoding="utf-8"))
    return {**found, "shape": asdict(shape)}


def python(interpreter: Path, module: str, *arguments: str) -> None:
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    environment = {**os.environ, **OFFLINE, "PYTHONPATH": path}
    ended = subprocess.run(
        [interpreter, "-m", module, *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if ended.returncode:
        sys.exit(f"{ended.stdout}\nerror: {module} ended with {ended.returncode}; what it said stands above")


def parts(results: Mapping[str, Body]) -> list[str]:
    """The tables of what is kept."""
    found = by_case(results)
    both = [ratios(one, sides) for one, sides in found.items() if {"ours", "theirs"} <= set(sides)]
    steps, work, ceilings = [], [], []
    for (case, train), sides in found.items():
        label = f"{case}, {train}"
        for side in ("ours", "theirs"):
            if runs := sides.get(side):
                steps.append([label, side, *(spread(seconds(runs, phase)) for phase in PHASES), len(runs)])
                work.append([label, side, *(middle(count(run, name) for run in runs) for name in COUNTS)])
        if "bare" in sides and "ours" in sides:
            ceilings.append([label, *ceiling(sides)])
    return [
        "TRL's time divided by Turnstile's, pair by pair (median and range):",
        table(("case, trained weights", "step", "goal", "rollout", "goal", "training", "step, by new token"), both),
        "Seconds of a step:",
        table(("case", "side", *PHASES, "runs"), steps),
        "The work of that step:",
        table(("case", "side", *COUNTS), work),
        "The time of a step at the bare rates of the same machine (seconds, then tokens a second):",
        table(("case", "ours", "ceiling", "reached", "decode", "prefill", "train", "optimiser"), ceilings),
    ]  # fmt: skip


def by_case(results: Mapping[str, Body]) -> dict[tuple[str, str], dict[str, list[Body]]]:
    """The measurements of each side, by case and what learns, in the order of the tables."""
    found: dict[tuple[str, str], dict[str, list[Body]]] = {}
    for key, body in sorted(results.items()):
        case, train, side, _ = key.split()
        found.setdefault((case, train), {}).setdefault(side, []).append(body)
    learns = ("all", "top", "lora")
    order = sorted(found, key=lambda one: (learns.index(one[1]), *map(int, reversed(one[0].split("x")))))
    return {one: found[one] for one in order}


PHASES = ("step", "rollout", "generate", "environment", "train", "rest")
COUNTS = (
    "episodes",
    "turns",
    "new tokens",
    "computed tokens",
    "wrong guesses",
    "rows tokens",
    "trained tokens",
    "flat groups",
    "peak MB",
)


def count(run: Body, name: str) -> float | None:
    """What a step did. Guesses are in its own metrics, which one side has, and not of all steps."""
    if name != "wrong guesses":
        return float(run[name])
    told = run.get("metrics", {})
    return told["tokens/speculated"] - told["tokens/speculated_accepted"] if "tokens/speculated" in told else None


def middle(found: Iterable[float | None]) -> str:
    """The median of what is known."""
    known = [each for each in found if each is not None]
    return f"{statistics.median(known):.0f}" if known else "-"


def seconds(runs: Sequence[Body], phase: str) -> list[float]:
    return [run["seconds"][phase] for run in runs]


def ratios(one: tuple[str, str], sides: dict[str, list[Body]]) -> list[str]:
    goals = ["-" if goal is None else f"{goal:g}" for goal in goals_of(*one)]
    step, rollout, train = (spread(pairs(sides, phase), 2) for phase in ("step", "rollout", "train"))
    ours, theirs = ([run["seconds"]["step"] / run["new tokens"] for run in sides[side]] for side in ("ours", "theirs"))
    by_token = spread([b / a for a, b in zip(ours, theirs, strict=False)], 2)
    return [", ".join(one), step, goals[0], rollout, goals[1], train, by_token]


def goals_of(case: str, train: str) -> tuple[float | None, float | None]:
    """How many times faster a step is to be, and a rollout."""
    return GOALS.get(case, (None, None)) if train == "all" else (4, None)


def pairs(sides: Mapping[str, list[Body]], phase: str) -> list[float]:
    """How many times theirs takes of ours, pair by pair."""
    ours, theirs = (seconds(sides.get(side, []), phase) for side in ("ours", "theirs"))
    return [b / a for a, b in zip(ours, theirs, strict=False)]


def ceiling(sides: dict[str, list[Body]]) -> list[str]:
    """Our step beside what follows for the same tokens from the bare rates."""
    rate = {
        name: statistics.median(run["rates"][name] for run in sides["bare"])
        for name in ("decode", "prefill", "train", "optimizer seconds")
    }
    count = {
        name: statistics.median(run[name] for run in sides["ours"])
        for name in ("new tokens", "computed tokens", "trained tokens")
    }
    step = statistics.median(seconds(sides["ours"], "step"))
    bare = (
        count["new tokens"] / rate["decode"]
        + (count["computed tokens"] - count["new tokens"]) / rate["prefill"]
        + count["trained tokens"] / rate["train"]
        + rate["optimizer seconds"]
    )
    shown = [f"{rate[name]:.0f}" for name in ("decode", "prefill", "train")]
    return [f"{step:.1f}", f"{bare:.1f}", f"{bare / step:.0%}", *shown, f"{rate['optimizer seconds']:.2f} s"]


if __name__ == "__main__":
    main()
