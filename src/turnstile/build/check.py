"""`turnstile tasks check`: repository tasks, the grader that judges their episodes, and a random agent in one place."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from turnstile.build.parts import make_world
from turnstile.config import Kind, Recipe
from turnstile.envs.base import Env
from turnstile.errors import TaskError
from turnstile.tasks.swe.bug import ENV
from turnstile.tasks.swe.formats.instance import instance_of
from turnstile.tasks.swe.grading.gate import CheckedTask, check, failed_before
from turnstile.tasks.swe.grading.grader import Grader
from turnstile.tasks.swe.oracle import random_agent
from turnstile.tasks.swe.problems.problems import REPOSITORY
from turnstile.types import Task

TURNS = 8  # of the random agent


def check_tasks(
    tasks: Sequence[Task],
    *,
    repeats: int = 2,
    probed: int | None = 2,
    sandbox: str = "local",
    containers: Kind | None = None,
    workers: int = 2,
    done: Callable[[CheckedTask], None] = lambda checked: None,
) -> list[CheckedTask]:
    """Checks the repository tasks among `tasks` (see `tasks.swe.grading.gate.check`): made ones in sandboxes of the
    kind named, instances in `containers` (default: as root, each in its own image).

    Raises TaskError when there is none, and ConfigError for an unknown kind of sandbox.
    """
    found: list[CheckedTask] = []
    for env in REPOSITORY:
        mine = [task for task in tasks if task.env == env]
        if mine and env == ENV:
            where = Kind.model_validate({"kind": sandbox, "workers": workers})
        elif mine:
            where = containers or containers_of(mine[0])
        found += asyncio.run(_check(mine, repeats, probed, where, workers, done)) if mine else []
    if not found:
        raise TaskError(f"there is no repository task to check: env is none of {', '.join(REPOSITORY)}")
    return found


def containers_of(task: Task) -> Kind:
    """Containers for an instance and others like it: as root, who owns the files of images."""
    return Kind.model_validate({"kind": "container", "image": instance_of(task).image, "user": "0:0", "warm": 0})


async def _check(
    tasks: Sequence[Task],
    repeats: int,
    probed: int | None,
    sandbox: Kind,
    workers: int,
    done: Callable[[CheckedTask], None],
) -> list[CheckedTask]:
    world = make_world(Recipe(env=Kind(kind=ENV), sandbox=sandbox))
    try:
        (grader,) = (part for part in world.shared if isinstance(part, Grader))

        async def play(task: Task) -> bool:
            return await play_randomly(world.make_env(), task)

        return await check(
            tasks,
            grader=grader,
            sandboxes=grader.bench.sandboxes,
            repeats=repeats,
            probed=probed,
            play=play,
            workers=workers,
            done=done,
        )
    finally:
        await world.close()


async def play_randomly(env: Env, task: Task, *, turns: int = TURNS) -> bool:
    """One episode of the agent that acts validly and blindly: whether it resolved the task."""
    agent = random_agent(task, random.Random(f"check/{task.id}"))
    try:
        seen = (await env.reset(task)).messages
        for _ in range(turns):
            step = await env.step(agent(seen))
            seen = step.messages
            if step.terminated or step.truncated:
                break
        return bool((await env.measure())["resolved"])
    finally:
        await env.close()


def refuse_failed(recipe: Recipe, train: Sequence[Task], heldout: Sequence[Task]) -> None:
    """Raises TaskError when a task that a run would use failed its check, unless the recipe allows it."""
    if recipe.tasks.allow_failed:
        return
    for file, tasks in ((recipe.tasks.train, train), (recipe.tasks.heldout, heldout)):
        failed = failed_before(file, tasks) if file else {}
        if failed:
            name, why = next(iter(failed.items()))
            raise TaskError(
                f"{file}: {len(failed)} of its tasks failed their check, for example {name} ({why}); leave them "
                f"out (turnstile tasks check {file} --keep GOOD.jsonl), or set tasks.allow_failed=true"
            )
