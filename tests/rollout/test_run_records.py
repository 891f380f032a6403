"""Resuming an interrupted step: finished attempts are restored, all others are played."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from episodes import stages
from made_groups import attempt, score
from plays import FakeEnv, hang, once_then, player, says, tasks
from turnstile.errors import SandboxError
from turnstile.records.codec import encode
from turnstile.records.ledger import open_ledger
from turnstile.rollout.episode import Attempt, Limits
from turnstile.rollout.run_records import RunRecords
from turnstile.types import Stage, Stop, Task


def rows(run: Path, *columns: str) -> list[tuple[Any, ...]]:
    db = open_ledger(run)
    found = db.execute(f"SELECT {', '.join(columns)} FROM attempts ORDER BY id").fetchall()
    db.close()
    return found


class Counted:
    """Makes and counts environments; number `bad` raises a program error."""

    def __init__(self, bad: int = 0) -> None:
        self.bad = bad
        self.made = 0

    def __call__(self) -> FakeEnv:
        self.made += 1
        return FakeEnv({"step": ValueError("a fault")} if self.made == self.bad else {})


@pytest.mark.parametrize("deterministic", [False, True])
async def test_plays_only_unfinished_episodes(tmp_path: Path, deterministic: bool) -> None:
    records = RunRecords(tmp_path)
    how = {"speak": says("look", "submit"), "concurrent": 2, "deterministic": deterministic}
    with pytest.raises(ValueError, match="a fault"):
        await player(Counted(bad=5), **how).groups(tasks(2), 4, label="train/1", seed=0, callback=records.callback(1))
    records.close()
    finished = sum(state == "finished" for (state,) in rows(tmp_path, "state"))
    assert 0 < finished < 8

    records, resumed = RunRecords(tmp_path), Counted()
    records.ledger.resume_at(0)
    callback, told = records.callback(1), []
    found = await player(resumed, **how).groups(
        tasks(2), 4, label="train/1", seed=0, callback=callback, done=told.append
    )
    assert (callback.restored, resumed.made, len(told)) == (finished, 8 - finished, 8)
    assert [[t.attempt for t in group.trajectories] for group in found] == [[0, 1, 2, 3]] * 2
    assert all(t.stop is Stop.SUBMITTED and len(t.turns) == 2 for group in found for t in group.trajectories)
    assert set(rows(tmp_path, "state", "turns")) == {("finished", 2)}

    third = Counted()
    same = await player(third, **how).groups(tasks(2), 4, label="train/1", seed=0, callback=records.callback(1))
    assert third.made == 0
    assert encode(same) == encode(found)
    records.close()


async def test_records_failures_and_plays_given_up_attempts_again(tmp_path: Path) -> None:
    records, seen = RunRecords(tmp_path), []
    breaks = once_then(SandboxError("gone"))

    def make() -> FakeEnv:
        seen.append(rows(tmp_path, "state", "why", "begun"))
        return FakeEnv({"step": breaks})

    await player(make, says("submit")).groups(tasks(1), 1, label="train/1", seed=0, callback=records.callback(1))
    assert seen == [[("issued", "", 0)], [("env_error", "SandboxError: gone", 1)]]
    assert rows(tmp_path, "state", "why", "begun") == [("finished", "", 2)]

    broken = player(lambda: FakeEnv({"step": SandboxError("gone")}), retries=1)
    (group,) = await broken.groups(tasks(1), 1, label="train/2", seed=0, callback=records.callback(2))
    assert rows(tmp_path, "state", "begun")[1] == ("given_up", 2)
    records.finalize(2, [group], [[score(0.0)]], [])
    assert rows(tmp_path, "state", "why")[1] == ("given_up", "SandboxError: gone")
    mended = Counted()
    callback = records.callback(2)
    (group,) = await player(mended, says("submit")).groups(tasks(1), 1, label="train/2", seed=0, callback=callback)
    assert (group.trajectories[0].stop, mended.made, callback.restored) == (Stop.SUBMITTED, 1, 0)
    records.close()


async def test_records_the_action_at_the_time_limit(tmp_path: Path) -> None:
    """Its 5 tokens count, and the attempt is not played again when the run resumes."""
    records = RunRecords(tmp_path)
    slow = player(lambda: FakeEnv({"step": hang}), says("look"), limits=Limits(turns=3, seconds=0.05))
    (group,) = await slow.groups(tasks(1), 1, label="train/1", seed=0, callback=records.callback(1))
    (one,) = group.trajectories
    assert (one.stop, [turn.stage for turn in one.turns]) == (Stop.TIMEOUT, [Stage.DELIVERED])
    assert rows(tmp_path, "state", "turns", "tokens") == [("finished", 1, 5)]
    records.finalize(1, [group], [[score(1.0)]], [[one.key]])
    assert rows(tmp_path, "state", "turns", "tokens") == [("admitted", 1, 5)]
    records.close()
    records = RunRecords(tmp_path)
    records.ledger.resume_at(0)
    (again,) = await slow.groups(tasks(1), 1, label="train/1", seed=0, callback=records.callback(1))
    assert encode(again) == encode(group)
    records.close()


async def test_records_the_action_in_which_infrastructure_failed(tmp_path: Path) -> None:
    records = RunRecords(tmp_path)
    broken = player(lambda: FakeEnv({"step": SandboxError("gone")}), says("look"), retries=0)
    await broken.groups(tasks(1), 1, label="train/1", seed=0, callback=records.callback(1))
    assert rows(tmp_path, "state", "turns", "tokens") == [("given_up", 1, 5)]
    ((_, end),) = records.journal.finished_attempts(1).items()
    assert (end.stop, [turn.stage for turn in end.turns]) == (Stop.ERROR, [Stage.DELIVERED])
    records.close()


async def test_reasons_for_leaving_attempts_out(tmp_path: Path) -> None:
    records = RunRecords(tmp_path)
    some = player(FakeEnv, says("look"))
    played = await some.groups(tasks(2), 3, label="train/1", seed=0, callback=records.callback(1))
    scores = [
        [score(1.0), score(1.0, in_gradient=False), score(1.0)],
        [score(0.0), score(0.0), score(0.0, in_gradient=False)],
    ]
    records.finalize(1, played, scores, [[played[0].trajectories[0].key]])
    assert rows(tmp_path, "state", "why", "outcome", "settled") == [
        ("admitted", "", 1.0, 1),
        ("gated_out", "its end: turns", 1.0, 1),
        ("gated_out", "nothing in it to train", 1.0, 1),
        ("gated_out", "its group's advantages are all zero", 0.0, 1),
        ("gated_out", "its group's advantages are all zero", 0.0, 1),
        ("gated_out", "its end: turns", 0.0, 1),
    ]
    records.close()


def test_several_threads_record_at_once(tmp_path: Path) -> None:
    """Another process plays while training finalizes and commits: no record is lost or mixed up."""
    records = RunRecords(tmp_path)
    callbacks = [records.callback(step) for step in (1, 2, 3)]
    faults: list[BaseException] = []

    def play(step: int) -> None:
        try:
            for number in range(40):
                played = attempt(number, [2, 3], group=f"train/{step}/0/t")
                of = Attempt(group=played.group, number=number, seed=0)
                callbacks[step - 1].on_issue([(Task(id="t", env="e"), of)])
                callbacks[step - 1].on_start(of)
                for place, turn in enumerate(played.turns):
                    for stage in stages(turn):
                        callbacks[step - 1].on_turn(of, place, stage)
                callbacks[step - 1].on_end(played, will_retry=False)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=play, args=(step,)) for step in (1, 2, 3)]
    for thread in threads:
        thread.start()
    commits = 0
    while any(thread.is_alive() for thread in threads):
        records.commit(commits % 5, f"digest {commits}", 0)
        commits += 1
    for thread in threads:
        thread.join()
    assert faults == []
    assert commits
    assert rows(tmp_path, "state", "begun", "turns", "tokens") == [("finished", 1, 2, 5)] * 120
    for step in (1, 2, 3):
        assert [len(found.turns) for found in records.journal.finished_attempts(step).values()] == [2] * 40
    records.close()
