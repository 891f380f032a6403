"""The optimiser step, in which rows are packed into prefix trees and their gradients are summed into one update."""

from __future__ import annotations

import functools
import logging
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from turnstile.batching.batch import Batch
from turnstile.batching.forest import pack_prefix_trees
from turnstile.losses.base import Metrics, Needs, TokenLoss, needs_of
from turnstile.models.attention import ForestLayout, forward_forest, try_layouts
from turnstile.models.checkpointing import checkpoint_layers
from turnstile.models.frozen_layers import count_frozen_layers, forward_above
from turnstile.models.logprobs import token_logprobs
from turnstile.trainer.activation_cache import ActivationCache, RolloutActivations, saved_flops_share
from turnstile.trainer.optim import Schedule, adamw, lr_multiplier
from turnstile.trainer.scoped_loss import Evaluate, Measure, is_cut, solve
from turnstile.types import F32, Row, Sampling

LossAggregation = Callable[[Sequence[Row]], list[F32]]
"""Rows -> the loss weight of each of their tokens, f32[L]."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """A token loss, its loss aggregation, and further losses (regularisers) with their coefficients.

    `coefficient` belongs to the loss itself. `sampling` is the distribution that the rollout sampled from, whose
    truncation is also applied to the trainer's logits.
    """

    loss: TokenLoss
    aggregation: LossAggregation
    coefficient: float = 1.0
    regularizers: Sequence[tuple[float, TokenLoss]] = ()
    sampling: Sampling = field(default_factory=Sampling)

    @property
    def needs(self) -> Needs:
        """The combined needs of the loss and its regularisers."""
        return functools.reduce(operator.or_, map(needs_of, (self.loss, *(loss for _, loss in self.regularizers))))

    def token_losses(self, logprobs: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the loss [N] of a batch's tokens, including regularisers, and metrics by slash-separated name."""
        batch = replace(batch, extras={**batch.extras, "entropy": entropy})
        loss, diagnostics = self.loss(logprobs, batch)
        loss = loss if self.coefficient == 1.0 else self.coefficient * loss
        metrics = {f"loss/{name}": value for name, value in diagnostics.items()}
        gap = (logprobs.detach() - batch.logprobs).abs()
        metrics |= {"policy/entropy": entropy.detach(), "policy/logprob_gap": gap}
        for coefficient, regularizer in self.regularizers:
            penalty, diagnostics = regularizer(logprobs, batch)
            loss = loss + coefficient * penalty
            metrics |= {f"loss/{name}": value for name, value in diagnostics.items()}
        return loss, metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerConfig:
    """The optimiser's settings. `total` is the run's number of optimiser steps, which the schedule needs."""

    lr: float
    schedule: Schedule
    warmup: int
    total: int
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    clip: float = 1.0
    budget: int = 8192
    share: bool = True  # compute prefixes shared by several rows only once
    checkpointing: bool = False  # keep only each layer's input, and recompute the layer in the backward pass


class Learner:
    """The network, its optimiser, and the number of optimiser steps.

    Model families with layers other than plain attention are trained row by row, with a warning.
    """

    def __init__(self, model: PreTrainedModel, parameters: Sequence[nn.Parameter], config: LearnerConfig) -> None:
        why = try_layouts(model)
        if why:
            _log.warning("%s: rows are trained one by one, and shared prefixes are computed for each row", why)
        if any(parameter.dtype.itemsize < torch.float32.itemsize for parameter in parameters):
            _log.warning(
                "the trained parameters have less precision than float32, so rounding discards most of each optimiser "
                'step; set model.dtype = "float32", or model.train = "lora", which keeps its adapters in float32'
            )
        self.shares = config.share and not why
        self.model = model
        self.parameters = list(parameters)
        self.config = config
        self.optimizer = adamw(self.parameters, config.lr, config.betas, config.weight_decay)
        self.frozen = 0 if why else count_frozen_layers(model)
        self.step = 0  # optimiser steps taken or skipped
        self.mean_entropy = float("nan")  # of trained tokens, over those steps

    def activation_cache(
        self, from_rollout: RolloutActivations | None = None, *, keep: bool = False
    ) -> ActivationCache | None:
        """Return a cache of the frozen layers' outputs, or None if no layer is frozen."""
        if not self.frozen:
            return None
        return ActivationCache(self.model, self.frozen, self.config.budget, from_rollout, keep=keep)

    def update(
        self,
        rows: Sequence[Row],
        objective: Objective,
        activations: ActivationCache | None = None,
        stored: tuple[Sequence[Row], Objective] | None = None,
    ) -> tuple[dict[str, float], list[F32], list[F32]]:
        """Take one optimiser step over `rows`, and over `stored` rows, which have their own objective.

        Returns the step's metrics and, for each row, the weights f32[L] and the trainer's log-probabilities f32[L]
        before the step (0 where masked). `activations` caches the frozen layers' outputs. If the gradient is not
        finite, the parameters stay unchanged and the metric optim/skipped is 1.
        """
        started = time.monotonic()
        weights = objective.aggregation(rows)
        logprobs = [np.zeros(len(row.token_ids), np.float32) for row in rows]
        forests, known = self._pack(rows, weights, activations)
        self.optimizer.zero_grad(set_to_none=True)
        sums = {"loss/total": 0.0}
        measure = functools.partial(_measure, self.model, objective=objective, frozen=self.frozen)
        evaluate: Evaluate = objective.token_losses
        if is_cut(forests, objective.needs.scope):
            forests, evaluate = solve(forests, evaluate, measure)
        for batch in forests:
            metrics, new = self._accumulate(batch, measure, evaluate)
            scatter(logprobs, rows, batch, new)
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + value
        mass = float(sum(float(w.sum()) for w in weights)) or 1.0
        report = {name: value / (1.0 if name == "loss/total" else mass) for name, value in sums.items()}
        report |= self._rehearse(*stored, activations) if stored is not None and stored[0] else {}
        self._update_mean_entropy(report.get("policy/entropy", float("nan")))
        report |= self._step()
        report |= {
            "tokens/rows": float(sum(batch.row_tokens for batch in forests)),
            "tokens/unique": float(sum(batch.size for batch in forests)),
            "tokens/activations_cached": float(known),
            "tokens/trained": float(sum(len(batch.target) for batch in forests)),
            "update/saved": self._saved_share(forests, known),
            "seconds/update": time.monotonic() - started,
        }
        return report, weights, logprobs

    def _pack(
        self, rows: Sequence[Row], weights: Sequence[F32], activations: ActivationCache | None
    ) -> tuple[list[Batch], int]:
        """Return the rows packed into forests, and the number of tokens that skip the frozen layers."""
        known, computed = activations.get(rows) if activations else (None, 0)
        budget, device = self.config.budget, self.model.device
        forests = pack_prefix_trees(rows, weights, budget=budget, device=device, share=self.shares, activations=known)
        return forests, 0 if known is None else max(0, sum(batch.size for batch in forests) - computed)

    def _saved_share(self, forests: Sequence[Batch], known: int) -> float:
        """Return the share of the update's matmul FLOPs that the activation cache saved."""
        unique, trained = sum(batch.size for batch in forests), sum(len(batch.target) for batch in forests)
        return saved_flops_share(self.model, self.frozen, known, unique, trained) if known else 0.0

    def _rehearse(
        self, rows: Sequence[Row], objective: Objective, activations: ActivationCache | None
    ) -> dict[str, float]:
        """Add the gradient of stored rows, and return the means of their loss metrics, named rehearsal/*."""
        weights = objective.aggregation(rows)
        forests, _ = self._pack(rows, weights, activations)
        measure = functools.partial(_measure, self.model, objective=objective, frozen=self.frozen)
        sums: dict[str, float] = {}
        for batch in forests:
            metrics, _ = self._accumulate(batch, measure, objective.token_losses)
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + value
        mass = float(sum(float(w.sum()) for w in weights)) or 1.0
        means = {name: value / mass for name, value in sums.items() if name.startswith("loss/")}
        return {f"rehearsal/{name.removeprefix('loss/')}": value for name, value in means.items()}

    def _update_mean_entropy(self, entropy: float) -> None:
        """Include the entropy of one more step in the running mean, unless it is not finite."""
        if np.isfinite(entropy):
            before = self.mean_entropy if np.isfinite(self.mean_entropy) else entropy
            self.mean_entropy = before + (entropy - before) / (self.step + 1)

    def _accumulate(self, batch: Batch, measure: Measure, evaluate: Evaluate) -> tuple[dict[str, float], Tensor]:
        """Add the gradient of one forest; return weighted sums of its metrics, and the trainer's log-probabilities [N].

        The forest's activations are freed before the next forest is computed.
        """
        with checkpoint_layers(self.model, enabled=self.config.checkpointing):
            logprobs, entropy = measure(batch)
            loss, metrics = evaluate(logprobs, entropy, batch)
            total = (loss * batch.weights).sum()
        total.backward()
        sums = {
            "loss/total": total.detach(),
            **{name: (value * batch.weights).sum() for name, value in metrics.items()},
        }
        numbers = torch.stack([value.double() for value in sums.values()]).tolist()  # one synchronisation with the GPU
        return dict(zip(sums, numbers, strict=True)), logprobs.detach().cpu()

    def _step(self) -> dict[str, float]:
        """Clip the gradient, and step the optimiser unless the gradient is not finite; return its metrics."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip))
        rate = self.config.lr * lr_multiplier(self.config.schedule, self.step, self.config.warmup, self.config.total)
        finite = bool(np.isfinite(norm))
        self.step += 1
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"optim/grad_norm": norm, "optim/lr": rate, "optim/skipped": float(not finite)}

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores besides the weights."""
        return {"optimizer": self.optimizer.state_dict(), "step": self.step, "mean_entropy": self.mean_entropy}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state` returned."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = int(state["step"])
        self.mean_entropy = float(state["mean_entropy"])


def _measure(model: PreTrainedModel, batch: Batch, objective: Objective, frozen: int) -> tuple[Tensor, Tensor]:
    """Return the policy's log-probabilities [N] and entropies [N] at the trained tokens of a forest."""
    if batch.activations is None:
        hidden = forward_forest(model, batch)
    else:
        hidden = forward_above(model, frozen, batch.activations, batch.positions, ForestLayout(batch))
    return token_logprobs(
        model,
        hidden.index_select(0, batch.source),
        batch.target,
        batch.temperature,
        objective.sampling,
        entropy_gradient=objective.needs.entropy_gradient,
    )


def scatter(into: Sequence[F32], rows: Sequence[Row], batch: Batch, values: Tensor) -> None:
    """Copy the values [N] of a batch's trained tokens into the arrays of their rows."""
    array, owner = values.float().cpu().numpy(), batch.row.cpu().numpy()
    for r in np.unique(owner):
        into[r][rows[r].loss_mask] = array[owner == r]
