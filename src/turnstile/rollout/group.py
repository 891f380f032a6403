"""Many episodes at once: every task of a step attempted G times, none waiting for another."""

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
"""Seconds that an environment is given to put away what it holds: removing a container takes seconds, also on a machine
that is short of everything."""
Job = tuple[Task, Attempt]
PlayJob = Callable[[Job, str], Coroutine[Any, Any, None]]
"""Plays a job in a session."""


class EpisodeCallback:
    """Is told what becomes of attempts, as it happens. This one keeps nothing."""

    def on_issue(self, jobs: Sequence[Job]) -> Mapping[Key, Trajectory]:
        """They are all to be played, but for those that it knows to have finished before."""
        return {}

    def on_start(self, attempt: Attempt) -> None:
        """It is played from its start."""

    def on_turn(self, attempt: Attempt, number: int, turn: Turn) -> None:
        """A turn reached its stage; they are numbered from 0."""

    def on_end(self, trajectory: Trajectory, *, will_retry: bool) -> None:
        """It came to an end; `again` says that infrastructure failed and it is played once more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Player:
    """Everything an episode needs but its task.

    `retries` is how often an attempt is played again after an infrastructure failure; `failures` how many may be lost
    to faults of the program before one is raised (default: none); `concurrent` how many episodes go on at once. With
    `deterministic` they go in fixed waves of that many, all opened before the first begins, so that which requests
    meet in the engine does not depend on time. `graders` look at the groups when all are played, one after the
    other. `board` shows where the episodes are while they are played.
    """

    make_env: Callable[[], Env]
    engine: Engine
    scaffold: Scaffold
    sampling: Sampling
    limits: Limits
    retries: int = 2
    concurrent: int = 64
    deterministic: bool = False
    deadlines: Deadlines | None = None  # sooner than those of `limits`
    graders: tuple[Grader, ...] = ()
    hint: Hint | None = None  # what training's prompts show besides the task
    slots: asyncio.Semaphore | None = None  # of several calls together, in place of `concurrent` for each
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
        """The groups of `tasks` in their order; `label` makes their ids unique in a run. Calls that name the same
        `stream` draw the same random numbers for an attempt at a task; without one they draw by their labels. `step`
        is that of training, for hints and graders. `done` is told of each episode as it ends, `watch` of all that
        happens; what that knows to have finished is not played. A fault of the program in one episode that
        `failures` does not forgive stops them all and is raised, with a note that says in which it was (one that many
        share says so itself)."""
        ids = [f"{label}/{place}/{task.id}" for place, task in enumerate(tasks)]
        jobs = [
            (
                task,
                Attempt(
                    group=group,
                    number=number,
                    seed=seed,
                    stream=stream,
                    hint=hint_of(self.hint, task, number, attempts, step),
                ),
            )
            for task, group in zip(tasks, ids, strict=True)
            for number in range(attempts)
        ]
        found = await self.play(jobs, done=done, callback=callback or EpisodeCallback())
        groups = [
            Group(id=group, task=task, trajectories=tuple(found[group, number] for number in range(attempts)))
            for task, group in zip(tasks, ids, strict=True)
        ]
        return await grade_groups(groups, self.graders, step, self.board)

    async def play(
        self, jobs: Sequence[Job], *, callback: EpisodeCallback, done: Callable[[Trajectory], None] = lambda _: None
    ) -> dict[Key, Trajectory]:
        """One episode for each of `jobs`; the rest as of `groups`."""
        found = dict(callback.on_issue(jobs))
        for trajectory in found.values():
            done(trajectory)
        left = [(task, attempt) for task, attempt in jobs if (attempt.group, attempt.number) not in found]
        keys = [(attempt.group, attempt.number) for _, attempt in left]
        self.board.set_status(keys)

        async def play_job(job: Job, session: str) -> None:
            trajectory = await self._attempt(*job, session, callback)
            found[trajectory.key] = trajectory
            done(trajectory)

        try:
            await (
                self._play_in_waves(left, play_job) if self.deterministic else self._play_concurrently(left, play_job)
            )
        except BaseExceptionGroup as several:  # the first fault stopped all episodes, and is what there is to say
            raise several.exceptions[0] from several
        finally:
            self.board.remove(keys)
        return found

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
        """One attempt, played again from its start for as long as infrastructure fails and retries are left."""
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
            for left in range(self.retries, -1, -1):
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
                will_retry = trajectory.stop is Stop.ERROR and left > 0 and not faulty
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
    """The groups as graders leave them, one after the other. If that is cut short, what graders remember is what
    it was before: the groups are examined again then, and none of it may be learnt twice."""
    found = list(groups)
    keys = [trajectory.key for group in groups for trajectory in group.trajectories]
    before = [copy.deepcopy(grader.state()) for grader in graders]
    board.set_status(keys, EpisodeStatus.GRADING)
    try:
        for grader in graders:
            found = list(await grader.grade(found, step))
    except BaseException:
        for grader, state in zip(graders, before, strict=True):
            grader.restore(state)
        raise
    finally:
        board.remove(keys)
    return found


async def _close(env: Env, tolerates: Callable[[Exception], bool]) -> None:
    """What an episode came to stands, also when its environment cannot be put away."""
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
