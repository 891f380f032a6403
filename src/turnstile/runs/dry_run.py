"""`turnstile train --dry-run`: an estimate of what a run takes, from playing one of its groups on this machine."""

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
    """Check a recipe, play one of its groups and do one update. Nothing is trained or kept.

    Returns figures such as seconds, minutes and megabytes, by label. The warm start is not timed, and a step's groups
    are counted one after the other although they are played together. The model plays untrained; one that does not know
    the task yet plays to its limits, so a run may be shorter than reported after a warm start or as the model learns.
    With `rollout.max_staleness` the group is also played in the worker process, whose model takes memory of its own.
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
    """Return the GPU memory that the group and its update took, or nothing without a GPU.

    A run samples a step's groups together, so cached keys and values may take up to `engine.memory_mb` more than here.
    """
    if device.type != "cuda":
        return {}
    taken, whole = torch.cuda.max_memory_reserved(device), torch.cuda.get_device_properties(device).total_memory
    return {"peak memory of the GPU, MB": f"{taken / 2**20:.0f} of {whole / 2**20:.0f}"}


async def _play(recipe: Recipe, agent: Agent, task: Task) -> tuple[Group, float]:
    """Play one group of the recipe, and return it with the seconds that it took."""
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
    """Play a group in the worker process, and return the peak MB of the largest child process so far."""
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
    """Return the seconds that one update on a group takes. The weights are restored afterwards."""
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
