"""One update: rows to forests to a gradient to new weights."""

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
from turnstile.trainer.activation_cache import ActivationCache, RolloutActivations, share_saved
from turnstile.trainer.optim import Schedule, adamw, factor
from turnstile.trainer.whole import Evaluate, Measure, is_cut, solve
from turnstile.types import F32, Row, Sampling

Weigh = Callable[[Sequence[Row]], list[F32]]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """A token loss, the weights of its tokens, and further losses (regularisers) with their coefficients.

    `sampling` is the distribution that was sampled from; its truncation is applied to the trainer's logits.
    `coefficient` is that of the loss itself.
    """

    loss: TokenLoss
    weigh: Weigh
    coefficient: float = 1.0
    regularizers: Sequence[tuple[float, TokenLoss]] = ()
    sampling: Sampling = field(default_factory=Sampling)

    @property
    def needs(self) -> Needs:
        """What the loss and the regularisers need, together."""
        return functools.reduce(operator.or_, map(needs_of, (self.loss, *(loss for _, loss in self.regularizers))))

    def evaluate(self, logprobs: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        """The loss [N] of a forest's tokens, regularisers and all, and its metrics by slash-separated names."""
        batch = replace(batch, extras={**batch.extras, "entropy": entropy})
        loss, found = self.loss(logprobs, batch)
        loss = loss if self.coefficient == 1.0 else self.coefficient * loss
        metrics = {f"loss/{name}": value for name, value in found.items()}
        gap = (logprobs.detach() - batch.logprobs).abs()
        metrics |= {"policy/entropy": entropy.detach(), "policy/logprob_gap": gap}
        for coefficient, regularizer in self.regularizers:
            extra, found = regularizer(logprobs, batch)
            loss = loss + coefficient * extra
            metrics |= {f"loss/{name}": value for name, value in found.items()}
        return loss, metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How gradients become steps. `total` is the number of optimiser steps of the whole run, for the schedule."""

    lr: float
    schedule: Schedule
    warmup: int
    total: int
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    clip: float = 1.0
    budget: int = 8192
    share: bool = True  # compute what rows begin with in common once
    checkpointing: bool = False  # keep of each layer only what goes into it, and compute it again for its gradient


class Learner:
    """The network, its optimiser and how far they have come.

    A family whose layers are not plain attention is trained all the same, row by row, and the log says so.
    """

    def __init__(self, model: PreTrainedModel, parameters: Sequence[nn.Parameter], plan: Plan) -> None:
        why = try_layouts(model)
        if why:
            _log.warning("%s: its rows are trained one by one, and what they share is computed for each", why)
        if any(parameter.dtype.itemsize < torch.float32.itemsize for parameter in parameters):
            _log.warning(
                "what learns is in less than float32, whose rounding most of an optimiser's steps are lost in; take "
                'model.dtype = "float32", or model.train = "lora", whose adapters are in float32'
            )
        self.shares = plan.share and not why
        self.model = model
        self.parameters = list(parameters)
        self.plan = plan
        self.optimizer = adamw(self.parameters, plan.lr, plan.betas, plan.weight_decay)
        self.frozen = 0 if why else count_frozen_layers(model)
        self.step = 0  # optimiser steps taken or skipped
        self.mean_entropy = float("nan")  # of the tokens trained on, over those steps

    def trunks(self, left: RolloutActivations | None = None, *, keep: bool = False) -> ActivationCache | None:
        """What the frozen layers give for rows, if there are such layers; see `ActivationCache`."""
        return ActivationCache(self.model, self.frozen, self.plan.budget, left, keep=keep) if self.frozen else None

    def update(
        self,
        rows: Sequence[Row],
        objective: Objective,
        trunks: ActivationCache | None = None,
        stored: tuple[Sequence[Row], Objective] | None = None,
    ) -> tuple[dict[str, float], list[F32], list[F32]]:
        """One optimiser step over `rows`, and over `stored` rows with an objective of their own.

        Returns its metrics and, for each row, the weights f32[L] and the trainer's log-probabilities f32[L]
        before the step (0 where masked). `trunks` give what is known of the frozen layers' output. A gradient
        that is not finite changes nothing and is reported.
        """
        started = time.monotonic()
        weights = objective.weigh(rows)
        logprobs = [np.zeros(len(row.token_ids), np.float32) for row in rows]
        forests, known = self._plant(rows, weights, trunks)
        self.optimizer.zero_grad(set_to_none=True)
        sums = {"loss/total": 0.0}
        measure = functools.partial(_measure, self.model, objective=objective, frozen=self.frozen)
        evaluate: Evaluate = objective.evaluate
        if is_cut(forests, objective.needs.whole):
            forests, evaluate = solve(forests, evaluate, measure)
        for batch in forests:
            found, new = self._accumulate(batch, measure, evaluate)
            scatter(logprobs, rows, batch, new)
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + value
        mass = float(sum(float(w.sum()) for w in weights)) or 1.0
        report = {name: value / (1.0 if name == "loss/total" else mass) for name, value in sums.items()}
        report |= self._rehearse(*stored, trunks) if stored is not None and stored[0] else {}
        self._remember(report.get("policy/entropy", float("nan")))
        report |= self._step()
        report |= {
            "tokens/rows": float(sum(batch.row_tokens for batch in forests)),
            "tokens/unique": float(sum(batch.size for batch in forests)),
            "tokens/activations_cached": float(known),
            "tokens/trained": float(sum(len(batch.target) for batch in forests)),
            "update/saved": self._saved(forests, known),
            "seconds/update": time.monotonic() - started,
        }
        return report, weights, logprobs

    def _plant(
        self, rows: Sequence[Row], weights: Sequence[F32], trunks: ActivationCache | None
    ) -> tuple[list[Batch], int]:
        """The rows as forests, and for how many of their tokens the frozen layers need not run again."""
        known, computed = trunks.of(rows) if trunks else (None, 0)
        budget, device = self.plan.budget, self.model.device
        forests = pack_prefix_trees(rows, weights, budget=budget, device=device, share=self.shares, activations=known)
        return forests, 0 if known is None else max(0, sum(batch.size for batch in forests) - computed)

    def _saved(self, forests: Sequence[Batch], known: int) -> float:
        """The share of the update's operations in matrices that fell away with the frozen layers."""
        unique, trained = sum(batch.size for batch in forests), sum(len(batch.target) for batch in forests)
        return share_saved(self.model, self.frozen, known, unique, trained) if known else 0.0

    def _rehearse(self, rows: Sequence[Row], objective: Objective, trunks: ActivationCache | None) -> dict[str, float]:
        """Adds the gradient of stored rows. Metrics of their loss as means, below rehearsal/."""
        weights = objective.weigh(rows)
        forests, _ = self._plant(rows, weights, trunks)
        measure = functools.partial(_measure, self.model, objective=objective, frozen=self.frozen)
        sums: dict[str, float] = {}
        for batch in forests:
            found, _ = self._accumulate(batch, measure, objective.evaluate)
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + value
        mass = float(sum(float(w.sum()) for w in weights)) or 1.0
        metrics = {name: value / mass for name, value in sums.items() if name.startswith("loss/")}
        return {f"rehearsal/{name.removeprefix('loss/')}": value for name, value in metrics.items()}

    def _remember(self, entropy: float) -> None:
        """Takes one more step's entropy into the mean, if it is a number."""
        if np.isfinite(entropy):
            before = self.mean_entropy if np.isfinite(self.mean_entropy) else entropy
            self.mean_entropy = before + (entropy - before) / (self.step + 1)

    def _accumulate(self, batch: Batch, measure: Measure, evaluate: Evaluate) -> tuple[dict[str, float], Tensor]:
        """Adds the gradient of one forest to what is there. Returns its metrics, weighted and summed, and the trainer's
        log-probabilities [N]; nothing else is left of it when the next one begins."""
        with checkpoint_layers(self.model, enabled=self.plan.checkpointing):
            logprobs, entropy = measure(batch)
            loss, metrics = evaluate(logprobs, entropy, batch)
            total = (loss * batch.weights).sum()
        total.backward()
        sums = {
            "loss/total": total.detach(),
            **{name: (value * batch.weights).sum() for name, value in metrics.items()},
        }
        numbers = torch.stack([value.double() for value in sums.values()]).tolist()  # a GPU is waited for once
        return dict(zip(sums, numbers, strict=True)), logprobs.detach().cpu()

    def _step(self) -> dict[str, float]:
        """Clips the gradient and steps, or skips a step whose gradient is not finite."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.plan.clip))
        rate = self.plan.lr * factor(self.plan.schedule, self.step, self.plan.warmup, self.plan.total)
        finite = bool(np.isfinite(norm))
        self.step += 1
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"optim/grad_norm": norm, "optim/lr": rate, "optim/skipped": float(not finite)}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps besides the weights."""
        return {"optimizer": self.optimizer.state_dict(), "step": self.step, "mean_entropy": self.mean_entropy}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = int(state["step"])
        self.mean_entropy = float(state["mean_entropy"])


def _measure(model: PreTrainedModel, batch: Batch, objective: Objective, frozen: int) -> tuple[Tensor, Tensor]:
    """The policy's log-probabilities [N] and entropies [N] at a forest's trained tokens."""
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
    """Writes per-token values [N] back to the rows they belong to."""
    array, owner = values.float().cpu().numpy(), batch.row.cpu().numpy()
    for r in np.unique(owner):
        into[r][rows[r].loss_mask] = array[owner == r]
