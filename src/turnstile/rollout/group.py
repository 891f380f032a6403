"""Many episodes at once. Every task of a step is attempted G times, and the episodes run independently."""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnstile.agents.base import Scaffold
from turnstile.engines.base import Engine
from turnstile.envs.base import Env
from turnstile.errors import InfrastructureError, is_shared
from turnstile.records.journal import Key
from turnstile.rewards.graders import Grader
from turnstile.rollout.deadlines import Deadlines
from turnstile.rollout.episode import Attempt, Limits, play
from turnstile.rollout.failures import Failures
from turnstile.rollout.hints import Hint, hint_of
from turnstile.tracking.board import EpisodeStatus, StatusBoard
from turnstile.types import Group, Sampling, Stop, Task, Trajectory, Turn

_log = logging.getLogger(__name__)
CLOSE_TIMEOUT = 600.0
"""Seconds that an environment may take to close.

Removing a container takes only seconds, even on an overloaded machine.
"""
Job = tuple[Task, Attempt]
PlayJob = Callable[[Job, str], Coroutine[Any, Any, None]]
"""Plays a job in a session."""


class EpisodeCallback:
    """Callbacks for the events of attempts, called as they happen. This base class does nothing."""

    def on_issue(self, jobs: Sequence[Job]) -> Mapping[Key, Trajectory]:
        """Return the trajectories of the jobs that finished before an interruption. The other jobs are played."""
        return {}

    def on_start(self, attempt: Attempt) -> None:
        """Handle the start of an attempt, which is called again each time the attempt is retried."""

    def on_turn(self, attempt: Attempt, number: int, turn: Turn) -> None:
        """Handle a turn that has reached a stage. Turns are numbered from 0."""

    def on_end(self, trajectory: Trajectory, *, will_retry: bool) -> None:
        """Handle the end of an attempt. `will_retry` is true if infrastructure failed and it is played again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Player:
    """Plays episodes. Holds everything that an episode needs except its task.

    `retries` is how often an attempt is played again after an infrastructure failure, `failures` limits how many
    attempts may fail by program errors (default: none), and `concurrent` is how many episodes run at once. With
    `deterministic`, episodes run in fixed waves of that size; all sessions of a wave are opened before its first
    episode begins, so the engine's batches do not depend on timing. `graders` grade the groups one after the other once
    all episodes have ended. `board` shows the status of the episodes while they are played.
    """

    make_env: Callable[[], Env]
    engine: Engine
    scaffold: Scaffold
    sampling: Sampling
    limits: Limits
    retries: int = 2
    concurrent: int = 64
    deterministic: bool = False
    deadlines: Deadlines | None = None  # used where shorter than `limits.seconds`
    graders: tuple[Grader, ...] = ()
    hint: Hint | None = None  # for training prompts
    slots: asyncio.Semaphore | None = None  # limit shared by several calls; None allows each call `concurrent` episodes
    board: StatusBoard = field(default_factory=StatusBoard)
    failures: Failures = field(default_factory=Failures)

    async def groups(
        self,
        tasks: Sequence[Task],
        attempts: int,
        *,
        label: str,
        seed: int,
        stream: str = "",
        step: int | None = None,
        done: Callable[[Trajectory], None] = lambda _: None,
        callback: EpisodeCallback | None = None,
    ) -> list[Group]:
        """Play `attempts` episodes of each task, and return the graded groups in the order of `tasks`.

        `label` makes the groups' ids unique in a run. Calls with the same `stream` draw the same random numbers for the
        same attempt at a task; without a `stream`, the random numbers depend on the label. `step` is the training step,
        for hints and graders. `done` is called with each episode's trajectory as it ends, and `callback` with every
        event; episodes that `callback` restores are not played. A program error that `failures` does not tolerate stops
        all episodes and is raised with a note naming its episode, unless it is an error that many episodes share, which
        has its own note.
        """
        ids = [f"{label}/{index}/{task.id}" for index, task in enumerate(tasks)]
        jobs: list[Job] = []
        for task, group in zip(tasks, ids, strict=True):
            for number in range(attempts):
                hint = hint_of(self.hint, task, number, attempts, step)
                jobs.append((task, Attempt(group=group, number=number, seed=seed, stream=stream, hint=hint)))
        trajectories = await self.play(jobs, done=done, callback=callback or EpisodeCallback())
        groups = [
            Group(id=group, task=task, trajectories=tuple(trajectories[group, number] for number in range(attempts)))
            for task, group in zip(tasks, ids, strict=True)
        ]
        return await grade_groups(groups, self.graders, step, self.board)

    async def play(
        self, jobs: Sequence[Job], *, callback: EpisodeCallback, done: Callable[[Trajectory], None] = lambda _: None
    ) -> dict[Key, Trajectory]:
        """Play one episode for each job, and return the trajectories by key. Callbacks and errors: see `groups`."""
        trajectories = dict(callback.on_issue(jobs))
        for trajectory in trajectories.values():
            done(trajectory)
        remaining = [(task, attempt) for task, attempt in jobs if (attempt.group, attempt.number) not in trajectories]
        keys = [(attempt.group, attempt.number) for _, attempt in remaining]
        self.board.set_status(keys)

        async def play_job(job: Job, session: str) -> None:
            trajectory = await self._attempt(*job, session, callback)
            trajectories[trajectory.key] = trajectory
            done(trajectory)

        try:
            play_all = self._play_in_waves if self.deterministic else self._play_concurrently
            await play_all(remaining, play_job)
        except BaseExceptionGroup as several:  # the first error stopped the other episodes
            raise several.exceptions[0] from several
        finally:
            self.board.remove(keys)
        return trajectories

    async def _play_concurrently(self, jobs: Sequence[Job], play_job: PlayJob) -> None:
        slots = self.slots or asyncio.Semaphore(self.concurrent)

        async def wait(job: Job) -> None:
            async with slots:
                await play_job(job, self.engine.open(job[1].group))

        async with asyncio.TaskGroup() as tasks:
            for job in jobs:
                tasks.create_task(wait(job))

    async def _play_in_waves(self, jobs: Sequence[Job], play_job: PlayJob) -> None:
        for begin in range(0, len(jobs), self.concurrent):
            wave = jobs[begin : begin + self.concurrent]
            sessions = [self.engine.open(attempt.group) for _, attempt in wave]
            async with asyncio.TaskGroup() as tasks:
                for job, session in zip(wave, sessions, strict=True):
                    tasks.create_task(play_job(job, session))

    async def _attempt(self, task: Task, attempt: Attempt, session: str, callback: EpisodeCallback) -> Trajectory:
        """Play one attempt, replaying it from its start after infrastructure failures while retries are left."""
        key = (attempt.group, attempt.number)
        where = f"in task {task.id!r}, attempt {attempt.number} of group {attempt.group!r}"
        faulty = False

        def tolerates(fault: Exception) -> bool:
            nonlocal faulty
            faulty = self.failures.tolerates(fault, where)
            return faulty

        def on_turn(number: int, turn: Turn) -> None:
            self.board.on_turn(turn)
            callback.on_turn(attempt, number, turn)

        try:
            for retries_left in range(self.retries, -1, -1):
                env = self.make_env()
                callback.on_start(attempt)
                try:
                    trajectory = await play(
                        task,
                        attempt,
                        env=env,
                        engine=self.engine,
                        session=session,
                        scaffold=self.scaffold,
                        sampling=self.sampling,
                        limits=self._limits(task),
                        on_turn=on_turn,
                        on_status=functools.partial(self.board.set_status, (key,)),
                        tolerates=tolerates,
                    )
                finally:
                    await _close(env, lambda fault: self.failures.tolerates(fault, where))
                if self.deadlines is not None:
                    self.deadlines.observe(trajectory)
                will_retry = trajectory.stop is Stop.ERROR and retries_left > 0 and not faulty
                self.board.on_end(trajectory, will_retry=will_retry)
                callback.on_end(trajectory, will_retry=will_retry)
                if not will_retry:
                    break
        except Exception as fault:
            if not is_shared(fault):
                fault.add_note(f"{where}{self.failures.note()}")
            raise
        finally:
            self.engine.close(session)
        return trajectory

    def _limits(self, task: Task) -> Limits:
        soonest = float("inf") if self.deadlines is None else self.deadlines.seconds(task)
        return replace(self.limits, seconds=soonest) if soonest < (self.limits.seconds or float("inf")) else self.limits


async def grade_groups(
    groups: Sequence[Group], graders: Sequence[Grader], step: int | None, board: StatusBoard
) -> list[Group]:
    """Pass the groups through each grader in turn, and return the result.

    If grading is interrupted, the graders' states are restored: the groups are graded again when the run resumes, and a
    grader must not learn from them twice.
    """
    graded = list(groups)
    keys = [trajectory.key for group in groups for trajectory in group.trajectories]
    before = [copy.deepcopy(grader.state()) for grader in graders]
    board.set_status(keys, EpisodeStatus.GRADING)
    try:
        for grader in graders:
            graded = list(await grader.grade(graded, step))
    except BaseException:
        for grader, state in zip(graders, before, strict=True):
            grader.restore(state)
        raise
    finally:
        board.remove(keys)
    return graded


async def _close(env: Env, tolerates: Callable[[Exception], bool]) -> None:
    """Close an environment. Failures that may be ignored are logged, so that the episode's result is kept."""
    clock = asyncio.timeout(CLOSE_TIMEOUT)
    try:
        async with clock:
            await env.close()
    except InfrastructureError as error:
        _log.warning("an environment could not be closed: %s", error)
    except Exception as fault:
        if clock.expired():
            _log.warning(
                "an environment was not closed within %g s, and what it holds may be left behind", CLOSE_TIMEOUT
            )
        elif not tolerates(fault):
            raise
