"""An advantage function as many trainers have it, with a mistake in its baseline."""


def less_mean(token_level_rewards, response_mask):
    """Return to go at each token, less the mean over the batch [B, L]."""
    returns = token_level_rewards.flip(1).cumsum(1).flip(1)
    return (returns - returns.mean()) * response_mask
