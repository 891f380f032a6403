from __future__ import annotations

from pathlib import Path

import pytest

from turnstile.errors import MissingExtraError
from turnstile.tracking import tensorboard as module
from turnstile.tracking.base import Tracker
from turnstile.tracking.tensorboard import TensorboardTracker


def scalars(run: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_numbers_become_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    tracker = TensorboardTracker(tmp_path)
    assert isinstance(tracker, Tracker)
    tracker.log(1, {"reward/total": 0.5, "stop": "done", "none": None, "flag": True})
    tracker.log(2, {"reward/total": 0.25})
    tracker.say("a line")
    tracker.progress("training", 1, 2)
    tracker.close()
    assert scalars(tmp_path, "reward/total") == [(1, 0.5), (2, 0.25)]
    assert scalars(tmp_path, "flag") == [(1, 1.0)]


def test_resumed_steps_replace_the_later_ones(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    tracker = TensorboardTracker(tmp_path)
    for step in (1, 2, 3):
        tracker.log(step, {"x": float(step)})
    tracker.resume_at(1)
    tracker.log(2, {"x": 20.0})
    tracker.close()
    assert scalars(tmp_path, "x") == [(1, 1.0), (2, 20.0)]


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SummaryWriter", None)
    with pytest.raises(MissingExtraError, match=r"tensorboard.*pip install 'turnstile-rl\[tensorboard\]'"):
        TensorboardTracker(tmp_path)
