"""A loss and a factor of one's own, and the checker that both must pass: python own_loss.py"""

from turnstile.losses.base import needs
from turnstile.losses.check import check_loss
from turnstile.losses.multipliers import with_multipliers
from turnstile.losses.ppo import ppo
from turnstile.losses.ratio import log_ratio, ratio_metrics


def soft_clip(logprobs, batch, *, width: float = 0.2):
    """-width * tanh((ratio - 1) / width) * A: PPO's bounds without corners."""
    log_ratios = log_ratio(logprobs, batch)
    loss = -width * ((log_ratios.exp() - 1) / width).tanh() * batch.advantages
    return loss, ratio_metrics(log_ratios)


@needs("proximal_logprobs")
def agreed(batch, *, gap: float = 0.5):
    """1 where sampler and trainer agree on a token's log-probability within `gap` nats, else 0."""
    near = (batch.extras["proximal_logprobs"] - batch.logprobs).abs() < gap
    return near.to(batch.advantages.dtype), {"agreed": near.to(batch.advantages.dtype)}


if __name__ == "__main__":
    print("soft_clip breaks", check_loss(soft_clip, {"width": 0.3}) or "nothing")
    print("agreed breaks", check_loss(with_multipliers(ppo, [agreed])) or "nothing")
