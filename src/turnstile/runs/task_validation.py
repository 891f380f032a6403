"""`turnstile tasks check`: the check of repository tasks with the grader of their episodes and a random agent."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from turnstile.config import Kind, Recipe
from turnstile.envs.base import Env
from turnstile.errors import TaskError
from turnstile.swe import oracle, shell_oracle
from turnstile.swe.bug import ENV
from turnstile.swe.formats.instance import INSTANCE, instance_of
from turnstile.swe.grading.findings import CheckedTask
from turnstile.swe.grading.gate import check
from turnstile.swe.grading.notes import Notes, failed_before
from turnstile.swe.problems.cases import ProblemCases
from turnstile.swe.problems.problems import REPOSITORY, Problems
from turnstile.types import Task
from turnstile.wiring.kinds import bind, takes
from turnstile.wiring.world import make_world

TURNS = 8  # turns of the random agent
RANDOM = {ENV: oracle.random_agent, INSTANCE: shell_oracle.random_agent}
"""The random agent of each environment."""
LOCAL = Kind(kind="local")
CONTAINER = "container"
IMAGES = (CONTAINER, "remote")  # kinds of sandboxes in which instances can be checked


def check_tasks(
    tasks: Sequence[Task],
    *,
    repeats: int = 2,
    probed: int | None = 2,
    sandbox: Kind = LOCAL,
    containers: Kind | None = None,
    workers: int = 2,
    again: bool = False,
    done: Callable[[CheckedTask], None] = lambda checked: None,
) -> list[CheckedTask]:
    """Check the repository tasks among `tasks`, and return the results (see `swe.grading.gate.check`).

    Generated tasks are checked in `sandbox`, and instances in `containers` (see `containers_of`; by default those of
    this machine). Earlier results are reused unless `again` is set. Raises TaskError if there is no repository task,
    and ConfigError for an unknown kind of sandbox.
    """
    found: list[CheckedTask] = []
    for env in REPOSITORY:
        mine = [task for task in tasks if task.env == env]
        if mine:
            where = sandbox if env == ENV else containers_of(mine[0], containers)
            section = where.model_dump(exclude=set() if env == ENV else {"image"})  # an instance has its own image
            notes = Notes(section, known=not again)
            found += asyncio.run(_check(mine, repeats, probed, where, workers, notes, done))
    if not found:
        raise TaskError(f"there is no repository task to check: env is none of {', '.join(REPOSITORY)}")
    return found


def containers_of(task: Task, section: Kind | None = None) -> Kind:
    """Return `section` set to the task's image, running as root by default.

    Other kinds of sandboxes are returned unchanged.
    """
    if section is not None and section.kind != CONTAINER:
        return section
    knobs = section.knobs if section is not None else {}
    for name in ("dockerfile", "rootfs"):  # what containers of generated tasks start from
        knobs.pop(name, None)
    image = instance_of(task).image
    for name, key, value in (("isolation", "user", "0:0"), ("pool", "warm", 0)):
        knobs[name] = {key: value, **knobs.get(name, {})}
    return Kind.model_validate({"kind": CONTAINER, **knobs, "image": image})


async def _check(
    tasks: Sequence[Task],
    repeats: int,
    probed: int | None,
    sandbox: Kind,
    workers: int,
    notes: Notes,
    done: Callable[[CheckedTask], None],
) -> list[CheckedTask]:
    if takes(bind("sandbox", sandbox), "workers") and "workers" not in sandbox.knobs:
        sandbox = Kind.model_validate({**sandbox.model_dump(), "workers": workers})
    world = make_world(Recipe(env=Kind(kind=tasks[0].env), sandbox=sandbox))
    try:
        (problems,) = (part for part in world.shared if isinstance(part, Problems))

        async def play(task: Task) -> bool:
            return await play_randomly(world.make_env(), task)

        return await check(
            tasks,
            ProblemCases(problems=problems),
            repeats=repeats,
            probed=probed,
            play=play,
            workers=workers,
            notes=notes,
            done=done,
        )
    finally:
        await world.close()


async def play_randomly(env: Env, task: Task, *, turns: int = TURNS) -> bool:
    """Play one episode with the random agent, and return whether it resolved the task. Closes the environment."""
    agent = RANDOM[task.env](task, random.Random(f"check/{task.id}"))
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
    """Raise TaskError if a task that a run would use failed its check, unless the recipe allows that."""
    if recipe.tasks.allow_failed:
        return
    for file, tasks in ((recipe.tasks.train, train), (recipe.tasks.heldout, heldout)):
        failed = failed_before(tasks) if file else {}
        if failed:
            name, why = next(iter(failed.items()))
            raise TaskError(
                f"{file}: {len(failed)} of its tasks failed their check, for example {name} ({why}); leave them "
                f"out (turnstile tasks check {file} --keep GOOD.jsonl), or set tasks.allow_failed=true"
            )
