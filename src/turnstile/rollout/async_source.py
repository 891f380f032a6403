"""Groups that another process plays ahead of training: generation goes on while the trainer computes.

The groups of step s are asked for as soon as weights of version s - 1 - `max_staleness` are out, so none of their
tokens is of older ones; new weights are taken over between two tokens, also in the middle of a turn. A step takes the
groups that were asked for it and no others, however long they take: nothing that is finished is thrown away, and slow
tasks are trained on as often as quick ones. At most (1 + `max_staleness`) steps' episodes are under way or waiting,
which is all that ever queues up. With `max_staleness` = 0 this is playing and training in turn, in two processes.

What the other process tells is booked by the thread that reads it, also while the trainer computes: a run that is
killed then has everything written down but the turns in flight.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from turnstile.errors import EngineError, TrainingError
from turnstile.records.journal import Key
from turnstile.rewards.graders import Grader
from turnstile.rollout.episode import Attempt
from turnstile.rollout.group import Job, grade_groups
from turnstile.rollout.hints import Hint, hint_of
from turnstile.rollout.pipe import OnMessage
from turnstile.rollout.run_records import RunRecords, StepRecords
from turnstile.rollout.source import Publisher, ReportProgress, Say, group_prefix, restored_message
from turnstile.rollout.workers import (
    GRACE_SECONDS,
    AttemptEnded,
    AttemptStarted,
    Event,
    PlayJobs,
    StatusCounts,
    TurnReached,
    WeightUpdate,
    Worker,
)
from turnstile.tasks.base import TaskSampler
from turnstile.tracking.board import StatusBoard
from turnstile.types import Group, Task, Trajectory, Turn

MAX_DEATHS = 3  # of workers in a row that finished no episode


@dataclass(kw_only=True, slots=True)
class _StepJobs:
    """What one step was given to play, what of it has come, and where the tasks stand behind it."""

    jobs: dict[Key, Job]
    tasks: dict[str, Task]
    state: Mapping[str, Any]
    callback: StepRecords
    turns: dict[Key, list[Turn]] = field(default_factory=dict)
    played: dict[Key, Trajectory] = field(default_factory=dict)

    @property
    def missing(self) -> list[Job]:
        return [job for key, job in self.jobs.items() if key not in self.played]

    def apply(self, key: Key, told: Event) -> None:
        """Books what the worker tells of one of these attempts."""
        if isinstance(told, AttemptStarted):
            self.turns[key] = []
            self.callback.on_start(told.attempt)
        elif isinstance(told, TurnReached):
            self.turns[key][told.number :] = [told.turn]
            self.callback.on_turn(told.attempt, told.number, told.turn)
        else:
            trajectory = replace(told.trajectory, turns=tuple(self.turns.pop(key)))
            self.callback.on_end(trajectory, will_retry=told.will_retry)
            if not told.will_retry:
                self.played[key] = trajectory

    def groups(self, attempts: int) -> list[Group]:
        return [
            Group(id=name, task=task, trajectories=tuple(self.played[name, number] for number in range(attempts)))
            for name, task in self.tasks.items()
        ]


class AsyncSource:
    """Obeys `rollout.source.GroupSource`.

    `start` makes a worker, `write` puts the weights of a version into a file for it; `engine` is the trainer's own, for
    evaluations. `say` is told what a worker prints, and when one died: another goes on with what was not finished, each
    attempt from its first turn and with its own seed. `board` shows where the episodes are.
    """

    def __init__(
        self,
        *,
        start: Callable[[OnMessage], Worker],
        write: Callable[[int], Path],
        engine: Publisher,
        records: RunRecords,
        sampler: TaskSampler,
        groups: int,
        attempts: int,
        seed: int,
        max_staleness: int,
        last: int,
        graders: Sequence[Grader] = (),
        hint: Hint | None = None,
        say: Say = lambda _: None,
        board: StatusBoard | None = None,
    ) -> None:
        self._start, self._write, self._engine, self._sampler, self._say = start, write, engine, sampler, say
        self._records, self._graders, self._hint = records, graders, hint
        self._groups, self._attempts, self._seed, self._max_staleness, self._last = (
            groups,
            attempts,
            seed,
            max_staleness,
            last,
        )
        self._worker: Worker | None = None
        self._weights: WeightUpdate | None = None
        self._steps: dict[int, _StepJobs] = {}
        self._done: Mapping[str, Any] = sampler.state()
        self._taken: Mapping[str, Any] = self._done
        self._stats: dict[str, float] = {}
        self._deaths = 0
        self._board = board or StatusBoard()
        self._lock = threading.Lock()
        """Held by whoever changes the batches or the statistics: training, and the thread that reads the line."""

    async def next(self, step: int, report_progress: ReportProgress) -> list[Group]:
        """Raises TrainingError when worker after worker dies, and the fault of an episode."""
        if self._weights is None:
            self.publish(step - 1)
        assert self._worker is not None
        batch = self._steps[step]
        for _ in range(await self._worker.pending()):  # what came while training computed may be a fault
            await self._receive_event()
        report_progress(len(batch.played), len(batch.jobs))
        while batch.missing:
            await self._receive_event()
            report_progress(len(batch.played), len(batch.jobs))
        self._taken = batch.state
        with self._lock:
            del self._steps[step]
        return await grade_groups(batch.groups(self._attempts), self._graders, step, self._board)

    def publish(self, version: int) -> None:
        """Hands the weights over, and asks for the groups that they are new enough for."""
        self._done = self._taken
        self._engine.publish(version)
        self._weights = WeightUpdate(version, self._write(version))
        if self._worker is None:
            self._worker = self._start(self._on_message)
        self._forward_output()
        self._worker.send(self._weights)
        newest = max(self._steps, default=version)
        for step in range(newest + 1, min(self._last, version + 1 + self._max_staleness) + 1):
            batch = self._issue_step(step)
            with self._lock:
                self._steps[step] = batch
            self._worker.send(PlayJobs(batch.missing))

    def state(self) -> Mapping[str, Any]:
        return self._done

    def take_stats(self) -> dict[str, float]:
        with self._lock:
            taken, self._stats = self._stats, {}
        return taken

    async def close(self, *, grace: float = GRACE_SECONDS) -> None:
        """Ends the worker; what it has told is written down."""
        if self._worker is not None:
            await self._worker.close(grace=grace)
            self._forward_output()

    def _issue_step(self, step: int) -> _StepJobs:
        tasks = {
            f"{group_prefix(step)}/{place}/{task.id}": task
            for place, task in enumerate(self._sampler.next(self._groups))
        }
        jobs = {
            (name, number): (
                task,
                Attempt(
                    group=name,
                    number=number,
                    seed=self._seed,
                    hint=hint_of(self._hint, task, number, self._attempts, step),
                ),
            )
            for name, task in tasks.items()
            for number in range(self._attempts)
        }
        callback = self._records.callback(step)
        found = dict(callback.on_issue(list(jobs.values())))
        if found:
            self._say(restored_message(step, len(found), len(jobs)))
        return _StepJobs(jobs=jobs, tasks=tasks, state=self._sampler.state(), callback=callback, played=found)

    async def _receive_event(self) -> None:
        """Waits for what happens next, to whatever step."""
        assert self._worker is not None
        try:
            await self._worker.receive()
        except EngineError as error:
            if any(batch.missing for batch in self._steps.values()):
                await self._restart_worker(error)

    def _on_message(self, found: Any) -> Any:
        """Books what the worker tells, as it comes: in the thread that reads the line."""
        if isinstance(found, StatusCounts):
            self._board.remote_counts = found.counts
            return None
        if isinstance(found, Event):
            with self._lock:
                self._record_event(found)
        return found

    def _record_event(self, found: Event) -> None:
        if isinstance(found, AttemptEnded):
            self._deaths = self._deaths if found.will_retry else 0
            for name, value in found.stats.items():
                self._stats[name] = self._stats.get(name, 0.0) + value
            key = found.trajectory.key
        else:
            key = found.attempt.group, found.attempt.number
        for batch in self._steps.values():
            if key in batch.jobs:
                batch.apply(key, found)
                self._update_board(key, found)

    def _update_board(self, key: Key, found: Event) -> None:
        if isinstance(found, TurnReached):
            self._board.on_turn(found.turn)
        elif isinstance(found, AttemptEnded):
            self._board.on_end(found.trajectory, will_retry=found.will_retry)
            if found.will_retry:
                self._board.remove([key])  # it is the worker's still

    def _forward_output(self) -> None:
        """Says what the worker has printed."""
        for line in self._worker.new_output() if self._worker is not None else ():
            self._say(line)

    async def _restart_worker(self, error: EngineError) -> None:
        assert self._worker is not None
        assert self._weights is not None
        self._deaths += 1
        await self._worker.close()
        self._board.remote_counts = {}
        self._forward_output()
        if self._deaths >= MAX_DEATHS:
            raise TrainingError(
                f"{error}, and so did {MAX_DEATHS} one after another without finishing an episode; mend it and run the "
                "same command again"
            )
        lost = sum(len(batch.missing) for batch in self._steps.values())
        self._say(f"{error}; another plays the {lost} episodes again that it had not finished")
        self._worker = self._start(self._on_message)
        self._worker.send(self._weights)
        for _, batch in sorted(self._steps.items()):
            self._worker.send(PlayJobs(batch.missing))
