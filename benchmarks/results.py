"""`make results`: the demo's question asked properly. Several seeds, every held-out bug, D-RA beside G-RA.

For each seed: one warm start, then RL from that same warm start with gated (G-RA) and with direct (D-RA)
rewards; everything else is recipes/demo.toml. It takes hours on two cores. Each part is a run of its own in
runs/results/, and the command goes on where it was stopped. What a finished run came to (its metrics and
evaluations, no weights) is kept in docs/results/demo/, which is part of the project: another machine goes on
from there, making a warm start's weights anew where it needs them. The tables below the mark in
docs/results/demo.md are written from what is kept (`--tables` does only that).
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from turnstile.build.run_folder import read_results, versions
from turnstile.evaluation.gains import paired_breakdown, prior_share, split
from turnstile.evaluation.metrics import EpisodeResult, Interval, paired_difference, rate
from turnstile.evaluation.plots import curves
from turnstile.evaluation.table import bounds, number
from turnstile.tasks.base import load_tasks
from turnstile.tracking.jsonl import read_metrics

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "recipes/demo.toml"
RUNS = Path("runs/results")
KEPT = Path("docs/results/demo")
PAGE = Path("docs/results/demo.md")
MARK = "<!-- below: written by benchmarks/results.py -->"
ARMS = {"gated": "G-RA", "direct": "D-RA"}
OTHER_SEEDS = ["eval.policies={}", "eval.baseline_tasks=1"]  # the baselines do not depend on it
Results = list[EpisodeResult]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--tasks", type=int, default=0, help="held-out bugs; 0: all")
    parser.add_argument("--samples", type=int, default=1, help="episodes a bug")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--jobs", type=int, default=1, help="runs at once (5 GB each), which share the cores")
    parser.add_argument("--tables", action="store_true", help="only write the tables of what is kept")
    args = parser.parse_args()
    os.chdir(ROOT)
    if not args.tables:
        threads = max(1, (os.cpu_count() or 1) // args.jobs) if args.jobs > 1 else 0
        study = Study(steps=args.steps, tasks=args.tasks, samples=args.samples, threads=threads)
        with ThreadPoolExecutor(args.jobs) as pool:
            for arm in args.arms:  # an arm is whole before the next begins, so that a stopped study says something
                for _ in pool.map(lambda seed, arm=arm: study.reinforce(seed, arm), range(args.seeds)):
                    write_page()
    write_page()


@dataclass(frozen=True, kw_only=True)
class Study:
    """What all runs share."""

    steps: int
    tasks: int
    samples: int
    threads: int

    def reinforce(self, seed: int, arm: str) -> None:
        """RL from the seed's warm start, which is made and evaluated first."""
        warm, name = f"seed-{seed}-warm", f"seed-{seed}-{arm}"
        first = [f"seed={seed}", "train.steps=0", *(OTHER_SEEDS if seed else [])]
        self.run(warm, first)
        weights = RUNS / warm / "checkpoints" / "step-000000" / "model"
        if not kept(name).is_file() and not weights.is_dir():  # evaluated elsewhere
            turnstile(warm, [*first, "eval.before=false", *self.common()])
        rest = ["warmstart.demos=0", "eval.before=false", "eval.policies={}", f"rewards.compose={arm}"]
        self.run(name, [f"seed={seed}", f"model.id={weights.resolve()}", *rest, f"train.steps={self.steps}"])

    def run(self, name: str, overrides: list[str]) -> None:
        """One run, unless it is kept; then keeps what it came to."""
        if kept(name).is_file():
            return
        turnstile(name, [*overrides, *self.common()])
        folder = RUNS / name
        body = {
            "versions": versions(),
            "costs": json.loads((folder / "costs.json").read_text(encoding="utf-8")),
            "metrics": read_metrics(folder),
            "evaluations": {key: [asdict(one) for one in found] for key, found in read_results(folder).items()},
        }
        KEPT.mkdir(parents=True, exist_ok=True)
        scratch = kept(name).with_suffix(".writing")
        scratch.write_bytes(gzip.compress(json.dumps(body).encode(), mtime=0))
        scratch.replace(kept(name))

    def common(self) -> list[str]:
        return [f"eval.tasks={self.tasks}", f"eval.samples={self.samples}", f"model.threads={self.threads}"]


def turnstile(name: str, overrides: Sequence[str]) -> None:
    """One run in a process of its own, so that memory is given back."""
    print(f"== {name}", flush=True)
    command = [sys.executable, "-m", "turnstile", "train", RECIPE, *overrides, "--out", str(RUNS / name)]
    subprocess.run(command, check=True)


def kept(name: str) -> Path:
    return KEPT / f"{name}.json.gz"


def read_kept(name: str) -> dict[str, Any]:
    """What a run came to; empty if it is not finished."""
    if not kept(name).is_file():
        return {}
    body: dict[str, Any] = json.loads(gzip.decompress(kept(name).read_bytes()))
    found = {key: [EpisodeResult(**one) for one in many] for key, many in body["evaluations"].items()}
    return {**body, "evaluations": found}


def write_page() -> None:
    """Replaces what stands below the mark of the page, and the curves beside it."""
    seeds = sorted(int(path.name.split("-")[1]) for path in KEPT.glob("seed-*-warm.json.gz"))
    arms = {arm: [seed for seed in seeds if kept(f"seed-{seed}-{arm}").is_file()] for arm in ARMS}
    if not any(arms.values()):
        return
    text = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    parts = [rates_table(seeds, arms), *[gains_text(arm, done) for arm, done in arms.items() if done]]
    if set(arms["gated"]) & set(arms["direct"]):
        parts.append(compared(sorted(set(arms["gated"]) & set(arms["direct"]))))
    runs = {ARMS[arm]: [read_kept(f"seed-{s}-{arm}")["metrics"] for s in done] for arm, done in arms.items() if done}
    (PAGE.parent / "demo-curves.png").write_bytes(curves(runs))
    parts.append("![Learning curves by arm: mean over seeds, band from the lowest to the highest](demo-curves.png)")
    PAGE.write_text(f"{text}{MARK}\n\n" + "\n\n".join(parts) + "\n", encoding="utf-8")
    print(f"wrote {PAGE}", flush=True)


def warm(seeds: Sequence[int]) -> Results:
    return [result for seed in seeds for result in read_kept(f"seed-{seed}-warm")["evaluations"]["warmstart"]]


def trained(arm: str, seeds: Sequence[int]) -> Results:
    return [result for seed in seeds for result in read_kept(f"seed-{seed}-{arm}")["evaluations"]["trained"]]


def rates_table(seeds: Sequence[int], arms: dict[str, list[int]]) -> str:
    """Every policy and every seed, with intervals clustered by bug."""
    first = read_kept(f"seed-{seeds[0]}-warm")["evaluations"]
    rows: list[tuple[str, Results]] = [
        (name, first[key])
        for key, name in (("untouched", "untouched model"), ("random", "random agent"), ("oracle", "oracle"))
        if key in first
    ]
    rows += [(f"after warm start, seed {seed}", warm([seed])) for seed in seeds]
    rows += [(f"after RL, {ARMS[arm]}, seed {s}", trained(arm, [s])) for arm, done in arms.items() for s in done]
    rows.append((f"**after warm start, {len(seeds)} seeds**", warm(seeds)))
    rows += [(f"**after RL, {ARMS[arm]}, {len(d)} seeds**", trained(arm, d)) for arm, d in arms.items() if d]
    lines = ["## Rates on held-out bugs", "", "| policy | completion | modification | resolution | bugs | episodes |"]
    lines.append("|---|---|---|---|---|---|")
    for name, results in rows:
        cells = [shown(rate(results, field)) for field in ("completion", "modification", "resolution")]
        bugs = len({result.task_id for result in results})
        lines.append(f"| {name} | {' | '.join(cells)} | {bugs} | {len(results)} |")
    return "\n".join(lines)


def gains_text(arm: str, seeds: Sequence[int]) -> str:
    """The gain over the warm start, paired by bug: over all, by kind and by package."""
    before, after = warm(seeds), trained(arm, seeds)
    lines = [f"## What RL with {ARMS[arm]} gained over the warm start", "", "Paired by bug, 95 % intervals."]
    lines += ["", "| rate | gain |", "|---|---|"]
    lines += [
        f"| {field} | {shown(paired_difference(before, after, field), signed=True)} |"
        for field in ("completion", "modification", "resolution")
    ]
    for by in ("kind", "package"):
        parts, sizes = paired_breakdown(before, after, by), split(after, by)
        lines += ["", f"| {by} | bugs | resolution before | after | gain |", "|---|---|---|---|---|"]
        for name, gain in parts.items():
            old = rate(split(before, by)[name], "resolution").mean
            new = rate(sizes[name], "resolution").mean
            lines.append(f"| {name} | {gain.n_tasks} | {number(old)} | {number(new)} | {shown(gain, signed=True)} |")
    counts: dict[str, int] = {}
    for task in load_tasks(ROOT / "data/demo/train.jsonl"):
        counts[str(task.data["kind"])] = counts.get(str(task.data["kind"]), 0) + 1
    share = prior_share(before, after, counts)
    for top in (share.top1, share.top3):
        kinds = f"the {len(top.kinds)} kinds" if len(top.kinds) > 1 else "the kind"
        lines += [
            "",
            f"Of the {shown(share.gain, signed=True)} gained in resolution, {shown(top.contribution, signed=True)} "
            f"lies in {kinds} most frequent in training ({', '.join(top.kinds)}; {top.task_share:.0%} of the bugs).",
        ]
    return "\n".join(lines)


def compared(seeds: Sequence[int]) -> str:
    """G-RA against D-RA from the same warm starts."""
    lines = ["## G-RA against D-RA", "", f"The same warm starts (seeds {', '.join(map(str, seeds))}), paired by bug."]
    lines += ["", "| rate | G-RA minus D-RA |", "|---|---|"]
    for field in ("completion", "modification", "resolution"):
        gap = paired_difference(trained("direct", seeds), trained("gated", seeds), field)
        lines.append(f"| {field} | {shown(gap, signed=True)} |")
    return "\n".join(lines)


def shown(interval: Interval, *, signed: bool = False) -> str:
    return f"{number(interval.mean, signed=signed)} {bounds(interval)}"


if __name__ == "__main__":
    main()
