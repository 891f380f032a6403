"""Many episodes at once: every task of a step attempted G times, none waiting for another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from turnstile.agents.base import Scaffold
from turnstile.engines.base import Engine
from turnstile.envs.base import Env
from turnstile.errors import InfrastructureError
from turnstile.rewards.examine import Examiner
from turnstile.rollout.episode import Attempt, Limits, play
from turnstile.types import Group, Sampling, Stop, Task, Trajectory

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Player:
    """Everything an episode needs but its task.

    `retries` is how often an attempt is played again after an infrastructure failure; `concurrent` how many
    episodes go on at once. With `deterministic` they go in fixed waves of that many, all opened before the
    first begins, so that which requests meet in the engine does not depend on time. `examiners` look at the groups
    when all are played, one after the other.
    """

    make_env: Callable[[], Env]
    engine: Engine
    scaffold: Scaffold
    sampling: Sampling
    limits: Limits
    retries: int = 2
    concurrent: int = 64
    deterministic: bool = False
    examiners: tuple[Examiner, ...] = ()

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
    ) -> list[Group]:
        """The groups of `tasks` in their order; `label` makes their ids unique in a run. Calls that name the same
        `stream` draw the same random numbers for an attempt at a task; without one they draw by their labels. `step`
        is that of training, for the examiners; `done` is told of each episode as it ends. A fault of the program in
        one episode stops them all and is raised, with a note that says in which it was (one that many share says so
        itself)."""
        ids = [f"{label}/{place}/{task.id}" for place, task in enumerate(tasks)]
        jobs = [
            (task, Attempt(group=group, number=number, seed=seed, stream=stream))
            for task, group in zip(tasks, ids, strict=True)
            for number in range(attempts)
        ]
        try:
            played = await (self._waves(jobs, done) if self.deterministic else self._flow(jobs, done))
        except BaseExceptionGroup as several:  # the first fault stopped all episodes, and is what there is to say
            raise several.exceptions[0] from several
        found = [
            Group(id=group, task=task, trajectories=tuple(played[i * attempts : (i + 1) * attempts]))
            for i, (task, group) in enumerate(zip(tasks, ids, strict=True))
        ]
        for examiner in self.examiners:
            found = await examiner.examine(found, step)
        return found

    async def _flow(self, jobs: Sequence[tuple[Task, Attempt]], done: Callable[[Trajectory], None]) -> list[Trajectory]:
        places = asyncio.Semaphore(self.concurrent)

        async def one(task: Task, attempt: Attempt) -> Trajectory:
            async with places:
                return await self._attempt(task, attempt, self.engine.open(attempt.group), done)

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(*job)) for job in jobs]
        return [task.result() for task in running]

    async def _waves(
        self, jobs: Sequence[tuple[Task, Attempt]], done: Callable[[Trajectory], None]
    ) -> list[Trajectory]:
        played: list[Trajectory] = []
        for begin in range(0, len(jobs), self.concurrent):
            wave = jobs[begin : begin + self.concurrent]
            sessions = [self.engine.open(attempt.group) for _, attempt in wave]
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self._attempt(*job, session, done))
                    for job, session in zip(wave, sessions, strict=True)
                ]
            played += [task.result() for task in running]
        return played

    async def _attempt(
        self, task: Task, attempt: Attempt, session: str, done: Callable[[Trajectory], None]
    ) -> Trajectory:
        """One attempt, played again from its start for as long as infrastructure fails and retries are left."""
        try:
            for left in range(self.retries, -1, -1):
                env = self.make_env()
                try:
                    trajectory = await play(
                        task,
                        attempt,
                        env=env,
                        engine=self.engine,
                        session=session,
                        scaffold=self.scaffold,
                        sampling=self.sampling,
                        limits=self.limits,
                    )
                finally:
                    await _close(env)
                if trajectory.stop is not Stop.ERROR or left == 0:
                    break
        except Exception as fault:
            if not getattr(fault, "__notes__", None):  # else its place is said: the engine's reach many episodes
                fault.add_note(f"in task {task.id!r}, attempt {attempt.number} of group {attempt.group!r}")
            raise
        finally:
            self.engine.close(session)
        done(trajectory)
        return trajectory


async def _close(env: Env) -> None:
    """What an episode came to stands, also when its environment cannot be put away."""
    try:
        await env.close()
    except InfrastructureError as error:
        _log.warning("an environment could not be closed: %s", error)
