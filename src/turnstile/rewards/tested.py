"""Rewards of the tests' verdict."""

from __future__ import annotations

from collections.abc import Mapping

from turnstile.errors import ConfigError
from turnstile.rewards.recorded import episode_number, episode_signal
from turnstile.types import Stop, Task, Trajectory


def share_of_tests(task: Task, trajectory: Trajectory, *, kept: float = 0.0, unbroken: bool = True) -> float | None:
    """The share of the tests that must pass which do, in [0, 1].

    `kept` is the weight of the tests that passed before (PASS_TO_PASS) beside those that the repair must turn
    (FAIL_TO_PASS): (1 - kept) f2p + kept p2p. With `unbroken`, a change that breaks one of the former gets 0, as the
    repair would not be taken. A dense outcome is easier to learn from and easier to game than `outcome_class`. It is
    the plain count that VeRPO (arXiv 2601.03525), as `weighted_tests`, weighs by how rarely a test is passed.

    Reads the episode's signals f2p_passed, f2p_total, p2p_passed, p2p_total. None where infrastructure failed or no
    verdict could be had. Raises ConfigError where one is missing, and for `kept` outside [0, 1].
    """
    if not 0.0 <= kept <= 1.0:
        raise ConfigError(f"reward 'tests_passed' wants kept in [0, 1], got {kept}")
    if trajectory.stop is Stop.ERROR:
        return None
    found = _counts(trajectory, "tests_passed", "f2p_passed", "f2p_total", "p2p_passed", "p2p_total")
    if found is None:
        return None
    turned, to_turn, held, to_hold = found
    if unbroken and held < to_hold:
        return 0.0
    return (1.0 - kept) * turned / max(to_turn, 1.0) + kept * (held / to_hold if to_hold else 1.0)


def weighted_tests(task: Task, trajectory: Trajectory, *, unbroken: bool = True) -> float | None:
    """sum of w_j over the passed tests / sum of all w_j, in [0, 1]: tests that few attempts pass weigh more (after
    VeRPO, arXiv 2601.03525).

    The tests are those that the repair must turn, by name in the signal f2p_tests. Their weights are the signal
    test_weights, which the grader `test_rates` writes from the pass rates so far: add it under [[graders]]. Where
    all weights are 0, as everybody passes everything, and where the task names no test, each test counts the same.
    With `unbroken`, a change that breaks a test that passed before (p2p_passed < p2p_total) gets 0.

    None where infrastructure failed or no verdict could be had. Raises ConfigError where a signal is missing, and for
    a weight that is not a number of 0 or more.
    """
    if trajectory.stop is Stop.ERROR:
        return None
    counts = _counts(trajectory, "weighted_tests", "f2p_passed", "f2p_total", "p2p_passed", "p2p_total")
    passed = episode_signal(trajectory, "f2p_tests", "weighted_tests")
    weights = episode_signal(trajectory, "test_weights", "weighted_tests", grader="test_rates")
    if counts is None or passed is None or weights is None:
        return None
    for name, table in (("f2p_tests", passed), ("test_weights", weights)):
        if not isinstance(table, Mapping):
            raise ConfigError(
                f"reward 'weighted_tests' wants the signal {name!r} of task {task.id!r} by the names of tests, got "
                f"{table!r:.80}"
            )
    turned, to_turn, held, to_hold = counts
    if unbroken and held < to_hold:
        return 0.0
    shares = _weights(task, passed, weights)
    if not sum(shares.values()):
        return turned / max(to_turn, 1.0)
    return sum(share for test, share in shares.items() if passed[test]) / sum(shares.values())


def _counts(trajectory: Trajectory, reward: str, *names: str) -> tuple[float, ...] | None:
    """The numbers of those signals; None where one of them is."""
    found = [episode_number(trajectory, name, reward) for name in names]
    return None if None in found else tuple(value for value in found if value is not None)


def _weights(task: Task, passed: Mapping[str, bool], weights: Mapping[str, float]) -> dict[str, float]:
    """The weight of each test."""
    shares = {}
    for test in passed:
        weight = weights.get(test)
        if not isinstance(weight, int | float) or not 0.0 <= weight < float("inf"):
            raise ConfigError(
                f"reward 'weighted_tests': the signal 'test_weights' of task {task.id!r} gives {test!r} the weight "
                f"{weight!r}, not a number of 0 or more"
            )
        shares[test] = float(weight)
    return shares
