"""An estimator of turns' contributions, learned from outcomes alone, that sum to an episode's outcome.

A head on the policy's last hidden states sees a turn's state and the turn itself (`turn_features.py`), as the
turn-level critic does. It does not change the policy, whereas SPA-RL (arXiv 2505.20732) gives its progress estimator
its own weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from turnstile.credit.base import Targets
from turnstile.trainer.critic import step_finite
from turnstile.trainer.learner import Learner
from turnstile.trainer.turn_features import TurnFeatures, read_turn_features, turn_head
from turnstile.types import Group, Score


class ProgressEstimator:
    """Predicts the contribution of each turn before it learns from the step, and fits their sums to targets.

    `targets` returns the target sum of each attempt, f64[trajectories], NaN for none. Each fit takes `epochs` steps of
    Adam at `lr` on the mean squared error over attempts. All contributions start at 0.
    """

    def __init__(
        self,
        learner: Learner,
        targets: Targets,
        *,
        lr: Annotated[float, Field(gt=0)] = 1e-3,  # learning rate of the head
        epochs: Annotated[int, Field(ge=1)] = 8,  # optimiser steps of the head per training step
    ) -> None:
        self._learner = learner
        self._targets = targets
        self._epochs = epochs
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the head's first weights must not depend on what ran before
            head = turn_head(2 * int(learner.model.config.get_text_config().hidden_size))
        self._head = head.to(learner.model.device)
        self._optimizer = torch.optim.Adam(self._head.parameters(), lr=lr)
        self._seen: TurnFeatures | None = None  # set by `predict` for `update`

    def predict(self, groups: Sequence[Group], scores: Sequence[Sequence[Score]]) -> dict[str, Any]:
        """Return {"progress": [trajectory] -> f32[K]}, with 0 for untrained turns."""
        self._seen = read_turn_features(self._learner, groups)
        with torch.no_grad():
            return {"progress": self._seen.spread(self._contributions(self._seen.after))}

    def update(
        self, groups: Sequence[Group], scores: Sequence[Sequence[Score]], aux: Mapping[str, Any]
    ) -> dict[str, float]:
        """Fit the sums of contributions to this step's targets, and return metrics; {} if there are none.

        All metrics are from before the fit: progress/loss (mean squared error over attempts), progress/explained (the
        share of the targets' variance that the sums explained; 0 for equal targets), progress/contribution (mean over
        turns) and progress/spread (its standard deviation).
        """
        seen, self._seen = self._seen, None
        if seen is None or not len(seen.turns):
            return {}
        wanted = torch.from_numpy(np.asarray(self._targets(groups, scores, aux), np.float32))
        has_turns = torch.zeros(len(wanted), dtype=torch.bool)
        has_turns[seen.trajectory] = True
        known = has_turns & ~torch.isnan(wanted)
        if not known.any():
            return {}
        device = self._learner.model.device
        owner, target_sums, known = torch.from_numpy(seen.trajectory).to(device), wanted.to(device), known.to(device)
        metrics: dict[str, float] = {}
        for _ in range(self._epochs):
            self._optimizer.zero_grad(set_to_none=True)
            contributions = self._contributions(seen.after)
            sums = torch.zeros_like(target_sums).index_add(0, owner, contributions)
            error = (sums - target_sums)[known]
            metrics = metrics or _metrics(contributions.detach(), error.detach(), target_sums[known])
            error.square().mean().backward()
            step_finite(self._optimizer, self._head, "the progress estimator")
        return metrics

    def _contributions(self, states: Tensor) -> Tensor:
        """Return the contributions of turns [M] from their features [M, 2H]."""
        values: Tensor = self._head(states.to(self._learner.model.device))[:, 0]
        return values

    def state(self) -> dict[str, Any]:
        """Return the states of the head and its optimiser."""
        return {"head": self._head.state_dict(), "optimizer": self._optimizer.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])


def _metrics(contributions: Tensor, error: Tensor, target_sums: Tensor) -> dict[str, float]:
    spread = float(target_sums.var(unbiased=False))
    return {
        "progress/loss": float(error.square().mean()),
        "progress/explained": 1.0 - float(error.var(unbiased=False)) / spread if spread > 0 else 0.0,
        "progress/contribution": float(contributions.mean()),
        "progress/spread": float(contributions.std(unbiased=False)),
    }
