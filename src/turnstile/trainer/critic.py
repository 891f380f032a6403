"""A critic for the estimators that need one: a linear head on the policy's last hidden states.

The head reads what the policy knows and does not move it: it is fitted to hidden states of the network before the step,
with an optimiser of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from turnstile.batching.forest import plant
from turnstile.batching.rows import by_turn, rows_of
from turnstile.credit.base import Advantages, Targets
from turnstile.errors import TrainingError
from turnstile.models.attention import forward_forest
from turnstile.trainer.learner import Learner
from turnstile.types import Group, Row, Score, Trajectory


class Critic:
    """Values of the states in which tokens were sampled, and the head that learns them.

    `targets` says what it learns (`credit.base.targets_of`), in `epochs` steps of Adam at `lr` over all tokens of a
    step. It begins at 0. Call `values` before the estimator and `learn` after it, once each a step.
    """

    def __init__(self, learner: Learner, targets: Targets, *, lr: float, epochs: int) -> None:
        self._learner = learner
        self._targets = targets
        self._epochs = epochs
        width = int(learner.model.config.get_text_config().hidden_size)
        self._head = nn.Linear(width, 1, device=learner.model.device, dtype=torch.float32)
        nn.init.zeros_(self._head.weight)
        nn.init.zeros_(self._head.bias)
        self._optimizer = torch.optim.Adam(self._head.parameters(), lr=lr)
        self._seen: list[Tensor] = []  # [N, H] before each row's trained tokens, from `values` to `learn`

    def values(self, groups: Sequence[Group]) -> Advantages:
        """[trajectory][turn] -> f32[n], the value before each sampled token; 0 in turns that are not trainable."""
        empty = [[np.zeros(len(turn.completion.token_ids), np.float32) for turn in t.turns] for t in _all(groups)]
        owners = _rows(groups, empty)
        self._seen = self._look([row for rows in owners for row in rows])
        with torch.no_grad():
            found = iter([self._value(seen).cpu().numpy() for seen in self._seen])
        result: Advantages = []
        for trajectory, rows in zip(_all(groups), owners, strict=True):
            arrays = [np.zeros(len(row.token_ids), np.float32) for row in rows]
            for row, array in zip(rows, arrays, strict=True):
                array[row.loss_mask] = next(found)
            result.append(by_turn(trajectory, rows, arrays))
        return result

    def learn(
        self, groups: Sequence[Group], scores: Sequence[Sequence[Score]], aux: Mapping[str, Any]
    ) -> dict[str, float]:
        """Fits the head to this step's targets. Metrics: critic/loss (mean square before), critic/explained (the share
        of the targets' variance that the values told beforehand; 0 for a constant), critic/value (mean)."""
        rows = [row for own in _rows(groups, self._targets(groups, scores, aux)) for row in own]
        seen, self._seen = self._seen, []
        if not rows:
            return {}
        wanted = torch.from_numpy(np.concatenate([row.advantages[row.loss_mask] for row in rows]))
        known = ~torch.isnan(wanted)
        count = int(known.sum())
        if not count:
            return {}
        budget = self._learner.plan.budget
        pieces = list(zip(torch.cat(seen)[known].split(budget), wanted[known].split(budget), strict=True))
        with torch.no_grad():
            metrics = _metrics(torch.cat([self._value(features) for features, _ in pieces]).cpu(), wanted[known])
        for _ in range(self._epochs):
            self._optimizer.zero_grad(set_to_none=True)
            for features, targets in pieces:
                error = self._value(features) - targets.to(self._head.weight.device)
                (error.square().sum() / count).backward()
            gradients = [parameter.grad for parameter in self._head.parameters()]
            if not all(g is not None and bool(torch.isfinite(g).all()) for g in gradients):
                raise TrainingError("the critic's gradient is not finite: its targets are too large; scale the rewards")
            self._optimizer.step()
        return metrics

    def _value(self, features: Tensor) -> Tensor:
        """Values [N] of hidden states [N, H], wherever these are kept."""
        value: Tensor = self._head(features.to(self._head.weight.device))[:, 0]
        return value

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON; floats come back bit by bit."""
        moments = [
            {name: value.tolist() for name, value in self._optimizer.state.get(parameter, {}).items()}
            for parameter in self._head.parameters()
        ]
        return {"head": [parameter.tolist() for parameter in self._head.parameters()], "moments": moments}

    def restore(self, state: Mapping[str, Any]) -> None:
        for parameter, values, moments in zip(self._head.parameters(), state["head"], state["moments"], strict=True):
            parameter.data.copy_(torch.tensor(values))
            if moments:
                place = parameter.device
                self._optimizer.state[parameter] = {
                    name: torch.tensor(value, device="cpu" if name == "step" else place)
                    for name, value in moments.items()
                }

    def _look(self, rows: Sequence[Row]) -> list[Tensor]:
        """Last hidden states f32[N, H] before the trained tokens of each row, each of them normalised; in main memory,
        so that they take none of the device's while the policy learns."""
        if not rows:
            return []
        model = self._learner.model
        found: list[Tensor] = [torch.empty(0)] * len(rows)
        nothing = [np.zeros(len(row.token_ids), np.float32) for row in rows]
        with torch.no_grad():
            plan, share = self._learner.plan, self._learner.shares
            for batch in plant(rows, nothing, budget=plan.budget, device=model.device, share=share):
                hidden = forward_forest(model, batch)[batch.source].float()
                hidden = layer_norm(hidden, hidden.shape[-1:])
                hidden, owner = hidden.cpu(), batch.row.cpu()
                for row in owner.unique().tolist():
                    found[row] = hidden[owner == row]
        return found


def _all(groups: Sequence[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


def _rows(groups: Sequence[Group], values: Advantages) -> list[list[Row]]:
    """The rows of each trajectory with something to train in them; `values` stand in the place of advantages."""
    return [
        [row for row in rows_of(trajectory, turns) if row.loss_mask.any()]
        for trajectory, turns in zip(_all(groups), values, strict=True)
    ]


def _metrics(values: Tensor, wanted: Tensor) -> dict[str, float]:
    spread = float(wanted.var(unbiased=False))
    unexplained = float((wanted - values).var(unbiased=False))
    return {
        "critic/loss": float((values - wanted).square().mean()),
        "critic/explained": 1.0 - unexplained / spread if spread > 0 else 0.0,
        "critic/value": float(values.mean()),
    }
