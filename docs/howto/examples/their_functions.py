"""Functions as other frameworks have them, on padded arrays, to be held against the invariants:
turnstile conform their_functions:gae gamma=0.99"""

import torch

from turnstile.credit.invariants import at, declare


@declare(at({7: "the baseline is a critic's"}))
def gae(token_level_rewards, values, response_mask, gamma: float = 1.0, lam: float = 0.95):
    """Advantages and returns [B, L] from column to column, as code for one turn has it."""
    ahead, carried, found = 0.0, 0.0, []
    for t in reversed(range(values.shape[1])):
        carried = token_level_rewards[:, t] + gamma * ahead - values[:, t] + gamma * lam * carried
        ahead = values[:, t]
        found.append(carried)
    advantages = torch.stack(found[::-1], dim=1)
    return advantages * response_mask, advantages + values


def clipped(new, old, adv, keep, width: float = 0.2):
    """A loss whose parameters have names of their own."""
    ratio = (new - old).exp()
    return -(torch.minimum(ratio * adv, ratio.clamp(1 - width, 1 + width) * adv) * keep).sum() / keep.numel()


def named(function):
    """An adapter: what it returns is called with the names that turnstile conform knows."""

    def padded(log_prob, old_log_prob, advantages, response_mask):
        return function(log_prob, old_log_prob, advantages, response_mask)

    return padded
