"""Which of an episode's ends count as completion, modification and resolution."""

from __future__ import annotations

import pytest

from turnstile.credit.samples import sample_trajectory
from turnstile.swe.rates import completed, modified, resolved
from turnstile.types import Stop


@pytest.mark.parametrize(
    ("stop", "signals", "expected"),
    [
        (Stop.DONE, {"resolved": True}, (True, True, True)),
        (Stop.SUBMITTED, {}, (True, True, False)),
        (Stop.TURNS, {"resolved": True}, (False, False, False)),
        (Stop.DONE, {"submitted": False, "resolved": True}, (False, False, False)),
        (Stop.DONE, {"modified": False, "resolved": True}, (True, False, False)),
        (Stop.ERROR, {}, (False, False, False)),
    ],
)
def test_an_environment_need_not_record_everything(
    stop: Stop, signals: dict[str, bool], expected: tuple[bool, bool, bool]
) -> None:
    trajectory = sample_trajectory([1], stop=stop, signals=signals)
    assert (completed(trajectory), modified(trajectory), resolved(trajectory)) == expected
