"""The first table of docs/results/performance.md: each goal, and what is kept of the benchmarks that measure it.

    python -m benchmarks.speed.goals

A goal is reached where the median of its measurements reaches it, and one for several cases where all of them do; how
many do is said where that is not all.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.page import Kept, spread, table, write
from benchmarks.peers import vs_trl
from benchmarks.speed import forest, gpu_speed, latency, turns


@dataclass(frozen=True, kw_only=True)
class Goal:
    what: str
    goal: float
    values: Sequence[float]  # one a measurement
    most: bool = False  # the goal is an upper bound
    digits: int = 2
    style: Literal["f", "%"] = "f"
    unit: str = ""
    of: str  # what measurements are called; "cases" are not of one thing

    def row(self) -> list[str]:
        bound = f"{'at most ' if self.most else ''}{self.goal:{'.0%' if self.style == '%' else 'g'}}{self.unit}"
        if not self.values:
            return [self.what, bound, "not measured"]
        on_step_start: Callable[[float], bool] = (lambda v: v <= self.goal) if self.most else (lambda v: v >= self.goal)
        many, good = len(self.values), sum(map(on_step_start, self.values))
        of = self.of if many > 1 else self.of.removesuffix("s")
        whole = good == many if self.of == "cases" else on_step_start(statistics.median(self.values))
        said = "reached" if whole else "**not in all**" if self.of == "cases" and good else "**not reached**"
        count = f"{many} {of}" if good in (0, many) else f"{good} of {many} {of}"
        return [self.what, bound, f"{spread(self.values, self.digits, self.style)}: {said}, {count}"]


def goals() -> Iterator[Goal]:
    yield from beside_trl()
    yield from of_tools_and_turns()
    yield from of_training()
    yield from of_decoding()
    yield of_accelerators()


def beside_trl() -> Iterator[Goal]:
    cases = vs_trl.by_case(Kept("vs_trl").results)
    learns = {"all": "", "top": ", top layers", "lora": ", adapters"}
    for phase, place in (("step", 0), ("rollout", 1)):
        for (case, train), sides in cases.items():
            goal = vs_trl.goals_of(case, train)[place]
            if goal is not None:
                episodes, rounds = case.split("x")
                what = f"times faster than TRL: a {phase} of {episodes} episodes, {rounds} rounds{learns[train]}"
                yield Goal(what=what, goal=goal, values=vs_trl.pairs(sides, phase), of="pairs")
    rest = [
        run["seconds"]["rest"] / run["seconds"]["step"] for sides in cases.values() for run in sides.get("ours", [])
    ]
    what = "a step's time without generation, environment and training"
    yield Goal(what=what, goal=0.03, values=rest, most=True, digits=1, style="%", of="steps")


def of_tools_and_turns() -> Iterator[Goal]:
    for case, goal in latency.GOALS.items():
        values = [
            body["seconds"]
            for key, body in Kept("latency").results.items()
            if key.startswith(f"{case} ours")
        ]  # fmt: skip
        what = f"{case.replace('x', ' episodes of ')} turns with a tool of {latency.SLEEP} s"
        yield Goal(what=what, goal=round(goal, 3), values=values, most=True, unit=" s", of="rollouts")
    runs = list(Kept("turns").results.values())
    what = "tokens computed in a rollout, of those in its prefix tree"
    yield Goal(
        what=what, goal=1, values=[run["computed"] / run["tree"] for run in runs], most=True, digits=4, of="runs"
    )
    what = f"times what turn {turns.EARLY} takes: turn {turns.LATE}, without attention"
    yield Goal(what=what, goal=1.5, values=turns.late_by_early(runs, aside=True), most=True, of="runs")


def of_training() -> Iterator[Goal]:
    found = [one for point in forest.POINTS if (one := forest.Found(point, Kept("forest").results)).repeats]
    yield Goal(
        what="speed-up by shared prefixes, of the ratio of FLOPs",
        goal=0.85, values=[one.speed_up() / one.ideal() for one in found], digits=0, style="%", of="cases",
    )  # fmt: skip
    for plain in ("batches", "rows"):
        values = [statistics.median(one.ratios(plain, "unshared")) for one in found if plain in one.by]
        what = f"unshared training, of the speed of a plain loop of {plain}"
        yield Goal(what=what, goal=0.95, values=values, digits=0, style="%", of="cases")
    for kind, which in (("allocated", forest.Found.allocated), ("resident", forest.Found.resident)):
        pairs = [(which(one, "unshared"), which(one, one.widest())) for one in found]
        values = [ours / theirs for ours, theirs in pairs if ours is not None and theirs is not None]
        what = f"memory of unshared training, of that loop's, {kind}"
        yield Goal(what=what, goal=1, values=values, most=True, digits=1, style="%", of="cases")


def of_decoding() -> Iterator[Goal]:
    kept = Kept("decode").results.get("smollm2-135m 32x64x1")
    for beside, goal in (("generate", 2.5), ("by hand", 0.8)):
        rates = kept["rates"] if kept else {"engine": [], beside: []}
        values = [one / other for one, other in zip(rates["engine"], rates[beside], strict=True)]
        yield Goal(what=f"decoding at batch 32, times `{beside}`", goal=goal, values=values, of="repeats")


def of_accelerators() -> Goal:
    kept = Kept("gpu_speed").results.values()
    values = [
        body["training"]["shared"]["utilisation"] for body in kept if gpu_speed.shape_of(body) == "8 x (4096 + 4096)"
    ]
    what = "training on an accelerator, of its matrix peak"
    return Goal(what=what, goal=0.45, values=values, digits=0, style="%", of="cases")


def parts() -> list[str]:
    return [table(("", "goal", "measured (median and range)"), [goal.row() for goal in goals()])]


if __name__ == "__main__":
    write("goals", parts())
