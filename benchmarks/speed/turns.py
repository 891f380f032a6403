"""What a turn costs late in a long episode: the tokens a rollout computes, and seconds by turn.

    python -m benchmarks.speed.turns            4 episodes of 44 turns, three times
    python -m benchmarks.speed.turns --tables   only writes the table and the plot of what is kept

Every turn samples the same number of tokens and is answered with the same words, so that turns differ in nothing but
the history before them. Computed tokens are what the engine ran through the model; the tree's are the different
histories there were, counted from the episodes; asked are those of a peer that computes every prompt anew.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from torch import Tensor

from benchmarks.page import KEPT, Body, Kept, spread, table, write
from turnstile.agents.base import Scaffold
from turnstile.agents.parsing.lines import LineParser
from turnstile.agents.renderer import LinesRenderer
from turnstile.engines.local.layout import CacheLayout
from turnstile.engines.local.transformers import TransformersEngine
from turnstile.envs.base import Start, Step
from turnstile.models.load import load_model, load_tokenizer
from turnstile.rollout.episode import Limits
from turnstile.rollout.group import Player
from turnstile.types import JSON, Message, Sampling, Task, Trajectory

EPISODES, TURNS, TOKENS = 4, 44, 16  # tokens sampled in each turn
EARLY, LATE = 4, 40
AROUND = 2  # turns before and after those two, for a median
ANSWER = "that was heard, and nothing came of it; go on and say what you would look at next"


class Talk:
    """Answers whatever is said with the same words, for ever. `attended` notes, turn by turn, the engine's seconds in
    attention until then."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.attended: list[float] = []

    async def reset(self, task: Task) -> Start:
        self.attended.append(self._clock.seconds)
        return Start(messages=(Message(role="user", content="Say what you would do, a line at a time."),))

    async def step(self, message: Message) -> Step:
        self.attended.append(self._clock.seconds)
        return Step(messages=(Message(role="user", content=ANSWER),))

    async def measure(self) -> Mapping[str, JSON]:
        return {}

    def state_key(self) -> str:
        return ""

    async def close(self) -> None:
        pass


class Clock:
    """Inside, counts the seconds that the engine spends in attention."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._attend = CacheLayout.attend

    def __enter__(self) -> Clock:
        def timed(layout: CacheLayout, *arguments: Any) -> Tensor:
            began = time.perf_counter()
            out = self._attend(layout, *arguments)
            self.seconds += time.perf_counter() - began
            return out

        CacheLayout.attend = timed  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        CacheLayout.attend = self._attend  # type: ignore[method-assign]


class Unstopped(LinesRenderer):
    """Lines that only the limit of tokens ends, so that all turns are of one length."""

    stop: tuple[str, ...] = ()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--again", action="store_true", help="measure again what is kept")
    parser.add_argument("--tables", action="store_true", help="only write the table and the plot of what is kept")
    args = parser.parse_args()
    kept = Kept("turns")
    missing = [repeat for repeat in range(args.repeats) if args.again or str(repeat) not in kept.results]
    if missing and not args.tables:
        tokenizer = load_tokenizer(args.model)
        engine = TransformersEngine(
            load_model(args.model), tokenizer, speculative_tokens=0
        )  # every token by a pass of its own
        asyncio.run(play(engine, tokenizer, seed=99, turns=2))  # warms up
        for repeat in missing:
            kept.put(str(repeat), asyncio.run(play(engine, tokenizer, seed=repeat, turns=TURNS)))
            print(kept.results[str(repeat)], flush=True)
    if kept.results:
        plot(list(kept.results.values()))
    write("turns", parts(kept.results))


async def play(engine: TransformersEngine, tokenizer: Any, *, seed: int, turns: int) -> Body:
    """One group of episodes, and what they took and computed."""
    talks: list[Talk] = []

    def talk() -> Talk:
        talks.append(Talk(clock))
        return talks[-1]

    clock = Clock()
    player = Player(
        make_env=talk,
        engine=engine,
        scaffold=Scaffold(Unstopped(tokenizer), LineParser()),
        sampling=Sampling(max_tokens=TOKENS),
        limits=Limits(turns=turns, seconds=0),
        retries=0,
    )
    engine.take_stats()
    with clock:
        (group,) = await player.groups([Task(id="talk", env="talk")], EPISODES, label=f"turns/{seed}", seed=seed)
    stats = engine.take_stats()
    episodes = group.trajectories
    by_turn = [statistics.median(t.turns[i].completion.seconds for t in episodes) for i in range(turns)]
    attended = np.median([np.diff(talk.attended, append=clock.seconds)[:turns] for talk in talks], axis=0)
    return {
        "seconds": [round(value, 4) for value in by_turn],
        "attention": [round(float(value), 4) for value in attended],
        "computed": int(stats["tokens_computed"]),
        "tree": tree(episodes),
        "asked": int(stats["tokens_asked"] + stats["tokens_sampled"]),
        "longest": max(len(tokens(episode)) for episode in episodes),
    }


def tokens(episode: Trajectory) -> list[int]:
    """All that the episode's last turn has seen and said but its last token, which nothing follows."""
    parts = [part for turn in episode.turns for part in (turn.context_ids, turn.completion.token_ids)]
    found: list[int] = np.concatenate(parts)[:-1].tolist()
    return found


def tree(episodes: Sequence[Trajectory]) -> int:
    """The different non-empty histories in the episodes."""
    names: dict[tuple[int, int], int] = {}
    for episode in episodes:
        here = -1
        for token in tokens(episode):
            here = names.setdefault((here, token), len(names))
    return len(names)


def parts(results: Mapping[str, Body]) -> list[str]:
    runs = list(results.values())
    if not runs:
        return []
    early, late = ([at(run["seconds"], turn) for run in runs] for turn in (EARLY, LATE))
    rows = [
        ["tokens computed / in the tree", spread([run["computed"] / run["tree"] for run in runs], 4), "1"],
        ["tokens asked for / computed", spread([run["asked"] / run["computed"] for run in runs], 1), "-"],
        [f"seconds of turn {EARLY}", spread(early, 2), "-"],
        [f"seconds of turn {LATE}", spread(late, 2), "-"],
        [f"turn {LATE} / turn {EARLY}", spread(late_by_early(runs), 2), "-"],
        [f"turn {LATE} / turn {EARLY}, attention aside", spread(late_by_early(runs, aside=True), 2), "at most 1.5"],
    ]
    longest = max(run["longest"] for run in runs)
    return [
        f"{EPISODES} episodes of {TURNS} turns, {TOKENS} sampled tokens a turn, up to {longest} tokens long:",
        table(("", "median (range)", "goal"), rows),
        "![Seconds by turn](performance/turns.svg)",
    ]


def late_by_early(runs: Sequence[Body], *, aside: bool = False) -> list[float]:
    """What a late turn of each run takes of what an early one takes, attention left out if it is to be `aside`."""
    found = []
    for run in runs:
        seconds = np.subtract(run["seconds"], run["attention"]) if aside else run["seconds"]
        found.append(at(seconds, LATE) / at(seconds, EARLY))
    return found


def at(seconds: Sequence[float], turn: int) -> float:
    """Seconds of the turn (from 1), the median of those around it."""
    return float(np.median(seconds[turn - 1 - AROUND : turn + AROUND]))


def plot(runs: Sequence[Body]) -> None:
    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "turns"  # the same drawing gives the same file
    figure, axes = pyplot.subplots(figsize=(6.4, 3.2), layout="constrained")
    turns = range(1, len(runs[0]["seconds"]) + 1)
    whole = [np.array(run["seconds"]) for run in runs]
    aside = [np.subtract(run["seconds"], run["attention"]) for run in runs]
    for curves, color, label in ((whole, "tab:blue", "all"), (aside, "tab:orange", "attention aside")):
        for curve in curves:
            axes.plot(turns, curve, ".", color=color, alpha=0.4)
        axes.plot(turns, np.median(curves, axis=0), color=color, label=f"{label}, median")
    axes.set(xlabel="turn", ylabel="seconds a turn", ylim=(0, None))
    axes.legend()
    figure.savefig(KEPT / "turns.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
