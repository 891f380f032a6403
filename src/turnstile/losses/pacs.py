"""PACS, which treats outcomes as labels to be predicted by the policy's likelihood."""

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
def pacs(logprobs: Tensor, batch: Batch, *, beta: float = 1.0) -> tuple[Tensor, Metrics]:
    """Return PACS's loss: the cross-entropy between success and the policy's relative likelihood (arXiv 2509.02522).

    The loss of each trajectory is -R_i * log sigmoid(psi_i) - (1 - R_i) * log sigmoid(-psi_i), with psi_i = beta * (h_i
    - mean h of the other attempts in its group) and h = sum over its tokens of log pi - log reference. The outcome is
    the label, and the likelihood relative to the group is the logit; the gradient combines actor and critic.

    R_i is 1 if a trajectory's score, the mean advantage of its tokens, is above 0. With credit centred in the group
    (`grpo`, `rloo`), these are the attempts that did better than average. Groups whose scores are all equal are left
    out, whereas the paper still trains on them with R. A token has its trajectory's loss, and the gradient of the
    group's summed loss; `loss_aggregation` acts as for the loss `dpo`. That psi is a leave-one-out difference rests on
    our reading of the paper alone.

    logprobs f32[N] -> loss f32[N]; metrics score (psi), accuracy (1 where psi and R agree), kl_ref (nats), ratio and
    kl_behaviour (nats). Raises ConfigError without a reference, and for a beta that is not above 0.
    """
    if beta <= 0:
        raise ConfigError(f"loss 'pacs': beta must be above 0, got {beta}")
    distance = log_ratio_to(extra(batch, "ref_logprobs", "pacs"), logprobs)
    pair = trajectory_pairs(batch)
    others = pair.informative()
    label = (pair.score > 0).double()

    def centred(values: Tensor) -> Tensor:
        return values - mean_over_pairs(values.expand_as(others), others)

    psi = beta * centred(pair.total(distance))
    in_pairs = others.any(1)
    loss = torch.where(in_pairs, -label * logsigmoid(psi) - (1 - label) * logsigmoid(-psi), 0)
    slope = torch.where(in_pairs, beta * centred(torch.sigmoid(psi) - label), 0)
    metrics = {"score": psi, "accuracy": ((psi > 0) == (label > 0)).double()}
    spread = {name: values.to(logprobs.dtype)[pair.index] for name, values in metrics.items()}
    ratios = ratio_metrics(log_ratio(logprobs, batch))
    return pair.spread(loss, slope, logprobs), {**ratios, **spread, "kl_ref": distance}
