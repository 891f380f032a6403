"""`make results`: the demo's question asked properly. Several seeds, two samples a bug, D-RA beside G-RA.

For each seed: one warm start, then RL from that same warm start with gated (G-RA) and with direct (D-RA)
rewards; everything else is recipes/demo.toml. It takes hours on two cores. Each part is a run of its own in
runs/results/, done before is done, and the command goes on where it was stopped. The tables below the
mark in docs/results/demo.md are written anew from whatever is finished (`--tables` does only that).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from turnstile.build.run_folder import read_results
from turnstile.evaluation.gains import paired_breakdown, prior_share, split
from turnstile.evaluation.metrics import EpisodeResult, Interval, paired_difference, rate
from turnstile.evaluation.plots import curves
from turnstile.evaluation.table import bounds, number
from turnstile.tasks.base import load_tasks
from turnstile.tracking.jsonl import read_metrics

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "recipes/demo.toml"
RUNS = Path("runs/results")
PAGE = Path("docs/results/demo.md")
MARK = "<!-- below: written by benchmarks/results.py -->"
ARMS = {"gated": "G-RA", "direct": "D-RA"}
Results = list[EpisodeResult]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--tables", action="store_true", help="only write the tables of what is there")
    args = parser.parse_args()
    if not args.tables:
        for arm in args.arms:  # an arm is whole before the next begins, so that a stopped run says something
            for seed in range(args.seeds):
                warm_start(seed, args.samples)
                reinforce(seed, arm, args.steps, args.samples)
                write_page()
    write_page()


def warm_start(seed: int, samples: int) -> None:
    """The baselines (once) and the warm start of a seed, evaluated."""
    policies = [] if seed == 0 else ["eval.policies={}"]
    turnstile(f"seed-{seed}-warm", f"seed={seed}", "train.steps=0", f"eval.samples={samples}", *policies)


def reinforce(seed: int, arm: str, steps: int, samples: int) -> None:
    """RL from the seed's warm start."""
    warm = RUNS / f"seed-{seed}-warm" / "checkpoints" / "step-000000" / "model"
    turnstile(
        f"seed-{seed}-{arm}",
        f"seed={seed}",
        f"model.id={warm.resolve()}",
        "warmstart.demos=0",
        "eval.before=false",
        "eval.policies={}",
        f"rewards.compose={arm}",
        f"train.steps={steps}",
        f"eval.samples={samples}",
    )


def turnstile(name: str, *overrides: str) -> None:
    """One run in a process of its own, so that memory is given back."""
    print(f"== {name}", flush=True)
    command = [sys.executable, "-m", "turnstile", "train", RECIPE, *overrides, "--out", str(RUNS / name)]
    subprocess.run(command, check=True, cwd=ROOT)


def write_page() -> None:
    """Replaces what stands below the mark of the page, and the curves beside it."""
    seeds = sorted(
        int(path.name.split("-")[1]) for path in RUNS.glob("seed-*-warm") if "warmstart" in read_results(path)
    )
    arms = {arm: [s for s in seeds if "trained" in read_results(RUNS / f"seed-{s}-{arm}")] for arm in ARMS}
    if not any(arms.values()):
        return
    text = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    parts = [rates_table(seeds, arms), *[gains_text(arm, done) for arm, done in arms.items() if done]]
    if set(arms["gated"]) & set(arms["direct"]):
        parts.append(compared(sorted(set(arms["gated"]) & set(arms["direct"]))))
    runs = {ARMS[arm]: [read_metrics(RUNS / f"seed-{s}-{arm}") for s in done] for arm, done in arms.items() if done}
    (PAGE.parent / "demo-curves.png").write_bytes(curves(runs))
    parts.append("![Learning curves by arm: mean over seeds, band from the lowest to the highest](demo-curves.png)")
    PAGE.write_text(f"{text}{MARK}\n\n" + "\n\n".join(parts) + "\n", encoding="utf-8")
    print(f"wrote {PAGE}", flush=True)


def warm(seeds: Sequence[int]) -> Results:
    return [result for seed in seeds for result in read_results(RUNS / f"seed-{seed}-warm")["warmstart"]]


def trained(arm: str, seeds: Sequence[int]) -> Results:
    return [result for seed in seeds for result in read_results(RUNS / f"seed-{seed}-{arm}")["trained"]]


def rates_table(seeds: Sequence[int], arms: dict[str, list[int]]) -> str:
    """Every policy and every seed, with intervals clustered by bug."""
    first = read_results(RUNS / f"seed-{seeds[0]}-warm")
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
