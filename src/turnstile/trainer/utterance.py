"""A turn-level critic on the policy's last hidden states, which values states and the turns taken in them.

Its inputs are in `turn_features.py`. Like the token-level critic, it does not change the policy.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from turnstile.credit.base import Targets
from turnstile.trainer.critic import step_finite
from turnstile.trainer.learner import Learner
from turnstile.trainer.turn_features import TurnFeatures, read_turn_features, turn_head
from turnstile.types import Group, Score

TWICE = (1, 2)


class UtteranceCritic:
    """Two Q and two V heads, each with a slow copy. Q_i learns `targets` computed with slow V_i; V_i learns slow Q_i.

    The heads take `epochs` steps of Adam at `lr` over the turns of a step. After each of these, the slow copies move by
    a share `tau` towards the heads. All values start at 0. As in the paper's code, the critic learns from a step before
    the policy uses it. Unlike the paper's, it keeps no turns of earlier steps, because their hidden states would be
    those of an older network.
    """

    def __init__(
        self,
        learner: Learner,
        targets: Targets,
        *,
        lr: Annotated[float, Field(gt=0)] = 1e-3,  # learning rate of the heads
        epochs: Annotated[int, Field(ge=1)] = 8,  # optimiser steps of the heads per training step
        tau: Annotated[float, Field(gt=0, le=1)] = 0.1,  # Polyak averaging of the slow copies, per optimiser step
    ) -> None:
        self._learner = learner
        self._targets = targets
        self._epochs = epochs
        self._tau = tau
        width = int(learner.model.config.get_text_config().hidden_size)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the heads' first weights must not depend on what ran before
            sizes = {"q": 2 * width, "v": width}
            heads = nn.ModuleDict({f"{what}{i}": turn_head(size) for what, size in sizes.items() for i in TWICE})
        self._heads = heads.to(learner.model.device)
        self._slow = copy.deepcopy(self._heads).requires_grad_(False)
        self._optimizer = torch.optim.Adam(self._heads.parameters(), lr=lr)
        self._metrics: dict[str, float] = {}  # set by `predict` for `update`

    def predict(self, groups: Sequence[Group], scores: Sequence[Sequence[Score]]) -> dict[str, Any]:
        """Learn from these groups, and return `q` and `v` as `values` does."""
        seen = read_turn_features(self._learner, groups)
        before = self._predict(seen)
        self._metrics = self._fit(groups, scores, seen, before)
        return self._predict(seen)

    def values(self, groups: Sequence[Group]) -> dict[str, Any]:
        """Return `q` and `v`, each [trajectory] -> f32[K]: the smaller of two heads, 0 for untrained turns."""
        return self._predict(read_turn_features(self._learner, groups))

    def update(
        self, groups: Sequence[Group], scores: Sequence[Sequence[Score]], aux: Mapping[str, Any]
    ) -> dict[str, float]:
        """Return the metrics of the fit in `predict`, since the critic has already learned from the step.

        All are from before the fit: utterance/explained (the share of the variance of Q's targets that Q explained; 0
        for constant targets), utterance/q_loss and utterance/v_loss (mean squared error), utterance/q and utterance/v
        (means).
        """
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _predict(self, seen: TurnFeatures) -> dict[str, Any]:
        with torch.no_grad():
            q, v = (
                torch.minimum(*(self._of(self._heads, f"{what}{i}", states) for i in TWICE))
                for what, states in (("q", seen.after), ("v", seen.before))
            )
        return {"q": seen.spread(q), "v": seen.spread(v)}

    def _fit(
        self, groups: Sequence[Group], scores: Sequence[Sequence[Score]], seen: TurnFeatures, before: Mapping[str, Any]
    ) -> dict[str, float]:
        """Learn from a step, and return metrics; {} if there is nothing to learn."""
        if not len(seen.turns):
            return {}
        predicted = np.concatenate(before["q"])[seen.turns]
        initial_targets = np.concatenate(self._targets(groups, scores, before))[seen.turns]
        known = torch.from_numpy(np.isfinite(initial_targets))
        if not known.any():
            return {}
        spread = float(np.nanvar(initial_targets))
        metrics = {
            "utterance/explained": 1.0 - float(np.nanvar(initial_targets - predicted)) / spread if spread > 0 else 0.0,
            "utterance/q": float(predicted.mean()),
            "utterance/v": float(np.concatenate(before["v"])[seen.turns].mean()),
        }
        for _ in range(self._epochs):
            self._optimizer.zero_grad(set_to_none=True)
            losses = {"q_loss": torch.zeros(()), "v_loss": torch.zeros(())}
            for i in TWICE:
                with torch.no_grad():
                    slow_q = self._of(self._slow, f"q{i}", seen.after)
                    slow_v = self._of(self._slow, f"v{i}", seen.before)
                wanted = np.concatenate(self._targets(groups, scores, {"v": seen.spread(slow_v)}))[seen.turns]
                targets = torch.from_numpy(wanted).float().to(slow_q.device)
                for what, states, to in (("q", seen.after, targets), ("v", seen.before, slow_q)):
                    loss = mse_loss(self._of(self._heads, f"{what}{i}", states[known]), to[known])
                    losses[f"{what}_loss"] = losses[f"{what}_loss"] + loss
            (losses["q_loss"] + losses["v_loss"]).backward()
            for name, total in losses.items():
                metrics.setdefault(f"utterance/{name}", float(total.detach()) / 2)
            step_finite(self._optimizer, self._heads, "the critic")
            with torch.no_grad():
                for slow, fast in zip(self._slow.parameters(), self._heads.parameters(), strict=True):
                    slow.lerp_(fast, self._tau)
        return metrics

    def _of(self, heads: nn.ModuleDict, name: str, states: Tensor) -> Tensor:
        value: Tensor = heads[name](states.to(self._learner.model.device))[:, 0]
        return value

    def state(self) -> dict[str, Any]:
        """Return the states of the heads, their slow copies and the optimiser."""
        heads, slow = self._heads.state_dict(), self._slow.state_dict()
        return {"heads": heads, "slow": slow, "optimizer": self._optimizer.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._heads.load_state_dict(state["heads"])
        self._slow.load_state_dict(state["slow"])
        self._optimizer.load_state_dict(state["optimizer"])
