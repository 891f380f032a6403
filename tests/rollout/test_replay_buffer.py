"""The replay buffer: what it keeps, what it draws, and its restoration from a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from made_groups import attempt, group_of, score
from turnstile.errors import CheckpointError
from turnstile.records.record import REPLAYED, Recorder
from turnstile.rollout.replay_buffer import ReplayBuffer, without_baseline
from turnstile.types import F32, Group


def played(step: int, attempts: int = 3) -> Group:
    name = f"train/{step}/0/t"
    return group_of(*(attempt(i, [1, 2], group=name) for i in range(attempts)), name=name)


def credit(*values: float) -> list[list[list[F32]]]:
    return [[[np.full(n, value, np.float32) for n in (1, 2)] for value in values]]


def buffer(run: Path, **knobs: int) -> ReplayBuffer:
    return ReplayBuffer(run, **{"size": 4, "batch": 2, "uses": 2, "seed": 0, **knobs})


def all_of(groups: Sequence[Group]) -> list[tuple[str, int]]:
    return [trajectory.key for group in groups for trajectory in group.trajectories]


def kept(found: ReplayBuffer) -> list[tuple[int, int, int]]:
    """Return (step, attempt, how often it was drawn) of each attempt."""
    return [(step, number, used) for step, _, number, used in found.state()["kept"]]


def fed(run: Path, steps: int = 1, **knobs: int) -> ReplayBuffer:
    """Return a buffer after `steps` in each of which attempts 0 and 2 had a positive advantage."""
    found, recorder = buffer(run, **knobs), Recorder(run)
    for step in range(1, steps + 1):
        group = played(step)
        again = found.draw(step)
        recorder.write(step, "train", group, [score(1.0, [0.0, 0.0])] * 3)
        for old in again:
            recorder.write(step, "train", old, [score(1.0, [0.0, 0.0])] * len(old.trajectories), label=REPLAYED)
        paid = [*credit(0.5, 0.0, 1.0), *(credit(*[1.0] * len(old.trajectories))[0] for old in again)]
        found.keep(step, [group, *again], paid, [all_of([group, *again])])
    return found


def test_keeps_trained_attempts_with_positive_advantage(tmp_path: Path) -> None:
    found, group = buffer(tmp_path), played(1, 4)
    trained = [key for key in all_of([group]) if key[1] != 3]
    found.keep(1, [group], credit(0.5, -1.0, 1.0, 9.0), [trained, trained[:1]])
    assert kept(found) == [(1, 0, 0), (1, 2, 0)]


def test_new_attempts_replace_the_oldest(tmp_path: Path) -> None:
    assert kept(fed(tmp_path, 3, size=3, batch=0)) == [(2, 2, 0), (3, 0, 0), (3, 2, 0)]
    assert kept(fed(tmp_path, 3, size=0)) == []


def test_draw_depends_on_seed_and_step_alone(tmp_path: Path) -> None:
    first = fed(tmp_path, 4, size=8, batch=0)
    several = [buffer(tmp_path, size=8, batch=2, seed=seed) for seed in (0, 0, 1, 2, 3)]
    for one in several:
        one.restore(first.state())
    drawn = [all_of(one.draw(5)) for one in several]
    assert len(drawn[0]) == 2
    assert drawn[0] == drawn[1]
    assert len({tuple(keys) for keys in drawn}) > 1


def test_draws_attempts_of_one_group_as_one_group(tmp_path: Path) -> None:
    (group,) = fed(tmp_path).draw(2)
    assert all_of([group]) == [("train/1/0/t", 0), ("train/1/0/t", 2)]
    assert group.task.id == "t"


def test_drops_attempts_after_their_uses_or_without_advantage(tmp_path: Path) -> None:
    found = fed(tmp_path)
    again = found.draw(2)
    taken = all_of(again)
    found.keep(2, again, credit(0.5, 0.1), [taken])
    assert kept(found) == [(1, 0, 1), (1, 2, 1)]
    found.draw(3)
    assert found.metrics(3) == {"replay_buffer/kept": 2.0, "replay_buffer/again": 2.0, "replay_buffer/age": 2.0}
    found.keep(3, again, credit(0.5, 0.1), [taken[:1]])  # the other one was not trained on
    assert kept(found) == []
    assert found.draw(4) == []
    assert found.metrics(4) == {"replay_buffer/kept": 0.0, "replay_buffer/again": 0.0}
    assert buffer(tmp_path, size=0).metrics(1) == {}


def test_drops_one_attempt_and_keeps_another_of_its_group(tmp_path: Path) -> None:
    found = fed(tmp_path, uses=5)
    again = found.draw(2)
    found.keep(2, again, credit(0.5, 0.0), [all_of(again)])  # their group is not flat: both are trained on
    assert kept(found) == [(1, 0, 1)]


def test_restores_buffer_from_checkpoint_and_record(tmp_path: Path) -> None:
    found = fed(tmp_path, 3)
    state = json.loads(json.dumps(found.state()))
    back = buffer(tmp_path)
    back.restore(state)
    assert back.state() == found.state()
    for one, other in zip(found.draw(4), back.draw(4), strict=True):
        assert all_of([one]) == all_of([other])
        for mine, theirs in zip(one.trajectories, other.trajectories, strict=True):
            for turn, same in zip(mine.turns, theirs.turns, strict=True):
                assert turn.completion.token_ids.tolist() == same.completion.token_ids.tolist()
                assert turn.completion.logprobs.tolist() == same.completion.logprobs.tolist()


def test_restore_names_an_attempt_missing_in_the_record(tmp_path: Path) -> None:
    fed(tmp_path)
    with pytest.raises(CheckpointError, match=r"holds attempt 7 of 'train/1/0/t', but the record of step 1 in"):
        buffer(tmp_path).restore({"kept": [[1, "train/1/0/t", 7, 0]]})


def test_replayed_attempts_are_in_no_baseline() -> None:
    own = [score(1.0), replace(score(0.5), in_gradient=False)]
    (found,) = without_baseline([own])
    assert [one.in_baseline for one in found] == [False, False]
    assert [one.in_gradient for one in found] == [True, False]
