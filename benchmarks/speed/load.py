"""Many episodes at once without a model: what the rollout itself costs in time and memory.

    python -m benchmarks.speed.load            2,000 episodes of 20 turns at once, five times over
    python -m benchmarks.speed.load --tables   only writes the table of what is kept

The engine is scripted and the tool answers at once, after giving the others a turn; episodes are recorded as in a run.
What is left is rendering, parsing, the loop and the record. Memory is that of the process at its highest, above what it
held before the first episode; that it does not grow from round to round is what bounds it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.page import Body, Kept, spread, table, write
from turnstile.agents.base import Scaffold
from turnstile.agents.parsing.lines import LineParser
from turnstile.agents.renderer import LinesRenderer
from turnstile.engines.scripted import ScriptedEngine
from turnstile.envs.base import Start, Step
from turnstile.models.load import load_tokenizer
from turnstile.records.record import Recorder
from turnstile.rollout.episode import Limits
from turnstile.rollout.group import Player
from turnstile.types import Group, Message, Sampling, Score, Task, ToolSpec

TOOL = ToolSpec(name="look", description="Look.", schema={"type": "object", "properties": {}})
ANSWER = "the list of what is here goes on for a while and ends with a number: 17"
ATTEMPTS = 8


class Looks:
    """Answers every action with the same words."""

    async def reset(self, task: Task) -> Start:
        return Start(messages=(Message(role="user", content="Look around."),), tools=(TOOL,))

    async def step(self, message: Message) -> Step:
        await asyncio.sleep(0)
        return Step(messages=(Message(role="tool", content=ANSWER),), signals={"parsed": bool(message.tool_calls)})

    async def measure(self) -> dict[str, Any]:
        return {"resolved": True}

    def state_key(self) -> str:
        return ""

    async def close(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tables", action="store_true", help="only write the table of what is kept")
    args = parser.parse_args()
    kept = Kept("load")
    if not args.tables:
        kept.put(f"{args.episodes}x{args.turns}", asyncio.run(measure(args.episodes, args.turns, args.rounds)))
    write("load", parts(kept.results))


async def measure(episodes: int, turns: int, rounds: int) -> Body:
    """Seconds of playing and of recording, and resident megabytes, round by round."""
    tokenizer: Any = load_tokenizer("smollm2-135m")  # whose own annotations are wider than its words
    renderer = LinesRenderer(tokenizer)
    player = Player(
        make_env=Looks,
        engine=ScriptedEngine(renderer, lambda session, turn, prompt: "look"),
        scaffold=Scaffold(renderer, LineParser()),
        sampling=Sampling(max_tokens=8),
        limits=Limits(turns=turns),
        concurrent=episodes,
    )
    tasks = [Task(id=f"t{number}", env="looks") for number in range(episodes // ATTEMPTS)]
    await player.groups(tasks[:2], ATTEMPTS, label="warm", seed=0)
    body: Body = {"played": [], "recorded": [], "resident_mb": [], "before_mb": resident_mb()}
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder))
        for step in range(rounds):
            began = time.perf_counter()
            groups = await player.groups(tasks, ATTEMPTS, label=f"train/{step}", seed=0)
            played = time.perf_counter()
            for group in groups:
                recorder.write(step, "train", group, scored(group))
            body["played"].append(played - began)
            body["recorded"].append(time.perf_counter() - played)
            assert all(len(t.turns) == turns for group in groups for t in group.trajectories)
            body["resident_mb"].append(resident_mb())
            del groups
    body["most_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return body


def scored(group: Group) -> list[Score]:
    return [
        Score(outcome={"agent": 1.0}, turn=np.zeros(len(t.turns), np.float32), total=1.0) for t in group.trajectories
    ]


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def parts(results: Mapping[str, Body]) -> list[str]:
    rows = []
    for case, body in results.items():
        episodes, turns = map(int, case.split("x"))
        count = episodes * turns
        rows.append(
            [
                f"{episodes:,} of {turns} turns",
                spread([count / seconds for seconds in body["played"]], 0),
                spread([1000 * seconds / count for seconds in body["played"]], 2),
                spread([1000 * seconds / count for seconds in body["recorded"]], 2),
                ", ".join(f"{resident - body['before_mb']:.0f}" for resident in body["resident_mb"]),
                f"{body['most_mb'] - body['before_mb']:.0f}",
            ]
        )
    head = ("episodes at once", "turns a second", "ms a turn", "ms a turn to record", "MB after each round", "most MB")
    return [table(head, rows)]


if __name__ == "__main__":
    main()
