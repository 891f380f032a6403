"""The parts that learn from episodes: the policy's learner, its losses, and auxiliary models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import nn

from turnstile.agents.base import Renderer
from turnstile.config import Kind, Recipe
from turnstile.credit.base import Estimator, targets_of
from turnstile.errors import ConfigError
from turnstile.lookup import resolve
from turnstile.losses.base import TokenLoss, needs_of
from turnstile.losses.multipliers import PROXIMAL, with_multipliers
from turnstile.models.adapt import choose_trainable
from turnstile.models.load import load_model
from turnstile.trainer.critic import AuxiliaryModel
from turnstile.trainer.learner import Learner, LearnerConfig, Objective
from turnstile.trainer.reference import LogprobProvider, PastEntropy, ProximalPolicy, ReferencePolicy, TeacherPolicy
from turnstile.wiring.agent import Agent, make_sampling
from turnstile.wiring.kinds import bind, bind_part, make_part


def trainable(recipe: Recipe, agent: Agent) -> list[nn.Parameter]:
    """Return the network's trainable parameters, adding adapters first if the recipe trains those."""
    model = recipe.model
    return choose_trainable(
        agent.model, model.train, top_layers=model.top_layers, lora_rank=model.lora_rank, lora_alpha=model.lora_alpha
    )


def make_learner(recipe: Recipe, agent: Agent) -> Learner:
    """Return the learner for RL."""
    train = recipe.train
    plan = LearnerConfig(
        lr=train.lr,
        schedule=bind("schedule", Kind(kind=train.schedule)),
        warmup=train.warmup,
        total=train.steps * train.epochs * train.minibatches,
        betas=train.betas,
        weight_decay=train.weight_decay,
        clip=train.clip,
        budget=train.max_tokens_per_microbatch,
        checkpointing=train.checkpointing,
    )
    return Learner(agent.model, trainable(recipe, agent), plan)


def make_objective(recipe: Recipe) -> Objective:
    """Return the objective for RL: loss, loss multipliers, aggregation and regularisers.

    The multiplier `tis` is added if the samples may differ from the current policy and no part corrects for that.
    Raises ConfigError if a regulariser lacks `coef`, or if the losses need an array that nothing provides.
    """
    regularizers: list[tuple[float, TokenLoss]] = []
    for kind in recipe.regularizers:
        coefficient, bare = kind.split("coef")
        if not isinstance(coefficient, int | float):
            raise ConfigError(f"regularizers: {kind.kind!r} needs coef, a number")
        regularizers.append((float(coefficient), bind("loss", bare, given=("logprobs", "batch"))))
    loss = bind("loss", recipe.loss, given=("logprobs", "batch"))
    multipliers = [bind("loss_multiplier", kind, given=("batch",)) for kind in recipe.loss_multipliers]
    corrected = any(PROXIMAL in needs_of(part).extras for part in (loss, *multipliers))
    older = recipe.rollout.max_staleness or recipe.replay_buffer.size  # episodes played ahead or replayed
    elsewhere = not recipe.engine.in_process  # other kernels computed the log-probabilities
    if (older or elsewhere) and not corrected:
        multipliers.append(bind("loss_multiplier", Kind(kind="tis"), given=("batch",)))
    objective = Objective(
        loss=with_multipliers(loss, multipliers),
        aggregation=bind("loss_aggregation", recipe.loss_aggregation, given=("rows",)),
        regularizers=tuple(regularizers),
        sampling=make_sampling(recipe),
    )
    given = {*PROVIDERS, *_declared_providers(recipe)}
    if unknown := [name for name in objective.needs.extras if name not in given]:
        raise ConfigError(f"nothing in a recipe gives the array {unknown[0]!r} that its losses need")
    return objective


PROVIDERS: Mapping[str, Callable[[Recipe, Learner, Path, int], LogprobProvider]] = {
    "ref_logprobs": lambda recipe, learner, folder, step: _reference(recipe, learner, folder, step),
    "proximal_logprobs": lambda _, learner, *__: ProximalPolicy(learner),
    "teacher_logprobs": lambda recipe, learner, *_: _teacher(recipe, learner),
    "entropy_past": lambda _, learner, *__: PastEntropy(learner),
}
"""Arrays that losses may need, each with a function (recipe, learner, run folder, last step) -> its provider. Losses
declare the providers of other arrays that they need (`losses.base.needs`)."""


def _reference(recipe: Recipe, learner: Learner, folder: Path, step: int) -> ReferencePolicy:
    return ReferencePolicy(learner, folder, step=step, every=recipe.train.reference_every, keep=recipe.train.keep)


def _teacher(recipe: Recipe, learner: Learner) -> TeacherPolicy:
    return TeacherPolicy(
        load_model(recipe.train.teacher, device=recipe.model.device, dtype=recipe.model.dtype), learner
    )


def _declared_providers(recipe: Recipe) -> dict[str, functools.partial[LogprobProvider]]:
    """Return the providers that the recipe's losses declare, with their knobs bound, by the array that they provide.

    Raises ConfigError if two losses declare different providers for the same array.
    """
    kinds = [("loss", kind) for kind in (recipe.loss, *recipe.regularizers)]
    kinds += [("loss_multiplier", kind) for kind in recipe.loss_multipliers]
    found: dict[str, functools.partial[LogprobProvider]] = {}
    for room, kind in kinds:
        if (bound := bind_part(room, kind)) is None:
            continue
        for name in set(needs_of(resolve(room, kind.kind)).extras) - set(PROVIDERS):
            first = found.setdefault(name, bound)
            if (first.func, first.keywords) != (bound.func, bound.keywords):
                raise ConfigError(f"two losses want the array {name!r} in different ways; give them the same knobs")
    return found


def make_logprob_providers(
    recipe: Recipe, objective: Objective, learner: Learner, folder: Path, *, renderer: Renderer, step: int = 0
) -> tuple[LogprobProvider, ...]:
    """Return the providers of the arrays that the recipe's losses need. `step` is the last completed one."""
    declared = _declared_providers(recipe)
    return tuple(
        PROVIDERS[name](recipe, learner, folder, step)
        if name in PROVIDERS
        else make_part(declared[name], learner=learner, renderer=renderer, sampling=objective.sampling)
        for name in objective.needs.extras
    )


def make_learned(recipe: Recipe, estimator: Estimator, learner: Learner) -> AuxiliaryModel | None:
    """Return the auxiliary model that the recipe's estimator declares, or None if it declares none."""
    if (bound := bind_part("credit", recipe.credit)) is None:
        return None
    part: AuxiliaryModel = make_part(
        bound, learner=learner, targets=targets_of(estimator), sampling=make_sampling(recipe)
    )
    return part
