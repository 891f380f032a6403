"""Rollouts whose tools take time: seconds until all episodes are over, beside the time of one episode's tools.

    python -m benchmarks.speed.latency            ours, and TRL where `make bench-peers` has put it
    python -m benchmarks.speed.latency --tables   only writes the tables of what is kept

Each turn calls a tool that sleeps; what samples the turns is scripted and takes no time, so that what is left is the
tools and the rollout itself. Episodes that never wait for each other take as long as one of them: turns x the sleep.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.page import Body, Kept, spread, table, write
from benchmarks.peers.vs_trl import MODEL, PEER, prepare, python
from turnstile.agents.base import Scaffold
from turnstile.agents.parsing.lines import LineParser
from turnstile.agents.renderer import LinesRenderer
from turnstile.engines.scripted import ScriptedEngine
from turnstile.envs.base import Env, Start, Step
from turnstile.envs.threads import Threads
from turnstile.models.load import load_tokenizer
from turnstile.rollout.episode import Limits
from turnstile.rollout.group import Player
from turnstile.types import Message, Sampling, Task, ToolSpec

SLEEP = 0.2  # seconds
CASES = ((8, 3), (64, 10))  # episodes, turns
GOALS = {"8x3": 0.8, "64x10": 1.3 * 10 * SLEEP}  # seconds
TOOL = ToolSpec(name="wait", description="Wait.", schema={"type": "object", "properties": {}})


class Plain:
    """An episode whose tool sleeps in its thread; all methods are plain functions."""

    def reset(self, task: Task) -> Start:
        return Start(messages=(Message(role="user", content="Wait."),), tools=(TOOL,))

    def step(self, message: Message) -> Step:
        time.sleep(SLEEP)
        return Step(messages=(Message(role="tool", content="done"),), signals={"parsed": bool(message.tool_calls)})

    def measure(self) -> dict[str, Any]:
        return {"resolved": True}

    def state_key(self) -> str:
        return ""

    def close(self) -> None:
        pass


class Awaits:
    """The same, written with `async`."""

    def __init__(self) -> None:
        self._inner = Plain()

    async def reset(self, task: Task) -> Start:
        return self._inner.reset(task)

    async def step(self, message: Message) -> Step:
        await asyncio.sleep(SLEEP)
        return Step(messages=(Message(role="tool", content="done"),), signals={"parsed": bool(message.tool_calls)})

    async def measure(self) -> dict[str, Any]:
        return self._inner.measure()

    def state_key(self) -> str:
        return ""

    async def close(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tables", action="store_true", help="only write the tables of what is kept")
    args = parser.parse_args()
    kept = Kept("latency")
    beside = (PEER / "bin/python").is_file() and not args.tables
    if beside:
        prepare()
    if not args.tables:
        for repeat in range(-1, args.repeats):  # the first warms up
            for episodes, turns in CASES:
                for name, make in (("plain", Plain), ("async", Awaits)):
                    took = asyncio.run(ours(make, episodes, turns))
                    if repeat >= 0:
                        kept.put(f"{episodes}x{turns} ours,{name} {repeat}", {"seconds": took})
            if beside and repeat >= 0:
                kept.put(f"8x3 TRL {repeat}", theirs(8, 3, repeat))
    write("latency", parts(kept.results))


async def ours(make: Callable[[], Any], episodes: int, turns: int) -> float:
    """Seconds of one group of that many episodes."""
    threads = Threads(workers=64)
    tokenizer: Any = load_tokenizer("smollm2-135m")  # whose own annotations are wider than its words
    renderer = LinesRenderer(tokenizer)
    make_env: Callable[[], Env] = threads.around(make)
    player = Player(
        make_env=make_env,
        engine=ScriptedEngine(renderer, lambda session, turn, prompt: "wait"),
        scaffold=Scaffold(renderer, LineParser()),
        sampling=Sampling(max_tokens=8),
        limits=Limits(turns=turns),
        concurrent=64,
    )
    began = time.perf_counter()
    (group,) = await player.groups([Task(id="wait", env="wait")], episodes, label="latency", seed=0)
    took = time.perf_counter() - began
    assert all(len(t.turns) == turns and t.turns[-1].message.tool_calls for t in group.trajectories)
    await threads.close()
    return took


def theirs(episodes: int, turns: int, seed: int) -> Body:
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out.json"
        shape = json.dumps({"episodes": episodes, "rounds": turns})
        python(PEER / "bin/python", "benchmarks.peers.theirs_latency", shape, str(MODEL), str(SLEEP), str(out))
        found: Body = json.loads(out.read_text(encoding="utf-8"))
    return found


def parts(results: Mapping[str, Body]) -> list[str]:
    found: dict[tuple[str, str], list[float]] = {}
    for key, body in results.items():
        case, side, _ = key.split()
        found.setdefault((case, side), []).append(body["seconds"])
    rows = []
    for (case, side), seconds in sorted(found.items(), key=lambda item: (len(item[0][0]), item[0])):
        ideal = int(case.split("x")[1]) * SLEEP
        share = statistics.median(seconds) / ideal
        shown = (spread(seconds, 2), f"{ideal:.1f}", f"{share:.2f}", f"{GOALS[case]:.1f}")
        rows.append([case, side.replace(",", ", "), *shown])
    return [table(("episodes x turns", "side", "seconds", "ideal", "times ideal", "goal, seconds"), rows)]


if __name__ == "__main__":
    main()
