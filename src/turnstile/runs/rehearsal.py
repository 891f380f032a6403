"""The samples of a recipe's `[rehearsal]`: played before the first step, recorded, and read from the record."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from turnstile.config import Recipe
from turnstile.errors import ConfigError, ReplayError
from turnstile.losses.base import needs_of
from turnstile.records.record import REHEARSAL, Entry, read_record
from turnstile.runs.session import RunContext, counter
from turnstile.trainer.learner import Objective
from turnstile.trainer.rehearsal import Rehearsal
from turnstile.wiring.agent import make_sampling
from turnstile.wiring.kinds import bind

KNOWN = ("ref_logprobs",)
"""Arrays that are available for stored samples."""
COEFFICIENT = 0.1
"""Coefficient of the loss on stored samples if it has no `coef`."""


def rehearsal_objective(recipe: Recipe) -> Objective | None:
    """Return the objective on stored samples, with its coefficient, or None if the recipe has no rehearsal.

    Raises ConfigError for a loss that needs data that stored samples do not have.
    """
    wanted = recipe.rehearsal
    if not wanted.tasks:
        return None
    coefficient, bare = wanted.loss.split("coef")
    loss = bind("loss", bare, given=("logprobs", "batch"))
    needs = needs_of(loss)
    if unknown := [name for name in needs.extras if name not in KNOWN]:
        raise ConfigError(f"rehearsal.loss = {wanted.loss.kind!r} needs the array {unknown[0]!r}, which no sample has")
    if needs.scope:
        raise ConfigError(
            f"rehearsal.loss = {wanted.loss.kind!r} compares the tokens of a whole {needs.scope}, which stored samples "
            "are not; take forward_kl, kl or sft"
        )
    return Objective(
        loss=loss,
        coefficient=COEFFICIENT if coefficient is None else coefficient,
        aggregation=bind("loss_aggregation", recipe.loss_aggregation, given=("rows",)),
        sampling=make_sampling(recipe),
    )


async def store_samples(run: RunContext, replay: Path | None) -> None:
    """Play the samples and record them. With `replay`, copy those that this run recorded instead of playing."""
    wanted = run.recipe.rehearsal
    if not wanted.tasks:
        return
    if replay is not None:
        found = [(entry.group, list(entry.scores)) for entry in _read_rehearsal(replay)]
        if not found:
            raise ReplayError(f"run {str(replay)!r} has recorded no samples for [rehearsal], and its recipe wants some")
    else:
        tasks = [run.train_tasks[place % len(run.train_tasks)] for place in range(wanted.tasks)]
        done = counter(run.tracker, "playing samples to rehearse", len(tasks) * wanted.attempts)
        with run.timed("samples to rehearse"), run.untrained():
            groups = await run.player.groups(tasks, wanted.attempts, label=REHEARSAL, seed=run.recipe.seed, done=done)
        run.engine.take_stats()  # they belong to no step
        found = list(zip(groups, run.scorer(groups), strict=True))
    for group, own in found:
        run.recorder.write(0, "warmstart", group, own, label=REHEARSAL)


def read_rehearsal(run: RunContext) -> Rehearsal | None:
    """Return the samples of a run and their objective, or None if the recipe has no rehearsal.

    Raises ConfigError if no sample is good enough.
    """
    objective = rehearsal_objective(run.recipe)
    if objective is None:
        return None
    wanted = run.recipe.rehearsal
    kept = tuple(
        trajectory
        for entry in _read_rehearsal(run.folder)
        for trajectory, score in zip(entry.group.trajectories, entry.scores, strict=True)
        if score.outcome is not None
        and score.in_gradient
        and (wanted.least is None or sum(score.outcome.values()) >= wanted.least)
    )
    if not kept:
        good = "an outcome" if wanted.least is None else f"an outcome of {wanted.least:g} or more"
        raise ConfigError(
            f"rehearsal: none of the samples of {wanted.tasks} tasks has {good}; play more tasks, or lower "
            "rehearsal.least"
        )
    return Rehearsal(episodes=kept, objective=objective, batch=wanted.batch, seed=run.recipe.seed)


def _read_rehearsal(folder: Path) -> Iterator[Entry]:
    return read_record(folder, phase="warmstart", label=REHEARSAL)
