"""Rewards of one's own, for the guessing game of recipes/guess.toml.

python own_reward.py RECIPE [KEY=VALUE]...
"""

import sys

import turnstile
from turnstile.config import load_recipe


def quick(task, trajectory, *, rounds: int = 3) -> float:
    """1 for a number found at once, a little less for each further guess, 0 for one never found."""
    if not trajectory.signals["resolved"]:
        return 0.0
    return 1.0 - (len(trajectory.turns) - 1) / rounds


def listened(task, trajectory) -> list[float]:
    """1 for each guess that the answers so far allow."""
    return [float(turn.signals["consistent"]) for turn in trajectory.turns]


if __name__ == "__main__":
    turnstile.train(load_recipe(sys.argv[1], sys.argv[2:]), reward=quick)
