"""Which tokens belong together, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tokens import batch
from turnstile.errors import ConfigError
from turnstile.losses.units import mean_within, sum_within, units

WEIGHTS = [1.0, 1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("unit", "index", "sums", "means"),
    [
        ("token", [0, 1, 2, 3, 4], [1, 2, 4, 0, 0], [1, 2, 4, 0, 0]),
        ("turn", [0, 1, 0, 1, 2], [5, 2, 0], [2.5, 2, 2.5, 2, 0]),
        ("trajectory", [0, 0, 0, 0, 1], [7, 0], [7 / 3, 7 / 3, 7 / 3, 7 / 3, 0]),
    ],
)
def test_units_by_hand(unit: Any, index: list[int], sums: list[float], means: list[float]) -> None:
    """Five tokens of trajectories 3 and 8; those of weight 0 belong to a unit and have no part in its numbers."""
    given, _ = batch([1.0] * 5, [0.0] * 5, trajectory=[3, 3, 3, 3, 8], turn=[0, 1, 0, 1, 0], weights=WEIGHTS)
    values = given.logprobs.new_tensor([1.0, 2.0, 4.0, float("nan"), float("inf")])
    found = units(given, unit, "loss")
    assert found.tolist() == index
    assert sum_within(values, found, given.weights).tolist() == sums
    assert mean_within(values, found, given.weights).tolist() == pytest.approx(means)


def test_there_may_be_no_tokens_at_all() -> None:
    given, _ = batch([], [])
    assert mean_within(given.logprobs, units(given, "turn", "loss"), given.weights).tolist() == []


def test_an_unknown_unit_is_one_clear_error() -> None:
    given, _ = batch([1.0], [1.0])
    with pytest.raises(ConfigError, match="'tis': unit must be 'token', 'turn' or 'trajectory', got 'row'"):
        units(given, "row", "tis")  # type: ignore[arg-type]
