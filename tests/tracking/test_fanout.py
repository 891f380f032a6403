from __future__ import annotations

import pytest

from turnstile.tracking.base import Scalars, Tracker
from turnstile.tracking.fanout import Trackers


class Listener:
    """A tracker that remembers its calls."""

    def __init__(self, *, fails: bool = False) -> None:
        self.heard: list[tuple[object, ...]] = []
        self.fails = fails

    def log(self, step: int, metrics: Scalars) -> None:
        self.heard.append(("log", step, dict(metrics)))

    def say(self, line: str, *, level: str = "info") -> None:
        self.heard.append(("say", line, level))

    def progress(self, label: str, done: int, total: int) -> None:
        self.heard.append(("progress", label, done, total))

    def resume_at(self, step: int) -> None:
        self.heard.append(("resume_at", step))

    def sync(self) -> None:
        self.heard.append(("sync",))

    def close(self) -> None:
        self.heard.append(("close",))
        if self.fails:
            raise OSError("disk full")


def test_every_report_reaches_every_tracker() -> None:
    first, second = Listener(), Listener()
    trackers = Trackers([first, second])
    assert isinstance(trackers, Tracker)
    trackers.resume_at(0)
    trackers.progress("training", 0, 1)
    trackers.log(1, {"x": 1.0})
    trackers.say("done", level="warning")
    trackers.sync()
    trackers.close()
    told = [
        ("resume_at", 0),
        ("progress", "training", 0, 1),
        ("log", 1, {"x": 1.0}),
        ("say", "done", "warning"),
        ("sync",),
        ("close",),
    ]
    assert first.heard == second.heard == told


def test_closes_all_trackers_even_if_one_fails() -> None:
    broken, sound = Listener(fails=True), Listener()
    with pytest.raises(OSError, match="disk full"):
        Trackers([broken, sound]).close()
    assert sound.heard == [("close",)]
