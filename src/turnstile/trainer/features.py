"""The inputs of value heads, which are the policy's last hidden states before a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from turnstile.batching.forest import pack_prefix_trees
from turnstile.models.attention import forward_forest
from turnstile.trainer.learner import Learner
from turnstile.types import Group, Row, Trajectory


def features(learner: Learner, rows: Sequence[Row]) -> list[Tensor]:
    """Return the layer-normalised last hidden states f32[N, H] before each row's trained tokens.

    They are kept in main memory, so they take no device memory during the policy's update.
    """
    if not rows:
        return []
    states: list[Tensor] = [torch.empty(0)] * len(rows)
    no_weights = [np.zeros(len(row.token_ids), np.float32) for row in rows]
    with torch.no_grad():
        budget, device = learner.config.budget, learner.model.device
        for batch in pack_prefix_trees(rows, no_weights, budget=budget, device=device, share=learner.shares):
            hidden = forward_forest(learner.model, batch)[batch.source].float()
            hidden = layer_norm(hidden, hidden.shape[-1:])
            hidden, owner = hidden.cpu(), batch.row.cpu()
            for row in owner.unique().tolist():
                states[row] = hidden[owner == row]
    return states


def trajectories_of(groups: Sequence[Group]) -> list[Trajectory]:
    """Return the trajectories of all groups in order."""
    return [trajectory for group in groups for trajectory in group.trajectories]


def zero_advantages(trajectory: Trajectory) -> list[np.ndarray]:
    """Return zero advantages for the sampled tokens of a trajectory, [turn] -> f32[n]."""
    return [np.zeros(len(turn.completion.token_ids), np.float32) for turn in trajectory.turns]
