"""One update: rows to forests to a gradient to new weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from turnstile.batching.batch import Batch
from turnstile.batching.forest import plant
from turnstile.errors import TrainingError
from turnstile.losses.base import Metrics, TokenLoss
from turnstile.models.attention import ForestLayout, forward_hidden, use_layouts
from turnstile.models.logprobs import token_logprobs
from turnstile.trainer.optim import Schedule, adamw, factor
from turnstile.types import F32, Row, Sampling

Weigh = Callable[[Sequence[Row]], list[F32]]
MAX_BAD_STEPS = 3
"""So many updates in a row without a finite gradient end the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """A token loss, the weights of its tokens, and further losses (regularisers) with their coefficients.

    `sampling` is the distribution that was sampled from; its truncation is applied to the trainer's logits.
    """

    loss: TokenLoss
    weigh: Weigh
    regularizers: Sequence[tuple[float, TokenLoss]] = ()
    sampling: Sampling = field(default_factory=Sampling)


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


class Learner:
    """The network, its optimiser and how far they have come."""

    def __init__(self, model: PreTrainedModel, parameters: Sequence[nn.Parameter], plan: Plan) -> None:
        use_layouts(model)
        self.model = model
        self.parameters = list(parameters)
        self.plan = plan
        self.optimizer = adamw(self.parameters, plan.lr, plan.betas, plan.weight_decay)
        self.step = 0  # optimiser steps taken or skipped
        self.bad_steps = 0  # in a row

    def update(self, rows: Sequence[Row], objective: Objective) -> tuple[dict[str, float], list[F32], list[F32]]:
        """One optimiser step over `rows`.

        Returns its metrics and, for each row, the weights f32[L] and the trainer's log-probabilities f32[L]
        before the step (0 where masked). A gradient that is not finite changes nothing and is counted; too
        many in a row raise TrainingError.
        """
        started = time.monotonic()
        weights = objective.weigh(rows)
        logprobs = [np.zeros(len(row.token_ids), np.float32) for row in rows]
        forests = plant(rows, weights, budget=self.plan.budget, device=self.model.device)
        self.optimizer.zero_grad(set_to_none=True)
        sums: dict[str, float] = {}
        for batch in forests:
            total, metrics, new = _forward(self.model, batch, objective)
            total.backward()  # type: ignore[no-untyped-call]
            _scatter(logprobs, rows, batch, new)
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + float((value * batch.weights).sum())
            sums["loss"] = sums.get("loss", 0.0) + float(total.detach())
        mass = float(sum(float(w.sum()) for w in weights)) or 1.0
        report = {f"train/{name}": value / (1.0 if name == "loss" else mass) for name, value in sums.items()}
        report |= self._step()
        report |= {
            "tokens/rows": float(sum(batch.row_tokens for batch in forests)),
            "tokens/unique": float(sum(batch.size for batch in forests)),
            "tokens/trained": float(sum(len(batch.target) for batch in forests)),
            "seconds/update": time.monotonic() - started,
        }
        return report, weights, logprobs

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
            self.bad_steps = 0
        else:
            self.bad_steps += 1
            if self.bad_steps >= MAX_BAD_STEPS:
                raise TrainingError(
                    f"{self.bad_steps} updates in a row had a gradient that is not finite; lower train.lr, check the "
                    "rewards for NaN, or resume from an earlier checkpoint"
                )
        self.optimizer.zero_grad(set_to_none=True)
        return {"train/grad_norm": norm, "train/lr": rate, "train/skipped": float(not finite)}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps besides the weights."""
        return {"optimizer": self.optimizer.state_dict(), "step": self.step, "bad_steps": self.bad_steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.bad_steps = int(state["step"]), int(state["bad_steps"])


def _forward(model: PreTrainedModel, batch: Batch, objective: Objective) -> tuple[Tensor, Metrics, Tensor]:
    """The weighted loss of one forest, its per-token metrics and the trainer's log-probabilities [N]."""
    layout = ForestLayout(batch, model.dtype)
    hidden = forward_hidden(model, batch.tokens, batch.positions, layout)
    logprobs, entropy = token_logprobs(
        model, hidden[batch.source], batch.target, batch.temperature, objective.sampling
    )
    loss, metrics = objective.loss(logprobs, batch)
    metrics = {**metrics, "entropy": entropy, "logprob_gap": (logprobs.detach() - batch.logprobs).abs()}
    for coefficient, regularizer in objective.regularizers:
        extra, further = regularizer(logprobs, batch)
        loss = loss + coefficient * extra
        metrics |= further
    return (loss * batch.weights).sum(), metrics, logprobs.detach()


def _scatter(into: Sequence[F32], rows: Sequence[Row], batch: Batch, values: Tensor) -> None:
    """Writes per-token values [N] back to the rows they belong to."""
    array, owner = values.float().cpu().numpy(), batch.row.cpu().numpy()
    for r in np.unique(owner):
        into[r][rows[r].loss_mask] = array[owner == r]
