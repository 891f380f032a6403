"""REFUEL, a regression on relative future rewards."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from turnstile.batching.batch import Batch
from turnstile.credit.invariants import at, declare
from turnstile.errors import ConfigError
from turnstile.losses.base import Metrics, needs
from turnstile.losses.pairs import mean_over_pairs, trajectory_pairs
from turnstile.losses.ratio import log_ratio, ratio_metrics


@declare(at(), at(turns="all"))
@needs(scope="group")
def refuel(
    logprobs: Tensor, batch: Batch, *, eta: float = 1.0, turns: Literal["first", "all"] = "first"
) -> tuple[Tensor, Metrics]:
    """Return REFUEL's loss: regress differences of returns on differences of likelihood (arXiv 2410.04612).

    The loss of any two trajectories of a group is ((g_i - g_j) / eta - (A_i - A_j))^2, with g = sum of log pi - log
    behaviour over the turn at which they diverge. Attempts at one task share everything before their first turn, so
    they diverge there (`turns = "first"`). A, the mean advantage of that turn's tokens, stands for the future return:
    with credit that only subtracts a group baseline (`rloo`, or `scale = "none"`), A_i - A_j is the difference of
    returns. `turns = "all"` compares whole trajectories (REBEL, arXiv 2404.16767). Groups whose A are all equal are
    left out.

    A token has the mean loss of its trajectory's pairs, and that mean's gradient; `loss_aggregation` acts as for the
    loss `dpo`.

    logprobs f32[N] -> loss f32[N]; metrics ratio, kl_behaviour (nats), residual (mean absolute difference within a
    trajectory's pairs). Raises ConfigError for an eta that is not above 0 and for other `turns`.
    """
    if eta <= 0:
        raise ConfigError(f"loss 'refuel': eta must be above 0, got {eta}")
    if turns not in ("first", "all"):
        raise ConfigError(f"loss 'refuel': turns must be 'first' or 'all', got {turns!r}")
    log_ratios = log_ratio(logprobs, batch).detach()
    pair = trajectory_pairs(batch, first_turn=turns == "first")
    paired = pair.informative()
    g = pair.total(log_ratios) / eta
    off = (g[:, None] - g[None, :]) - (pair.score[:, None] - pair.score[None, :])
    slope = mean_over_pairs(2 * off / eta, paired)
    loss = pair.spread(mean_over_pairs(off.square(), paired), slope, logprobs)
    residual = mean_over_pairs(off.abs(), paired).to(logprobs.dtype)[pair.index]
    return loss, {**ratio_metrics(log_ratios), "residual": residual}
