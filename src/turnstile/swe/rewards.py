"""Rewards for software repair, by how far an episode came, what the agent did, and what the tests said.

The step rewards return f32[K], 1 where the turn earned it. Those that could be earned again and again without progress
count `once` by default. All read signals that `swe.envs` records, and raise ConfigError if one was not recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
from pydantic import Field, NonNegativeFloat

from turnstile.errors import ConfigError
from turnstile.rewards.graders import Stateless, with_signals
from turnstile.rewards.recorded import episode_number, episode_signal, turn_signal
from turnstile.rewards.steps import where
from turnstile.types import F32, Group, Stop, Task, Trajectory

DEFAULT_TERMS = (
    {
        "kind": "outcome_class",
        "no_submit": -0.5,
        "empty_patch": -0.4,
        "fail": -0.3,
        "level": 1,
        "gate": {"value": -0.4},
    },
    {"kind": "command_succeeded", "weight": 0.1},
)
"""The rewards of a recipe that names none. Step rewards count only above an empty patch, and a failing change earns so
little that another try pays."""


def outcome_class(
    task: Task,
    trajectory: Trajectory,
    *,
    no_submit: float = -0.5,
    empty_patch: float = -0.2,
    fail: float = 0.0,
    passed: float = 1.0,
) -> float | None:
    """Return the terminal reward of a repair, no_submit <= empty_patch <= fail <= passed (as in arXiv 2508.10548).

    An episode that never submitted gets `no_submit`, whatever it changed; a submission with an empty non-test diff gets
    `empty_patch`; one with which every required test passes gets `passed`, and any other gets `fail`. Returns None if
    infrastructure failed (`Stop.ERROR`) or there is no verdict, as that is none of the four classes.

    Reads the episode's signals submitted, modified, resolved. Raises ConfigError if one is missing, or if the four
    values are out of order.
    """
    if not no_submit <= empty_patch <= fail <= passed:
        raise ConfigError(
            f"outcome_class wants no_submit <= empty_patch <= fail <= passed, got {no_submit}, {empty_patch}, "
            f"{fail}, {passed}"
        )
    if trajectory.stop is Stop.ERROR:
        return None
    if not episode_signal(trajectory, "submitted", "outcome_class"):
        return no_submit
    if not episode_signal(trajectory, "modified", "outcome_class"):
        return empty_patch
    resolved = episode_signal(trajectory, "resolved", "outcome_class")
    if resolved is None:
        return None
    return passed if resolved else fail


def looked_at_failing_code(task: Task, trajectory: Trajectory, *, once: bool = True) -> F32:
    """Return 1 for each turn that showed code run by the failing tests, else 0; f32[K].

    With `once`, only the first such turn counts.
    """
    name = "looked_at_failing_code"
    return where(trajectory, lambda turn: bool(turn_signal(turn, name, name)), once=once)


def ran_tests(task: Task, trajectory: Trajectory, *, once: bool = True) -> F32:
    """Return 1 for each turn that ran tests, whether they passed or not, else 0; f32[K].

    With `once`, only the first such turn counts.
    """
    return where(trajectory, lambda turn: bool(turn_signal(turn, "ran_tests", "ran_tests")), once=once)


def modified_code(task: Task, trajectory: Trajectory, *, once: bool = True) -> F32:
    """Return 1 for each turn that changed the code, else 0; f32[K].

    With `once`, only the first such turn counts, so that editing and undoing again and again does not pay.
    """
    return where(trajectory, lambda turn: bool(turn_signal(turn, "modified", "modified_code")), once=once)


def share_of_tests(task: Task, trajectory: Trajectory, *, kept: float = 0.0, unbroken: bool = True) -> float | None:
    """Return the share of the required tests that pass, in [0, 1].

    `kept` is the weight of the tests that passed before (PASS_TO_PASS) beside those that the repair must make pass
    (FAIL_TO_PASS): (1 - kept) f2p + kept p2p. With `unbroken`, a change that breaks a test that passed before gets 0,
    as such a repair would not be accepted. This dense outcome is easier to learn from and easier to game than
    `outcome_class`. VeRPO (arXiv 2601.03525; see `weighted_tests`) weighs each test by how rarely it is passed instead.

    Reads the episode's signals f2p_passed, f2p_total, p2p_passed, p2p_total. Returns None if infrastructure failed or
    there is no verdict. Raises ConfigError if a signal is missing, and for `kept` outside [0, 1].
    """
    if not 0.0 <= kept <= 1.0:
        raise ConfigError(f"reward 'tests_passed' wants kept in [0, 1], got {kept}")
    if trajectory.stop is Stop.ERROR:
        return None
    found = _signal_values(trajectory, "tests_passed", "f2p_passed", "f2p_total", "p2p_passed", "p2p_total")
    if found is None:
        return None
    turned, to_turn, held, to_hold = found
    if unbroken and held < to_hold:
        return 0.0
    return (1.0 - kept) * turned / max(to_turn, 1.0) + kept * (held / to_hold if to_hold else 1.0)


def weighted_tests(task: Task, trajectory: Trajectory, *, unbroken: bool = True) -> float | None:
    """Return the sum of w_j over the passed tests / the sum of all w_j, in [0, 1] (after VeRPO, arXiv 2601.03525).

    Tests that few attempts pass weigh more. The tests are those that the repair must make pass, named in the signal
    f2p_tests. Their weights are the signal test_weights, which the grader `test_rates` computes from the pass rates so
    far; add it under [[graders]]. Each test counts the same if all weights are 0 because every attempt passes
    everything, or if the task names no test. With `unbroken`, a change that breaks a test that passed before
    (p2p_passed < p2p_total) gets 0.

    Returns None if infrastructure failed or there is no verdict. Raises ConfigError if a signal is missing, and for a
    weight that is not a number of 0 or more.
    """
    if trajectory.stop is Stop.ERROR:
        return None
    counts = _signal_values(trajectory, "weighted_tests", "f2p_passed", "f2p_total", "p2p_passed", "p2p_total")
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
    shares = _test_weights(task, passed, weights)
    if not sum(shares.values()):
        return turned / max(to_turn, 1.0)
    return sum(share for test, share in shares.items() if passed[test]) / sum(shares.values())


def _signal_values(trajectory: Trajectory, reward: str, *names: str) -> tuple[float, ...] | None:
    """Return the numbers in the named signals; None if any of them is None."""
    found = [episode_number(trajectory, name, reward) for name in names]
    return None if None in found else tuple(value for value in found if value is not None)


def _test_weights(task: Task, passed: Mapping[str, bool], weights: Mapping[str, float]) -> dict[str, float]:
    """Return the weight of each test in `passed`. Raises ConfigError for one that is not a number of 0 or more."""
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


class TestRates(Stateless):
    """A grader that adds the signal test_weights, with (1 - rate)^`power` for each test in the signal f2p_tests.

    Tests that attempts rarely pass therefore weigh more. The rate of a test is the share of its task's attempts that
    passed it, as a moving average over training steps: the first step's share counts fully, and each later one with
    weight `pace`. The attempts of the current step are included, and attempts without a verdict are not. Outside of
    training the rates are not updated, and a test without a rate gets the share of the attempts at hand. Raises
    ConfigError for `power` below 0 and `pace` outside (0, 1].
    """

    __test__ = False  # not a test case, despite its name

    def __init__(self, *, power: NonNegativeFloat = 1.0, pace: Annotated[float, Field(gt=0, le=1)] = 0.5) -> None:
        if power < 0.0 or not 0.0 < pace <= 1.0:
            raise ConfigError(f"grader 'test_rates' wants power >= 0 and 0 < pace <= 1, got {power} and {pace}")
        self._power, self._pace = power, pace
        self._rates: dict[str, dict[str, float]] = {}

    async def grade(self, groups: Sequence[Group], step: int | None) -> list[Group]:
        return [self._weigh_tests(group, learn=step is not None) for group in groups]

    def state(self) -> dict[str, Any]:
        return {"rates": {task: dict(rates) for task, rates in self._rates.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._rates = {task: dict(rates) for task, rates in state["rates"].items()}

    def _weigh_tests(self, group: Group, *, learn: bool) -> Group:
        verdicts = [one.signals["f2p_tests"] for one in group.trajectories if one.signals.get("f2p_tests") is not None]
        known = self._rates.get(group.task.id, {})
        rates = dict(known)
        for test in dict.fromkeys(test for verdict in verdicts for test in verdict):
            share = float(np.mean([bool(verdict[test]) for verdict in verdicts if test in verdict]))
            if test not in known:
                rates[test] = share
            elif learn:
                rates[test] = known[test] + self._pace * (share - known[test])
        if learn and verdicts:
            self._rates[group.task.id] = rates
        weights = {test: (1.0 - rate) ** self._power for test, rate in rates.items()}
        return replace(
            group,
            trajectories=tuple(
                with_signals(one, test_weights=weights) if "f2p_tests" in one.signals else one
                for one in group.trajectories
            ),
        )
