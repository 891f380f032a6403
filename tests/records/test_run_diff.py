"""The first difference between two records, in causal order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from made_groups import attempt, score
from turnstile.records.record import LOGPROB, WEIGHT, Recorder
from turnstile.records.run_diff import first_difference
from turnstile.types import Group, Message, Score, Stop, Task, Trajectory, Turn

LENGTHS = [3, 2]


def filled(value: float) -> list[list[np.ndarray]]:
    return [[np.full(n, value, np.float32) for n in LENGTHS] for _ in range(2)]


def write(
    run: Path,
    *,
    at: int = 3,
    task: str = "t",
    change: Callable[[Trajectory], Trajectory] = lambda trajectory: trajectory,
    judge: Callable[[Score], Score] = lambda given: given,
    **arrays: Any,
) -> Path:
    """Write twelve steps of one group of two attempts; at step `at` the second, or scores or arrays, are changed."""
    recorder = Recorder(run)
    for step in range(1, 13):
        here = step == at
        name = f"train/{step}/0/{task if here else 't'}"
        one, two = (attempt(number, LENGTHS, group=name) for number in range(2))
        group = Group(
            id=name, task=Task(id=task if here else "t", env="e"), trajectories=(one, change(two) if here else two)
        )
        scores = [score(1.0), judge(score(0.5)) if here else score(0.5)]
        given = {"advantages": filled(1), WEIGHT: filled(2), LOGPROB: filled(float("nan")), **(arrays if here else {})}
        advantages = given.pop("advantages")
        recorder.write(step, "train", group, scores, advantages, given)
    return run


def turned(number: int, **changes: Any) -> Callable[[Trajectory], Trajectory]:
    def change(trajectory: Trajectory) -> Trajectory:
        turns = list(trajectory.turns)
        turns[number] = replace(turns[number], **changes)
        return replace(trajectory, turns=tuple(turns))

    return change


def completed(number: int, **changes: Any) -> Callable[[Trajectory], Trajectory]:
    def change(trajectory: Trajectory) -> Trajectory:
        turn: Turn = trajectory.turns[number]
        return turned(number, completion=replace(turn.completion, **changes))(trajectory)

    return change


WHERE = "train/3/0/t, attempt 1"
SAW = np.array([9], np.int32)
SAID = np.array([1, 2, 9], np.int32)
CASES: list[tuple[dict[str, Any], str]] = [
    ({"task": "other"}, "the tasks drawn differ in place 0 ('t' and 'other')"),
    ({"change": turned(1, context_ids=SAW)}, f"the tokens shown differ in {WHERE}, turn 1, token 0"),
    ({"change": completed(0, token_ids=SAID)}, f"the tokens sampled differ in {WHERE}, turn 0"),
    ({"change": turned(0, observation=(Message(role="tool", content="?"),))}, f"the answers differ in {WHERE}, turn 0"),
    ({"change": turned(1, rewards={"bonus": 1.0})}, f"the environment's rewards differ in {WHERE}, turn 1"),
    ({"change": turned(1, signals={"x": 1})}, f"the turn's signals differ in {WHERE}, turn 1"),
    ({"change": turned(1, state_key="x")}, f"the environment's states differ in {WHERE}, turn 1"),
    ({"change": lambda t: replace(t, stop=Stop.TIMEOUT)}, "the ends (done after 2 turns, timeout after 2) differ"),
    ({"change": lambda t: replace(t, signals={"x": 1})}, f"the final measurements differ in {WHERE}, x"),
    ({"judge": lambda s: replace(s, total=2.0)}, f"the scores (0.5, 2) differ in {WHERE}"),
    ({"advantages": filled(3)}, "the advantages differ in train/3/0/t, attempt 0, turn 0, token 0, and in 1 more"),
    ({WEIGHT: filled(3)}, "the tokens' weights in the loss differ in train/3/0/t, attempt 0, turn 0, token 0"),
    ({LOGPROB: filled(3)}, "the trainer's log-probabilities differ in train/3/0/t, attempt 0, turn 0, token 0"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "line"), CASES)
def test_first_difference_in_order(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    found = first_difference(write(tmp_path / "a"), write(tmp_path / "b", **changes))
    assert str(found).startswith(f"step 3: {line}")


def test_compares_log_probabilities_before_tokens(tmp_path: Path) -> None:
    def change(trajectory: Trajectory) -> Trajectory:
        given = trajectory.turns[1].completion
        tokens, logprobs = given.token_ids.copy(), given.logprobs.copy()
        tokens[1] += 1
        logprobs[0] -= 1e-6
        return completed(1, token_ids=tokens, logprobs=logprobs)(trajectory)

    found = first_difference(write(tmp_path / "a"), write(tmp_path / "b", change=change))
    assert f"step 3: the sampler's log-probabilities (weights or engine) differ in {WHERE}, turn 1, token 0 (" in str(
        found
    )


def test_ignores_times(tmp_path: Path) -> None:
    def later(trajectory: Trajectory) -> Trajectory:
        slow = turned(0, seconds=9.0)(completed(0, seconds=9.0)(trajectory))
        return replace(slow, times={"generate": 9.0})

    assert first_difference(write(tmp_path / "a"), write(tmp_path / "b", change=later)) == 12


def test_compares_the_steps_of_both_runs(tmp_path: Path) -> None:
    one, other = write(tmp_path / "a"), write(tmp_path / "b")
    for step in (11, 12):
        (other / "record" / f"{step:06d}-train.jsonl.gz").unlink()
    assert first_difference(one, other) == first_difference(other, one) == 10
    (other / "record" / "000004-train.jsonl.gz").unlink()
    assert str(first_difference(one, other)) == "step 4: the steps recorded differ"
