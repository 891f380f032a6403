"""Groups that another process plays ahead of training, so that generation continues while the trainer computes.

The groups of step s are requested as soon as the weights of version s - 1 - `max_staleness` are published, so none of
their tokens comes from older weights. New weights take effect between two tokens, even in the middle of a turn. A step
trains on exactly the groups requested for it, however long they take: no finished episode is discarded, and slow tasks
are trained on as often as quick ones. At most (1 + `max_staleness`) steps' episodes are being played or waiting at a
time. With `max_staleness` = 0, playing and training alternate, in two processes.

The thread that reads the pipe records the worker's events, even while the trainer computes. A run that is killed
therefore loses only the turns in flight.
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

MAX_DEATHS = 3  # workers that may die in a row without finishing an episode


@dataclass(kw_only=True, slots=True)
class _StepJobs:
    """The jobs of one step, the results received so far, and the sampler's state after the step's tasks were drawn."""

    jobs: dict[Key, Job]
    tasks: dict[str, Task]
    state: Mapping[str, Any]
    callback: StepRecords
    turns: dict[Key, list[Turn]] = field(default_factory=dict)
    played: dict[Key, Trajectory] = field(default_factory=dict)

    @property
    def missing(self) -> list[Job]:
        """The jobs whose attempts have not finished."""
        return [job for key, job in self.jobs.items() if key not in self.played]

    def apply(self, key: Key, event: Event) -> None:
        """Record a worker's event for one of this step's attempts."""
        if isinstance(event, AttemptStarted):
            self.turns[key] = []
            self.callback.on_start(event.attempt)
        elif isinstance(event, TurnReached):
            self.turns[key][event.number :] = [event.turn]
            self.callback.on_turn(event.attempt, event.number, event.turn)
        else:
            trajectory = replace(event.trajectory, turns=tuple(self.turns.pop(key)))
            self.callback.on_end(trajectory, will_retry=event.will_retry)
            if not event.will_retry:
                self.played[key] = trajectory

    def groups(self, attempts: int) -> list[Group]:
        """Return the groups of the step. Requires that no job is missing."""
        return [
            Group(id=name, task=task, trajectories=tuple(self.played[name, number] for number in range(attempts)))
            for name, task in self.tasks.items()
        ]


class AsyncSource:
    """A `rollout.source.GroupSource` that plays in a worker process.

    `start` starts a worker. `write` writes the weights of a version to a file for the worker and returns its path.
    `engine` is the trainer's own, for evaluations. `say` gets the worker's output and a notice when it dies; a
    replacement replays unfinished attempts from the first turn, with the same seeds. `board` shows the status of the
    episodes.
    """

    def __init__(  # noqa: PLR0913 - made in one place, by keyword
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
        self._groups, self._attempts, self._seed = groups, attempts, seed
        self._max_staleness, self._last = max_staleness, last
        self._worker: Worker | None = None
        self._weights: WeightUpdate | None = None
        self._steps: dict[int, _StepJobs] = {}
        self._sampler_state: Mapping[str, Any] = sampler.state()
        self._next_sampler_state: Mapping[str, Any] = self._sampler_state
        self._stats: dict[str, float] = {}
        self._deaths = 0
        self._board = board or StatusBoard()
        self._lock = threading.Lock()
        """Guards the steps and the statistics, which both training and the reading thread change."""

    async def next(self, step: int, report_progress: ReportProgress) -> list[Group]:
        """Return the graded groups of a step.

        Raises the error of an episode that failed by a program error, and TrainingError if workers keep dying.
        """
        if self._weights is None:
            self.publish(step - 1)
        assert self._worker is not None
        step_jobs = self._steps[step]
        for _ in range(await self._worker.pending()):  # an error may have arrived while training computed
            await self._receive_event()
        report_progress(len(step_jobs.played), len(step_jobs.jobs))
        while step_jobs.missing:
            await self._receive_event()
            report_progress(len(step_jobs.played), len(step_jobs.jobs))
        self._next_sampler_state = step_jobs.state
        with self._lock:
            del self._steps[step]
        return await grade_groups(step_jobs.groups(self._attempts), self._graders, step, self._board)

    def publish(self, version: int) -> None:
        """Publish the weights and request the groups of every step that may use them."""
        self._sampler_state = self._next_sampler_state
        self._engine.publish(version)
        self._weights = WeightUpdate(version, self._write(version))
        if self._worker is None:
            self._worker = self._start(self._on_message)
        self._forward_output()
        self._worker.send(self._weights)
        newest = max(self._steps, default=version)
        for step in range(newest + 1, min(self._last, version + 1 + self._max_staleness) + 1):
            step_jobs = self._issue_step(step)
            with self._lock:
                self._steps[step] = step_jobs
            self._worker.send(PlayJobs(step_jobs.missing))

    def state(self) -> Mapping[str, Any]:
        return self._sampler_state

    def take_stats(self) -> dict[str, float]:
        with self._lock:
            taken, self._stats = self._stats, {}
        return taken

    async def close(self, *, grace: float = GRACE_SECONDS) -> None:
        """End the worker. The events received so far stay recorded."""
        if self._worker is not None:
            await self._worker.close(grace=grace)
            self._forward_output()

    def _issue_step(self, step: int) -> _StepJobs:
        """Draw a step's tasks and issue their attempts, restoring those that finished before an interruption."""
        tasks = {
            f"{group_prefix(step)}/{place}/{task.id}": task
            for place, task in enumerate(self._sampler.next(self._groups))
        }
        jobs: dict[Key, Job] = {}
        for name, task in tasks.items():
            for number in range(self._attempts):
                hint = hint_of(self._hint, task, number, self._attempts, step)
                jobs[name, number] = task, Attempt(group=name, number=number, seed=self._seed, hint=hint)
        callback = self._records.callback(step)
        restored = dict(callback.on_issue(list(jobs.values())))
        if restored:
            self._say(restored_message(step, len(restored), len(jobs)))
        return _StepJobs(jobs=jobs, tasks=tasks, state=self._sampler.state(), callback=callback, played=restored)

    async def _receive_event(self) -> None:
        """Wait for the worker's next event, for any step. Restart the worker if it died with jobs unfinished."""
        assert self._worker is not None
        try:
            await self._worker.receive()
        except EngineError as error:
            if any(step_jobs.missing for step_jobs in self._steps.values()):
                await self._restart_worker(error)

    def _on_message(self, message: Any) -> Any:
        """Record an event as soon as it arrives, in the reading thread, and return what `receive` is to return."""
        if isinstance(message, StatusCounts):
            self._board.remote_counts = message.counts
            return None
        if isinstance(message, Event):
            with self._lock:
                self._record_event(message)
        return message

    def _record_event(self, message: Event) -> None:
        """Add the event's statistics to the totals, and pass the event to the step that issued its attempt."""
        if isinstance(message, AttemptEnded):
            self._deaths = self._deaths if message.will_retry else 0
            for name, value in message.stats.items():
                self._stats[name] = self._stats.get(name, 0.0) + value
            key = message.trajectory.key
        else:
            key = message.attempt.group, message.attempt.number
        for step_jobs in self._steps.values():
            if key in step_jobs.jobs:
                step_jobs.apply(key, message)
                self._update_board(key, message)

    def _update_board(self, key: Key, message: Event) -> None:
        if isinstance(message, TurnReached):
            self._board.on_turn(message.turn)
        elif isinstance(message, AttemptEnded):
            self._board.on_end(message.trajectory, will_retry=message.will_retry)
            if message.will_retry:
                self._board.remove([key])  # the worker's counts include it

    def _forward_output(self) -> None:
        """Pass the worker's new output to `say`."""
        for line in self._worker.new_output() if self._worker is not None else ():
            self._say(line)

    async def _restart_worker(self, error: EngineError) -> None:
        """Start another worker on the unfinished attempts. Raises TrainingError after `MAX_DEATHS` deaths in a row."""
        assert self._worker is not None
        assert self._weights is not None
        self._deaths += 1
        await self._worker.close()
        self._board.remote_counts = {}
        self._forward_output()
        if self._deaths >= MAX_DEATHS:
            raise TrainingError(
                f"{error}, and so did {MAX_DEATHS} in a row without finishing an episode; fix the cause and run the "
                "same command again"
            )
        lost = sum(len(step_jobs.missing) for step_jobs in self._steps.values())
        self._say(f"{error}; another one plays its {lost} unfinished episodes again")
        self._worker = self._start(self._on_message)
        self._worker.send(self._weights)
        for _, step_jobs in sorted(self._steps.items()):
            self._worker.send(PlayJobs(step_jobs.missing))
