"""A process reward without step labels: the log-ratio of a language model phi that learns to separate outcomes.

phi starts as a copy of the policy that has its own trained weights and optimiser, and shares the frozen parameters. It
learns which attempts were good. Its log-ratio to a reference at each token is then that token's reward (PRIME, arXiv
2502.01456; OPRL, later iStar, arXiv 2509.19199).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import softplus
from transformers import PreTrainedModel

from turnstile.batching.batch import Batch
from turnstile.batching.rows import by_turn, rows_of
from turnstile.batching.weights import constant
from turnstile.errors import TrainingError
from turnstile.losses.base import Metrics, extra, needs
from turnstile.losses.dpo import dpo
from turnstile.losses.pairs import log_ratio_to, trajectory_pairs
from turnstile.trainer.features import trajectories_of, zero_advantages
from turnstile.trainer.learner import Learner, Objective
from turnstile.trainer.optim import constant as no_schedule
from turnstile.trainer.reference import swapped_parameters, with_logprobs
from turnstile.types import F32, Group, Row, Sampling, Score


@needs("ref_logprobs", scope="trajectory")
def outcome_cross_entropy(logprobs: Tensor, batch: Batch, *, beta: float) -> tuple[Tensor, Metrics]:
    """Return -y log sigmoid(h) - (1 - y) log sigmoid(-h) of its trajectory at each token.

    h is beta times the sum of log phi - log reference over the trajectory's tokens. y is its outcome in [0, 1], which
    the tokens' advantages hold. A token's gradient is the derivative of the trajectory's loss with respect to the
    token's log-probability.
    """
    side = trajectory_pairs(batch)
    h = beta * side.total(log_ratio_to(extra(batch, "ref_logprobs", "outcome_cross_entropy"), logprobs))
    loss, slope = softplus(h) - side.score * h, beta * (torch.sigmoid(h) - side.score)
    right = ((h > 0) == (side.score > 0.5)).to(logprobs.dtype)
    return side.spread(loss, slope, logprobs), {"accuracy": right[side.index]}


class ImplicitReward:
    """Predicts the reward beta * (log phi - log reference) of each token, and trains phi.

    `predict` uses the current weights of `learner`'s network, and computes a step's rewards before phi learns from that
    step.

    phi takes `epochs` optimiser steps (AdamW at `lr`) per training step. Its `objective` is `cross_entropy` of outcomes
    in [0, 1] (PRIME), or `dpo` between attempts of a group with different outcomes (OPRL). `reference` is the policy at
    the start of RL (PRIME), or the policy before the step (iStar).
    """

    def __init__(
        self,
        learner: Learner,
        sampling: Sampling,
        *,
        objective: Literal["cross_entropy", "dpo"] = "cross_entropy",  # on outcomes in [0, 1], or on pairs of attempts
        reference: Literal["start", "old"] = "start",  # policy at the start of RL, or policy before the step
        beta: Annotated[float, Field(gt=0)] = 0.05,  # reward = beta * log-ratio
        lr: Annotated[float, Field(gt=0)] = 1e-6,  # learning rate of the reward model
        epochs: Annotated[int, Field(ge=1)] = 1,  # optimiser steps of the reward model per training step
    ) -> None:
        self._policy, self._sampling = learner, sampling
        self._objective, self._reference, self._beta, self._epochs = objective, reference, beta, epochs
        model = _copy_with_shared_frozen(learner.model)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        plan = replace(learner.config, lr=lr, schedule=no_schedule, warmup=0, weight_decay=0.0)
        self._phi = Learner(model, parameters, plan)
        self._start = [parameter.detach().clone() for parameter in parameters] if reference == "start" else []
        self._rows: list[list[Row]] = []  # by trajectory, with the extra `ref_logprobs`; set by `predict` for `update`

    def predict(self, groups: Sequence[Group], scores: Sequence[Sequence[Score]]) -> dict[str, Any]:
        """Return {"implicit": [trajectory][turn] -> f32[n]}, with 0 in untrained turns."""
        everyone = trajectories_of(groups)
        owned = [[row for row in rows_of(t, zero_advantages(t)) if row.loss_mask.any()] for t in everyone]
        rows = self._with_reference([row for own in owned for row in own])
        scored = iter(with_logprobs(self._phi.model, self._phi.config.budget, rows, self._sampling, "phi"))
        known = iter(rows)
        self._rows = [[next(known) for _ in own] for own in owned]
        ratios: list[list[F32]] = []
        for own in owned:
            found = [next(scored).extras for _ in own]
            ratios.append([np.float32(self._beta) * (extras["phi"] - extras["ref_logprobs"]) for extras in found])
        return {"implicit": [by_turn(*each) for each in zip(everyone, owned, ratios, strict=True)]}

    def _with_reference(self, rows: list[Row]) -> list[Row]:
        """Return the rows with the reference's log-probabilities among their extras."""
        if not rows:
            return []
        if self._reference == "old":
            return with_logprobs(self._policy.model, self._policy.config.budget, rows, self._sampling, "ref_logprobs")
        with swapped_parameters(self._phi.parameters, self._start):
            return with_logprobs(self._phi.model, self._phi.config.budget, rows, self._sampling, "ref_logprobs")

    def update(
        self, groups: Sequence[Group], scores: Sequence[Sequence[Score]], aux: Mapping[str, Any]
    ) -> dict[str, float]:
        """Train phi on the step, and return metrics; {} if there is nothing to train on.

        implicit/loss and implicit/accuracy are from before the update, with trajectories weighted by their tokens;
        accuracy is that of outcomes above 1/2, or of a trajectory's pairs (0 without pairs). implicit/reward is the
        mean over turns. implicit/skipped counts optimiser steps whose gradient was not finite. Raises TrainingError if
        `cross_entropy` meets an outcome outside [0, 1].
        """
        rows, self._rows = self._labelled_rows(groups, scores), []
        if not rows:
            return {}
        own = len({row.origin for row in rows})
        loss = dpo if self._objective == "dpo" else outcome_cross_entropy
        objective = Objective(
            loss=partial(loss, beta=self._beta),
            aggregation=partial(constant, divisor=own),
            sampling=self._sampling,
        )
        reports = [self._phi.update(rows, objective)[0] for _ in range(self._epochs)]
        turns = [float(values.sum()) for trajectory in aux["implicit"] for values in trajectory]
        return {
            "implicit/loss": reports[0]["loss/total"] * own / reports[0]["tokens/trained"],
            "implicit/accuracy": reports[0]["loss/accuracy"],
            "implicit/reward": float(np.mean(turns)),
            "implicit/skipped": sum(report["optim/skipped"] for report in reports),
        }

    def _labelled_rows(self, groups: Sequence[Group], scores: Sequence[Sequence[Score]]) -> list[Row]:
        """Return the scored rows in the baseline, with their outcome as the advantage of each trained token."""
        known, found = iter(self._rows), []
        for group, group_scores in zip(groups, scores, strict=True):
            for trajectory, score in zip(group.trajectories, group_scores, strict=True):
                own = next(known)
                if not score.in_baseline or score.outcome is None:
                    continue
                outcome = float(sum(score.outcome.values()))
                if self._objective == "cross_entropy" and not 0 <= outcome <= 1:
                    raise TrainingError(
                        f"task {group.task.id!r}, attempt {trajectory.attempt}: an outcome of {outcome:g} is no label; "
                        "credit.reward_model.objective = 'cross_entropy' needs outcomes within [0, 1], 'dpo' takes any"
                    )
                found += [replace(row, advantages=np.where(row.loss_mask, np.float32(outcome), 0)) for row in own]
        return found

    def state(self) -> dict[str, Any]:
        """Return phi's trained weights, its optimiser, and the reference weights if they are fixed."""
        weights = [parameter.detach() for parameter in self._phi.parameters]
        return {"phi": weights, "learner": self._phi.state(), "start": self._start}

    def restore(self, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for into, values in ((self._phi.parameters, state["phi"]), (self._start, state["start"])):
                for own, value in zip(into, values, strict=True):
                    own.copy_(value)
        self._phi.restore(state["learner"])


def _copy_with_shared_frozen(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the model that shares the frozen parameters."""
    shared: dict[int, nn.Parameter] = {id(p): p for p in model.parameters() if not p.requires_grad}
    return copy.deepcopy(model, dict(shared))
