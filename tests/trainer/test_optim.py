"""Learning-rate schedules against hand-computed numbers."""

from __future__ import annotations

import pytest

from turnstile.lookup import KINDS, resolve
from turnstile.trainer.optim import Schedule, constant, cosine, linear, lr_multiplier


def test_warm_up_rises_to_one() -> None:
    assert [lr_multiplier(constant, step, 4, 10) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_without_warm_up_the_first_step_has_full_size() -> None:
    assert (
        lr_multiplier(constant, 0, 0, 10) == lr_multiplier(linear, 0, 0, 10) == lr_multiplier(cosine, 0, 0, 10) == 1.0
    )


@pytest.mark.parametrize(
    ("schedule", "numbers"),
    [
        (constant, [1.0, 1.0, 1.0, 1.0, 1.0]),
        (linear, [1.0, 0.775, 0.55, 0.325, 0.1]),
        (cosine, [1.0, 0.868198, 0.55, 0.231802, 0.1]),
    ],
)
def test_schedules(schedule: Schedule, numbers: list[float]) -> None:
    """Two steps of warm-up, then eight: a quarter, a half and three quarters of the way, and beyond the end."""
    assert [lr_multiplier(schedule, step, 2, 10) for step in (2, 4, 6, 8, 10)] == pytest.approx(numbers, abs=1e-6)
    assert lr_multiplier(schedule, 99, 2, 10) == pytest.approx(numbers[-1])


def test_a_run_that_is_all_warm_up() -> None:
    assert lr_multiplier(linear, 5, 5, 5) == 1.0


def test_every_schedule_of_the_table_begins_at_one() -> None:
    assert all(resolve("schedule", kind)(0.0) == pytest.approx(1.0) for kind in KINDS["schedule"])
