"""`turnstile train --dry-run`: what a run will take, from a few seconds of its own model on this machine."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import torch

from turnstile.build.parts import make_agent, make_learner, make_objective, read_tasks
from turnstile.build.session import peak_memory_mb
from turnstile.config import Recipe
from turnstile.types import Row, Sampling

PROMPT, SAMPLED = 128, 16


def dry_run(recipe: Recipe) -> dict[str, Any]:
    """Checks everything a recipe names and times its model; trains and writes nothing.

    Decoding and training are timed on random tokens (`PROMPT` of prompt, `SAMPLED` sampled), so the estimate is
    of the model's work at full-length episodes and leaves out what the environment takes. Seconds and MB.
    """
    tasks = read_tasks(recipe, "train", recipe.tasks.limit)
    heldout = read_tasks(recipe, "heldout", recipe.eval.tasks) if recipe.tasks.heldout else []
    agent = make_agent(recipe)
    learner = make_learner(recipe, agent)
    objective = make_objective(recipe)
    vocabulary = int(agent.model.config.get_text_config().vocab_size)
    attempts = recipe.train.groups * recipe.train.attempts
    decode = asyncio.run(_decode_rate(agent.engine, vocabulary, min(attempts, recipe.episode.concurrent)))
    before = [parameter.detach().clone() for parameter in learner.parameters]
    rate = _training_rate(learner, objective, vocabulary, recipe)
    with torch.no_grad():
        for parameter, value in zip(learner.parameters, before, strict=True):
            parameter.copy_(value)
    sampled = recipe.episode.turns * recipe.sampling.max_tokens
    episode = min(PROMPT + 2 * sampled, agent.context)
    generate, update = attempts * sampled / decode, attempts * episode * recipe.train.epochs / rate
    evaluations = len(heldout) * recipe.eval.samples * (2 + recipe.train.steps // (recipe.eval.every or 10**9))
    return {
        "training tasks": len(tasks),
        "held-out tasks": len(heldout),
        "parameters": f"{sum(p.numel() for p in agent.model.parameters()) / 1e6:.1f} M",
        "trained": f"{sum(p.numel() for p in learner.parameters) / 1e6:.1f} M",
        "device, dtype": f"{agent.model.device}, {str(agent.model.dtype).removeprefix('torch.')}",
        "sampled tokens/s": decode,
        "trained tokens/s": rate,
        "seconds a step, at most": generate + update,
        "minutes of RL, at most": recipe.train.steps * (generate + update) / 60,
        "minutes of evaluation, at most": evaluations * sampled / decode / 60,
        "peak memory, MB": peak_memory_mb(),
    }


async def _decode_rate(engine: Any, vocabulary: int, sessions: int) -> float:
    """Sampled tokens a second with `sessions` at once, each with a prompt of its own."""
    rng = np.random.default_rng(0)

    async def one(number: int) -> None:
        session = engine.open(f"dry/{number}")
        prompt = rng.integers(0, vocabulary, PROMPT).astype(np.int32)
        await engine.generate(prompt, Sampling(max_tokens=SAMPLED, seed=number), session)
        engine.close(session)

    await asyncio.gather(*(one(number) for number in range(sessions)))
    stats = engine.take_stats()
    return float(stats["tokens_sampled"] / max(stats["seconds"], 1e-9))


def _training_rate(learner: Any, objective: Any, vocabulary: int, recipe: Recipe) -> float:
    """Tokens a second of one update, the tokens of one full budget."""
    rng = np.random.default_rng(0)
    length = 2 * PROMPT
    count = max(1, recipe.train.budget // length)
    mask = np.arange(length) >= PROMPT
    rows = [
        Row(
            token_ids=rng.integers(0, vocabulary, length).astype(np.int32),
            loss_mask=mask,
            logprobs=np.full(length, -1.0, np.float32) * mask,
            advantages=mask.astype(np.float32),
            turn_ids=np.where(mask, 0, -1).astype(np.int32),
            versions=np.zeros(length, np.int32),
            origin=("dry", number),
        )
        for number in range(count)
    ]
    began = time.monotonic()
    learner.update(rows, objective)
    return count * length / (time.monotonic() - began)


