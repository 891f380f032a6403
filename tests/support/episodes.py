"""Episodes made by hand for tests: turns, trajectories and groups from bare token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from turnstile.types import F32, I32, Completion, Group, Message, Sampling, Score, Stage, Stop, Task, Trajectory, Turn


def i32(*values: int) -> I32:
    return np.array(values, np.int32)


def f32(*values: float) -> F32:
    return np.array(values, np.float32)


def turn(context: I32, sampled: I32, *, temperature: float = 0.7, version: int = 0, **more: Any) -> Turn:
    """A turn whose tokens have log-probability -token / 10."""
    completion = Completion(
        token_ids=sampled,
        logprobs=-sampled.astype(np.float32) / 10,
        versions=np.full(len(sampled), version, np.int32),
        sampling=Sampling(temperature=temperature),
        finish="stop",
        seconds=0.0,
    )
    return Turn(context_ids=context, completion=completion, message=Message(role="assistant"), **more)


def stages(turn: Turn) -> Iterator[Turn]:
    """A completed turn as it was at each stage."""
    bare = replace(turn, observation=(), rewards={}, signals={}, state_key="", seconds=0.0, stage=Stage.SAMPLED)
    yield bare
    yield replace(bare, state_key=turn.state_key, stage=Stage.DELIVERED)
    yield turn


def trajectory(*turns: Turn, group: str = "g", attempt: int = 0, stop: Stop = Stop.DONE, **more: Any) -> Trajectory:
    return Trajectory(task_id="t", group=group, attempt=attempt, turns=turns, stop=stop, **more)


def group(name: str, *attempts: Sequence[Turn]) -> Group:
    played = tuple(trajectory(*turns, group=name, attempt=number) for number, turns in enumerate(attempts))
    return Group(id=name, task=Task(id="t", env="none"), trajectories=played)


def score(total: float = 0.0, turns: int = 1, **more: Any) -> Score:
    return Score(outcome={"agent": total}, turn=np.zeros(turns, np.float32), total=total, **more)
