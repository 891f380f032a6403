"""`turnstile train --dry-run`: what a run will take, from one real group of it on this machine."""

from __future__ import annotations

import asyncio
import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from turnstile.agents.base import Renderer
from turnstile.batching.rows import rows_of
from turnstile.config import Recipe
from turnstile.errors import EngineError
from turnstile.rewards.compose import failure_score
from turnstile.rollout.episode import Attempt
from turnstile.rollout.failures import Failures
from turnstile.rollout.workers import LOG, AttemptEnded, PlayJobs, Worker
from turnstile.runs.checks import check_parts
from turnstile.runs.session import peak_memory_mb
from turnstile.runs.sft import play_conversations
from turnstile.runs.worker import Setup
from turnstile.trainer.learner import Learner
from turnstile.types import Group, Row, Task
from turnstile.wiring.agent import Agent, make_agent, make_player
from turnstile.wiring.graders import make_graders
from turnstile.wiring.learning import make_learner, make_logprob_providers, make_objective
from turnstile.wiring.recipe_check import check_recipe
from turnstile.wiring.tasks import read_tasks
from turnstile.wiring.world import make_trackers, make_world


def dry_run(recipe: Recipe) -> dict[str, Any]:
    """Check what a recipe names, play one of its groups and do one update; nothing is trained or kept.

    Returns seconds, minutes and megabytes. The warm start is not timed, and a step's groups, which are played together,
    are counted one after the other. The model plays untrained. One that does not know the task yet plays to its limits,
    so that a warm start or learning makes the run shorter than what is reported. With `rollout.max_staleness` the group
    is played in the other process too, whose model takes memory of its own.
    """
    check_recipe(recipe)
    tasks = read_tasks(recipe, "train", recipe.tasks.limit)
    heldout = read_tasks(recipe, "heldout", recipe.eval.tasks) if recipe.tasks.heldout else []
    conversations = check_parts(recipe, tasks, heldout).conversations
    with tempfile.TemporaryDirectory(prefix="turnstile-dry-") as folder:
        make_trackers(recipe, Path(folder)).close()
    agent = make_agent(recipe)
    learnable = (
        {"conversations to learn from": play_conversations(recipe, conversations, agent).summary()}
        if conversations
        else {}
    )
    learner = make_learner(recipe, agent)
    group, playing = asyncio.run(_play(recipe, agent, tasks[0]))
    updating = _update(recipe, learner, group, agent.scaffold.renderer)
    step = recipe.rollout.tasks_per_step * (playing + updating * recipe.train.epochs)
    ahead: dict[str, float] = {}
    if recipe.rollout.max_staleness:
        slower = recipe.rollout.tasks_per_step * max(playing, updating * recipe.train.epochs)
        ahead = {
            "at best, where the two processes share no processor": recipe.train.steps * slower / 60,
            "peak memory of the process that plays, MB": asyncio.run(_play_elsewhere(recipe, tasks[0])),
        }
    evaluations = len(heldout) * recipe.eval.samples * (2 + recipe.train.steps // (recipe.eval.every or 10**9))
    sampled = sum(len(turn.completion.token_ids) for t in group.trajectories for turn in t.turns)
    return {
        "training tasks": len(tasks),
        "held-out tasks": len(heldout),
        **learnable,
        "parameters": f"{sum(p.numel() for p in agent.model.parameters()) / 1e6:.1f} M",
        "trained": f"{sum(p.numel() for p in learner.parameters) / 1e6:.1f} M",
        "device, dtype": f"{agent.model.device}, {str(agent.model.dtype).removeprefix('torch.')}",
        "sampled tokens/s": sampled / playing,
        "seconds a group, playing": playing,
        "seconds a group, updating": updating,
        "minutes of RL": recipe.train.steps * step / 60,
        **ahead,
        "minutes of evaluation": evaluations * playing / recipe.rollout.group_size / 60,
        "peak memory, MB": peak_memory_mb(),
        **_device_memory(agent.model.device),
    }


def _device_memory(device: torch.device) -> dict[str, str]:
    """Return what the group and its update took of a GPU's memory; nothing without a GPU.

    A step's groups are sampled together: cached keys and values may take up to `engine.memory_mb` more than here.
    """
    if device.type != "cuda":
        return {}
    taken, whole = torch.cuda.max_memory_reserved(device), torch.cuda.get_device_properties(device).total_memory
    return {"peak memory of the GPU, MB": f"{taken / 2**20:.0f} of {whole / 2**20:.0f}"}


async def _play(recipe: Recipe, agent: Agent, task: Task) -> tuple[Group, float]:
    """Play one group of the recipe; return it and the seconds it took."""
    world = make_world(recipe, graders=make_graders(recipe, None, agent))
    try:
        player = make_player(recipe, world, agent.scaffold, agent.engine, agent.context)
        player = replace(player, failures=Failures())
        began = time.monotonic()
        (group,) = await player.groups([task], recipe.rollout.group_size, label="dry", seed=recipe.seed)
        return group, time.monotonic() - began
    finally:
        await world.close()


async def _play_elsewhere(recipe: Recipe, task: Task) -> float:
    """Have the process that plays ahead play a group; return the megabytes that it took."""
    jobs = [
        (task, Attempt(group="dry", number=number, seed=recipe.seed)) for number in range(recipe.rollout.group_size)
    ]
    with tempfile.TemporaryDirectory(prefix="turnstile-dry-") as folder:
        worker = Worker(Setup(recipe=recipe), log=Path(folder, LOG))
        try:
            worker.send(PlayJobs(jobs))
            left = len(jobs)
            while left:
                event = await worker.receive()
                left -= isinstance(event, AttemptEnded) and not event.will_retry
        except EngineError as error:
            raise EngineError("; ".join([str(error), *worker.new_output()[-1:]])) from None
        finally:
            await worker.close()
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


def _update(recipe: Recipe, learner: Learner, group: Group, renderer: Renderer) -> float:
    """Return the seconds that one update on a group takes, and put the weights back."""
    before = [parameter.detach().clone() for parameter in learner.parameters]
    rows: list[Row] = []
    for sign, trajectory in enumerate(group.trajectories):
        turns = [np.full(len(t.completion.token_ids), (-1.0) ** sign, np.float32) for t in trajectory.turns]
        rows += [row for row in rows_of(trajectory, turns) if row.loss_mask.any()]
    objective = make_objective(recipe)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="turnstile-dry-") as folder:
        for provider in make_logprob_providers(recipe, objective, learner, Path(folder), renderer=renderer):
            provider.on_step_start([group], [[failure_score(trajectory) for trajectory in group.trajectories]])
            rows = provider.provide(rows, objective.sampling)
    if rows:
        learner.update(rows, objective)
    seconds = time.monotonic() - began
    with torch.no_grad():
        for parameter, value in zip(learner.parameters, before, strict=True):
            parameter.copy_(value)
    return seconds
