"""The minimum of tokens to compute for a group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from turnstile.rollout.tree import tree_tokens
from turnstile.types import Completion, Group, Message, Sampling, Stop, Task, Trajectory, Turn

Spoken = tuple[Sequence[int], Sequence[int], bool]
"""Context, what was sampled, and whether the context is a new one."""


def turn(context: Sequence[int], sampled: Sequence[int], fresh: bool) -> Turn:
    n = len(sampled)
    completion = Completion(
        token_ids=np.array(sampled, np.int32), logprobs=np.zeros(n, np.float32), versions=np.zeros(n, np.int32),
        sampling=Sampling(), finish="stop", seconds=0.0,
    )  # fmt: skip
    said = Message(role="assistant")
    return Turn(context_ids=np.array(context, np.int32), completion=completion, message=said, fresh=fresh)


def group(*attempts: Sequence[Spoken]) -> Group:
    trajectories = tuple(
        Trajectory(task_id="t", group="g", attempt=i, turns=tuple(turn(*one) for one in spoken), stop=Stop.DONE)
        for i, spoken in enumerate(attempts)
    )
    return Group(id="g", task=Task(id="t", env="e"), trajectories=trajectories)


FIRST: list[Spoken] = [([300, 2, 3], [4, 5], False), ([6], [7, 8], False)]


@pytest.mark.parametrize(
    ("attempts", "nodes"),
    [
        ((), 0),
        (([],), 0),
        ((FIRST,), 7),
        ((FIRST, FIRST), 7),  # the same twice
        ((FIRST, [([300, 2, 3], [4, 70000], False), ([6], [7], False)]), 7 + 2),  # apart from the fifth token on
        ((FIRST, [([300, 2, 3], [9], False)]), 7),  # its only own token is fed to nobody
        (([([1, 2, 3], [4, 5], False), ([1, 2, 6], [7, 8], True)],), 4 + 2),  # rewritten after two tokens
        (([([256], [1], False)], [([1, 0], [1], False)]), 1 + 2),  # whole tokens count, not bytes
    ],
)
def test_every_prefix_counts_once(attempts: tuple[list[Spoken], ...], nodes: int) -> None:
    assert tree_tokens(group(*attempts)) == nodes
