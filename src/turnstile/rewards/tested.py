"""Rewards of the tests' verdict."""

from __future__ import annotations

from turnstile.errors import ConfigError
from turnstile.rewards.recorded import episode_signal
from turnstile.types import Stop, Task, Trajectory


def share_of_tests(task: Task, trajectory: Trajectory, *, kept: float = 0.0, unbroken: bool = True) -> float | None:
    """The share of the tests that must pass which do, in [0, 1].

    `kept` is the weight of the tests that passed before (PASS_TO_PASS) beside those that the repair must turn
    (FAIL_TO_PASS): (1 - kept) f2p + kept p2p. With `unbroken`, a change that breaks one of the former gets 0, as the
    repair would not be taken. A dense outcome is easier to learn from and easier to game than `outcome_class`.

    Reads the episode's signals f2p_passed, f2p_total, p2p_passed, p2p_total. None where infrastructure failed or no
    verdict could be had. Raises ConfigError where one is missing, and for `kept` outside [0, 1].
    """
    if not 0.0 <= kept <= 1.0:
        raise ConfigError(f"reward 'tests_passed' wants kept in [0, 1], got {kept}")
    if trajectory.stop is Stop.ERROR:
        return None
    names = ("f2p_passed", "f2p_total", "p2p_passed", "p2p_total")
    found = [episode_signal(trajectory, name, "tests_passed") for name in names]
    if any(value is None for value in found):
        return None
    turned, to_turn, held, to_hold = map(float, found)
    if unbroken and held < to_hold:
        return 0.0
    return (1.0 - kept) * turned / max(to_turn, 1.0) + kept * (held / to_hold if to_hold else 1.0)
