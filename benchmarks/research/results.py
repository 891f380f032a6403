"""`make results`: the demo's question asked properly. Several seeds, every held-out bug, D-RA beside G-RA.

For each seed: one warm start, then RL from that same warm start with gated (G-RA) and with direct (D-RA)
rewards; everything else is recipes/demo.toml. It takes hours on two cores. Each part is a run of its own in
runs/results/, and the command goes on where it was stopped. What a finished run came to (its recipe, metrics and
evaluations, no weights) is kept in docs/results/demo/, which is part of the project. The tables below the mark in
docs/results/demo.md are written from what is kept (`--tables` does only that).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.research.study import ARMS, KEPT, ROOT, Study, kept, run_of, warm
from turnstile.evaluation.gains import paired_breakdown, prior_share, split
from turnstile.evaluation.metrics import EpisodeResult, Interval, paired_difference, rate
from turnstile.evaluation.plots import curves
from turnstile.evaluation.table import bounds, number
from turnstile.tasks.base import load_tasks

PAGE = Path("docs/results/demo.md")
MARK = "<!-- below: generated, do not edit -->"
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
    threads = max(1, (os.cpu_count() or 1) // args.jobs) if args.jobs > 1 else 0
    study = Study(steps=args.steps, tasks=args.tasks, samples=args.samples, threads=threads)
    if not args.tables:
        with ThreadPoolExecutor(args.jobs) as pool:
            for arm in args.arms:  # an arm is whole before the next begins, so that a stopped study says something
                for _ in pool.map(lambda seed, arm=arm: study.reinforce(seed, arm), range(args.seeds)):
                    Page(study).write()
    Page(study).write()


class Page:
    """What is kept of a study, as tables."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.seeds = sorted(int(path.name.split("-")[1]) for path in KEPT.glob("seed-*-warm.json.gz"))
        self.arms = {arm: [seed for seed in self.seeds if kept(run_of(seed, arm)).is_file()] for arm in ARMS}

    def write(self) -> None:
        """Replaces what stands below the mark of the page, and the curves beside it."""
        done = {arm: seeds for arm, seeds in self.arms.items() if seeds}
        if not done:
            return
        text = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
        parts = [self.rates(), *[self.gains(arm) for arm in done]]
        if both := sorted(set(self.arms["gated"]) & set(self.arms["direct"])):
            parts.append(self.compared(both))
        runs = {ARMS[arm]: [self.study.read(run_of(s, arm))["metrics"] for s in seeds] for arm, seeds in done.items()}
        (PAGE.parent / "demo-curves.png").write_bytes(curves(runs))
        parts.append("![Learning curves by arm: mean over seeds, band from the lowest to the highest](demo-curves.png)")
        PAGE.write_text(f"{text}{MARK}\n\n" + "\n\n".join(parts) + "\n", encoding="utf-8")
        print(f"wrote {PAGE}", flush=True)

    def warm(self, seeds: Sequence[int]) -> Results:
        return [result for seed in seeds for result in self.study.read(warm(seed))["evaluations"]["warmstart"]]

    def trained(self, arm: str, seeds: Sequence[int]) -> Results:
        return [result for s in seeds for result in self.study.read(run_of(s, arm))["evaluations"]["trained"]]

    def rates(self) -> str:
        """Every policy and every seed, with intervals clustered by bug."""
        seeds, arms = self.seeds, self.arms
        first = self.study.read(warm(seeds[0]))["evaluations"]
        rows: list[tuple[str, Results]] = [
            (name, first[key])
            for key, name in (("untouched", "untouched model"), ("random", "random agent"), ("oracle", "oracle"))
            if key in first
        ]
        rows += [(f"after warm start, seed {seed}", self.warm([seed])) for seed in seeds]
        rows += [
            (f"after RL, {ARMS[arm]}, seed {s}", self.trained(arm, [s])) for arm, done in arms.items() for s in done
        ]
        rows.append((f"**after warm start, {len(seeds)} seeds**", self.warm(seeds)))
        rows += [(f"**after RL, {ARMS[arm]}, {len(d)} seeds**", self.trained(arm, d)) for arm, d in arms.items() if d]
        lines = ["## Rates on held-out bugs", ""]
        lines += ["| policy | completion | modification | resolution | bugs | episodes |", "|---|---|---|---|---|---|"]
        for name, results in rows:
            cells = [shown(rate(results, field)) for field in ("completion", "modification", "resolution")]
            bugs = len({result.task_id for result in results})
            lines.append(f"| {name} | {' | '.join(cells)} | {bugs} | {len(results)} |")
        return "\n".join(lines)

    def gains(self, arm: str) -> str:
        """The gain over the warm start, paired by bug: over all, by kind and by package."""
        seeds = self.arms[arm]
        before, after = self.warm(seeds), self.trained(arm, seeds)
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
                lines.append(
                    f"| {name} | {gain.n_tasks} | {number(old)} | {number(new)} | {shown(gain, signed=True)} |"
                )
        counts: dict[str, int] = {}
        for task in load_tasks(ROOT / "data/demo/train.jsonl"):
            counts[str(task.data["kind"])] = counts.get(str(task.data["kind"]), 0) + 1
        share = prior_share(before, after, counts)
        for top in (share.top1, share.top3):
            kinds = f"the {len(top.kinds)} kinds" if len(top.kinds) > 1 else "the kind"
            all_of_it, part = shown(share.gain, signed=True), shown(top.contribution, signed=True)
            where = f"{kinds} most frequent in training ({', '.join(top.kinds)}; {top.task_share:.0%} of the bugs)"
            lines += ["", f"Of the {all_of_it} gained in resolution, {part} comes from {where}."]
        return "\n".join(lines)

    def compared(self, seeds: Sequence[int]) -> str:
        """G-RA against D-RA from the same warm starts."""
        same = f"The same warm starts (seeds {', '.join(map(str, seeds))}), paired by bug."
        lines = ["## G-RA against D-RA", "", same, "", "| rate | G-RA minus D-RA |", "|---|---|"]
        for field in ("completion", "modification", "resolution"):
            gap = paired_difference(self.trained("direct", seeds), self.trained("gated", seeds), field)
            lines.append(f"| {field} | {shown(gap, signed=True)} |")
        return "\n".join(lines)


def shown(interval: Interval, *, signed: bool = False) -> str:
    return f"{number(interval.mean, signed=signed)} {bounds(interval)}"


if __name__ == "__main__":
    main()
