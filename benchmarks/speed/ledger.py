"""What accounting costs: milliseconds of a turn for ledger and journal, seconds to audit a large ledger.

    python -m benchmarks.speed.ledger
    python -m benchmarks.speed.ledger --rows 100000 --turns 2000   smaller

Turns are of 100 sampled tokens after 200 shown, random ones, which compress worse than words do. The ledger's attempts
are of 5,000 tasks, 1,000 attempts a step, each trained on in one pass.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from turnstile.records.audit import Expected, audit
from turnstile.records.ledger import FILE, Disposition, Ledger, State
from turnstile.rollout.episode import Attempt
from turnstile.rollout.run_records import RunRecords
from turnstile.types import Completion, Message, Sampling, Stage, Stop, Task, ToolCall, Trajectory, Turn

SHOWN, SAMPLED, TURNS = 200, 100, 20
A_STEP, TASKS = 1000, 5000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="attempts in the ledger that is audited")
    parser.add_argument("--turns", type=int, default=20_000, help="turns that are written")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mean, worst, size = turns(Path(folder), args.turns // TURNS)
    print(f"a turn: {mean:.3f} ms, 99 of 100 under {worst:.3f} ms, {size:.1f} KB on the disk", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        booked, audited, megabytes = rows(Path(folder), args.rows)
    print(f"{args.rows} rows: booked in {booked:.1f} s, {megabytes:.0f} MB, audited in {audited:.1f} s")


def turns(run: Path, attempts: int) -> tuple[float, float, float]:
    """Mean and 99th percentile of the milliseconds that books take of a turn, its share of the attempt's beginning and
    end among them; and the kilobytes that it leaves."""
    records, rng = RunRecords(run), np.random.default_rng(0)
    played = [_trajectory(rng, number) for number in range(attempts)]
    callback = records.callback(1)
    took: list[float] = []
    began = time.perf_counter()
    callback.on_issue([(Task(id="t", env="e"), _attempt(each)) for each in played])
    for each in played:
        callback.on_start(_attempt(each))
        for number, turn in enumerate(each.turns):
            started = time.perf_counter()
            for stage in _stages(turn):
                callback.on_turn(_attempt(each), number, stage)
            took.append(1000 * (time.perf_counter() - started))
        callback.on_end(each, will_retry=False)
    whole = 1000 * (time.perf_counter() - began)
    records.close()
    size = sum(path.stat().st_size for path in (run / "record").iterdir())
    return whole / len(took), float(np.quantile(took, 0.99)), size / len(took) / 1000


def rows(run: Path, count: int) -> tuple[float, float, float]:
    """Seconds to book that many attempts and to audit them, and the ledger's megabytes."""
    ledger, rng = Ledger(run), random.Random(0)
    began = time.perf_counter()
    steps = count // A_STEP
    for step in range(1, steps + 1):
        attempts = [((f"train/{step}/{i // 8}", i), f"task-{rng.randrange(TASKS)}") for i in range(A_STEP)]
        ledger.issue(step, attempts, {})
        keys = [key for key, _ in attempts]
        ledger.finalize(
            step, [Disposition(key=key, state=State.ADMITTED, outcome=rng.random()) for key in keys], [keys]
        )
    ledger.commit(steps, "digest")
    ledger.close()
    booked = time.perf_counter() - began
    began = time.perf_counter()
    found = audit(run, Expected(attempts=A_STEP, passes=1))
    audited = time.perf_counter() - began
    assert found.balanced
    assert found.uses == steps * A_STEP
    return booked, audited, (run / FILE).stat().st_size / 1e6


def _attempt(trajectory: Trajectory) -> Attempt:
    return Attempt(group=trajectory.group, number=trajectory.attempt, seed=0)


def _stages(turn: Turn) -> Iterator[Turn]:
    bare = replace(turn, observation=(), stage=Stage.SAMPLED)
    yield bare
    yield replace(bare, stage=Stage.DELIVERED)
    yield turn


def _trajectory(rng: np.random.Generator, number: int) -> Trajectory:
    return Trajectory(
        task_id="t", group="train/1/0/t", attempt=number, turns=tuple(_turn(rng) for _ in range(TURNS)), stop=Stop.DONE
    )


def _turn(rng: np.random.Generator) -> Turn:
    ids = rng.integers(0, 50_000, SHOWN + SAMPLED).astype(np.int32)
    call = ToolCall(id="1", name="shell", arguments={"command": "sed -n 1,40p setup.py" * 4})
    return Turn(
        context_ids=ids[:SHOWN],
        completion=Completion(
            token_ids=ids[SHOWN:],
            logprobs=-rng.random(SAMPLED).astype(np.float32),
            versions=np.zeros(SAMPLED, np.int32),
            sampling=Sampling(),
            finish="stop",
            seconds=1.0,
            entropies=rng.random(SAMPLED).astype(np.float32),
        ),
        message=Message(role="assistant", content="x" * 400, tool_calls=(call,)),
        observation=(Message(role="tool", content="y" * 600, tool_call_id="1"),),
    )


if __name__ == "__main__":
    main()
