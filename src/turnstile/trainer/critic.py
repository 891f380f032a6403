"""A critic for estimators that need one, implemented as a linear head on the policy's last hidden states.

The head does not change the policy. It has its own optimiser, and is fitted to the network's hidden states before the
step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from turnstile.batching.rows import by_turn, rows_of
from turnstile.credit.base import Advantages, Targets
from turnstile.errors import TrainingError
from turnstile.losses.value import clipped_error
from turnstile.trainer.features import features, trajectories_of, zero_advantages
from turnstile.trainer.learner import Learner
from turnstile.types import Group, Row, Score


class AuxiliaryModel(Protocol):
    """A model that is trained beside the policy and makes predictions for an estimator.

    Each step calls `predict` before the estimator, and `update` after the policy's update. Most models predict before
    they learn from the step.
    """

    def predict(self, groups: Sequence[Group], scores: Sequence[Sequence[Score]]) -> dict[str, Any]:
        """Return the predictions that the estimator receives as `aux`."""
        ...

    def update(
        self, groups: Sequence[Group], scores: Sequence[Sequence[Score]], aux: Mapping[str, Any]
    ) -> dict[str, float]:
        """Learn from the step that `predict` saw, and return metrics."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores, in a form that `torch.save` accepts."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Critic:
    """A value head on the hidden states from which tokens were sampled.

    It is fitted to what `targets` returns (`credit.base.targets_of`), by `epochs` steps of Adam at `lr` over all tokens
    of a step. All values start at 0. With `clip` above 0 the loss is that of `losses/value.py`, which does not reward
    moving a value by more than `clip` in one training step.
    """

    def __init__(
        self,
        learner: Learner,
        targets: Targets,
        *,
        lr: Annotated[float, Field(gt=0)] = 1e-3,  # learning rate of the head
        epochs: Annotated[int, Field(ge=1)] = 8,  # optimiser steps of the head per training step
        clip: Annotated[float, Field(ge=0)] = 0.0,  # value clipping range of the loss `value` (0: off)
    ) -> None:
        self._learner = learner
        self._targets = targets
        self._epochs = epochs
        self._clip = clip or None
        width = int(learner.model.config.get_text_config().hidden_size)
        self._head = nn.Linear(width, 1, device=learner.model.device, dtype=torch.float32)
        nn.init.zeros_(self._head.weight)
        nn.init.zeros_(self._head.bias)
        self._optimizer = torch.optim.Adam(self._head.parameters(), lr=lr)
        self._seen: list[Tensor] = []  # [N, H] before each row's trained tokens; set by `predict` for `update`

    def predict(self, groups: Sequence[Group], scores: Sequence[Sequence[Score]]) -> dict[str, Any]:
        """Return {"values": [trajectory][turn] -> f32[n]}: the value before each sampled token, 0 if untrained."""
        return {"values": self.values(groups)}

    def values(self, groups: Sequence[Group]) -> Advantages:
        """Return the values before each sampled token, [trajectory][turn] -> f32[n]; 0 in untrained turns."""
        everyone = trajectories_of(groups)
        owners = _rows(groups, [zero_advantages(trajectory) for trajectory in everyone])
        self._seen = features(self._learner, [row for rows in owners for row in rows])
        with torch.no_grad():
            found = iter([self._value(seen).cpu().numpy() for seen in self._seen])
        result: Advantages = []
        for trajectory, rows in zip(everyone, owners, strict=True):
            arrays = [np.zeros(len(row.token_ids), np.float32) for row in rows]
            for row, array in zip(rows, arrays, strict=True):
                array[row.loss_mask] = next(found)
            result.append(by_turn(trajectory, rows, arrays))
        return result

    def update(
        self, groups: Sequence[Group], scores: Sequence[Sequence[Score]], aux: Mapping[str, Any]
    ) -> dict[str, float]:
        """Fit the head to this step's targets, and return metrics; {} if there are no targets.

        All metrics are from before the fit: critic/loss (mean squared error), critic/explained (the share of the
        targets' variance that the values explained; 0 for constant targets) and critic/value (mean).
        """
        rows = [row for own in _rows(groups, self._targets(groups, scores, aux)) for row in own]
        seen, self._seen = self._seen, []
        if not rows:
            return {}
        wanted = torch.from_numpy(np.concatenate([row.advantages[row.loss_mask] for row in rows]))
        known = ~torch.isnan(wanted)
        count = int(known.sum())
        if not count:
            return {}
        budget = self._learner.config.budget
        pieces = list(zip(torch.cat(seen)[known].split(budget), wanted[known].split(budget), strict=True))
        with torch.no_grad():
            before = [self._value(states) for states, _ in pieces]
            metrics = _metrics(torch.cat(before).cpu(), wanted[known])
        for _ in range(self._epochs):
            self._optimizer.zero_grad(set_to_none=True)
            for (states, targets), old in zip(pieces, before, strict=True):
                error = clipped_error(self._value(states), old, targets.to(self._head.weight.device), self._clip)
                (error.sum() / count).backward()
            step_finite(self._optimizer, self._head, "the critic")
        return metrics

    def _value(self, states: Tensor) -> Tensor:
        """Return the values [N] of hidden states [N, H], which are moved to the head's device."""
        value: Tensor = self._head(states.to(self._head.weight.device))[:, 0]
        return value

    def state(self) -> dict[str, Any]:
        """Return the states of the head and its optimiser."""
        return {"head": self._head.state_dict(), "optimizer": self._optimizer.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])


def step_finite(optimizer: torch.optim.Optimizer, module: nn.Module, who: str) -> None:
    """Take one optimiser step of an auxiliary model. Raises TrainingError if a gradient is not finite."""
    gradients = [parameter.grad for parameter in module.parameters()]
    if not all(gradient is not None and bool(torch.isfinite(gradient).all()) for gradient in gradients):
        raise TrainingError(f"{who}'s gradient is not finite: its targets are too large; scale the rewards")
    optimizer.step()


def _rows(groups: Sequence[Group], values: Advantages) -> list[list[Row]]:
    """Return the rows of each trajectory that have trained tokens, with `values` as their advantages."""
    return [
        [row for row in rows_of(trajectory, turns) if row.loss_mask.any()]
        for trajectory, turns in zip(trajectories_of(groups), values, strict=True)
    ]


def _metrics(values: Tensor, wanted: Tensor) -> dict[str, float]:
    spread = float(wanted.var(unbiased=False))
    unexplained = float((wanted - values).var(unbiased=False))
    return {
        "critic/loss": float((values - wanted).square().mean()),
        "critic/explained": 1.0 - unexplained / spread if spread > 0 else 0.0,
        "critic/value": float(values.mean()),
    }
