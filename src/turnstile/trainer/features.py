"""What heads on the policy read: its last hidden states, as they are before a step."""

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
    """Last hidden states f32[N, H] before the trained tokens of each row, each of them normalised; in main memory, so
    that they take none of the device's while the policy learns."""
    if not rows:
        return []
    found: list[Tensor] = [torch.empty(0)] * len(rows)
    nothing = [np.zeros(len(row.token_ids), np.float32) for row in rows]
    with torch.no_grad():
        device = learner.model.device
        for batch in pack_prefix_trees(rows, nothing, budget=learner.plan.budget, device=device, share=learner.shares):
            hidden = forward_forest(learner.model, batch)[batch.source].float()
            hidden = layer_norm(hidden, hidden.shape[-1:])
            hidden, owner = hidden.cpu(), batch.row.cpu()
            for row in owner.unique().tolist():
                found[row] = hidden[owner == row]
    return found


def trajectories_of(groups: Sequence[Group]) -> list[Trajectory]:
    """Return the trajectories of all groups, in their order."""
    return [trajectory for group in groups for trajectory in group.trajectories]


def nothing_said(trajectory: Trajectory) -> list[np.ndarray]:
    """Zeros in the place of what stands at each sampled token, [turn] -> f32[n]."""
    return [np.zeros(len(turn.completion.token_ids), np.float32) for turn in trajectory.turns]
