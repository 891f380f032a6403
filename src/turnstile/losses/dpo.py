"""DPO, which learns preferences between attempts at a task."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from turnstile.batching.batch import Batch
from turnstile.errors import ConfigError
from turnstile.losses.base import Metrics, extra, needs
from turnstile.losses.pairs import log_ratio_to, mean_over_pairs, trajectory_pairs
from turnstile.losses.ratio import log_ratio, ratio_metrics


@needs("ref_logprobs", scope="group")
def dpo(logprobs: Tensor, batch: Batch, *, beta: float = 0.1) -> tuple[Tensor, Metrics]:
    """Return DPO's loss over pairs of a better and a worse trajectory of a group (arXiv 2305.18290).

    A pair's loss is -log sigmoid(beta * (h_w - h_l)), with h = sum over a trajectory's tokens of log pi - log
    reference, on the policy's own attempts. Any two trajectories of a group with different scores are a pair
    (`losses.pairs`). A token's loss is the mean over its trajectory's pairs, and its gradient is the derivative of this
    mean with respect to the token's log-probability. The sum over a step depends on `loss_aggregation`. `constant`,
    with the number of trajectories as divisor, gives half the mean over pairs if each trajectory is in equally many.
    `token` only rescales that. `trajectory` divides a trajectory's gradient by its length.

    logprobs f32[N] -> loss f32[N]; metrics accuracy (share of a trajectory's pairs in the right order), margin (beta
    times the mean difference of h, better minus worse), kl_ref (nats, log pi - log reference at each token), ratio,
    kl_behaviour (nats). Raises ConfigError without a reference, and for a beta that is not above 0.
    """
    if beta <= 0:
        raise ConfigError(f"loss 'dpo': beta must be above 0, got {beta}")
    distance = log_ratio_to(extra(batch, "ref_logprobs", "dpo"), logprobs)
    pair = trajectory_pairs(batch)
    h = pair.total(distance)
    won = pair.better()
    sign = won.double() - won.T.double()  # 1 where the first is better, -1 where the second is
    margin = beta * sign * (h[:, None] - h[None, :])
    paired = won | won.T
    slope = mean_over_pairs(-beta * sign * torch.sigmoid(-margin), paired)
    loss = pair.spread(mean_over_pairs(-logsigmoid(margin), paired), slope, logprobs)
    metrics = {"accuracy": mean_over_pairs((margin > 0).double(), paired), "margin": mean_over_pairs(margin, paired)}
    spread = {name: values.to(logprobs.dtype)[pair.index] for name, values in metrics.items()}
    return loss, {**ratio_metrics(log_ratio(logprobs, batch)), **spread, "kl_ref": distance}
