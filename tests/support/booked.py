"""A run's ledger, journal and record, kept as a training loop keeps them."""

from __future__ import annotations

from pathlib import Path

from episodes import stages
from made_groups import attempt, group_of, score
from turnstile.records.record import Recorder
from turnstile.rollout.episode import Attempt
from turnstile.rollout.run_records import RunRecords
from turnstile.types import Group, Task


def groups(step: int) -> list[Group]:
    """Two tasks, two attempts each: of one the turns are few, of the other many."""
    names = [f"train/{step}/{place}/t{place}" for place in range(2)]
    made = [
        group_of(*(attempt(number, [2] * (1 + 3 * place), group=name) for number in range(2)), name=name)
        for place, name in enumerate(names)
    ]
    return [
        Group(id=each.id, task=Task(id=f"t{i}", env="e"), trajectories=each.trajectories) for i, each in enumerate(made)
    ]


def booked_run(run: Path, steps: int = 2) -> Path:
    """Two groups of two attempts a step, in two passes; the first task is trained on, the second is flat."""
    records, recorder = RunRecords(run), Recorder(run)
    for step in range(1, steps + 1):
        played = groups(step)
        callback = records.callback(step)
        callback.on_issue(
            [(g.task, Attempt(group=g.id, number=t.attempt, seed=0)) for g in played for t in g.trajectories]
        )
        scores = [[score(1.0 - place) for _ in range(2)] for place in range(2)]
        for group, own in zip(played, scores, strict=True):
            for trajectory in group.trajectories:
                callback.on_start(Attempt(group=group.id, number=trajectory.attempt, seed=0))
                for number, turn in enumerate(trajectory.turns):
                    for stage in stages(turn):
                        callback.on_turn(Attempt(group=group.id, number=trajectory.attempt, seed=0), number, stage)
                callback.on_end(trajectory, will_retry=False)
            recorder.write(step, "train", group, own)
        trained = [t.key for t in played[0].trajectories]
        records.finalize(step, played, scores, [trained, trained])
        records.commit(step, "digest", step)
    records.close()
    return run
