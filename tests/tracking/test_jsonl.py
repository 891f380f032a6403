from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path

import numpy as np
import pytest

from turnstile.tracking.base import Tracker
from turnstile.tracking.jsonl import JsonlTracker, read_messages, read_metrics


@pytest.fixture
def tracker(tmp_path: Path):
    tracker = JsonlTracker(tmp_path / "run")
    yield tracker
    tracker.close()


def lines(run: Path, name: str = "metrics.jsonl") -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def test_is_a_tracker(tracker: JsonlTracker) -> None:
    assert isinstance(tracker, Tracker)


def test_a_step_is_in_the_file_at_once(tracker: JsonlTracker, tmp_path: Path) -> None:
    tracker.log(3, {"reward/total": 0.5, "stop": "done", "ok": True, "none": None, "n": np.float32(0.25)})
    (line,) = lines(tmp_path / "run")
    assert isinstance(line.pop("time"), float)
    assert line == {"step": 3, "reward/total": 0.5, "stop": "done", "ok": True, "none": None, "n": 0.25}


def test_numbers_that_are_not_finite_stay_plain_json(tracker: JsonlTracker, tmp_path: Path) -> None:
    tracker.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
    text = (tmp_path / "run" / "metrics.jsonl").read_text()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    json.loads(text, parse_constant=refuse)
    (step,) = read_metrics(tmp_path / "run")
    assert math.isnan(step["a"])
    assert (step["b"], step["c"]) == (math.inf, -math.inf)


def test_resume_drops_later_steps_and_goes_on(tracker: JsonlTracker, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        tracker.log(step, {"x": step})
    tracker.resume_at(2)
    tracker.log(3, {"x": 30})
    assert [(line["step"], line["x"]) for line in lines(tmp_path / "run")] == [(1, 1), (2, 2), (3, 30)]


def test_a_torn_last_line_is_moved_aside_on_opening(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "x": 1}\n{"step": 2, "x"')
    assert [step["step"] for step in read_metrics(tmp_path)] == [1]
    tracker = JsonlTracker(tmp_path)
    tracker.log(2, {"x": 2})
    tracker.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


@pytest.mark.parametrize("end", [b'{"step": 3, "x"', b"\0" * 40, b'\0\0\0x": 3}\n', b"\xff\xfe\n", b"3\n"])
def test_drops_and_reports_what_a_stopped_machine_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, end: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + end)
    assert [step["step"] for step in read_metrics(tmp_path)] == [1, 2]
    with caplog.at_level(logging.WARNING):
        tracker = JsonlTracker(tmp_path)
    assert f"moved its last {len(end)} bytes, which are damaged, to metrics.jsonl.damaged" in caplog.text
    assert path.with_name("metrics.jsonl.damaged").read_bytes() == end
    tracker.resume_at(1)
    tracker.log(2, {"x": 2})
    tracker.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_a_damaged_line_costs_no_later_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = JsonlTracker(tmp_path)
    for step in range(1, 6):
        tracker.log(step, {"loss": 1.0})
    tracker.close()
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = b"[" + lines[1][1:]
    path.write_bytes(b"".join(lines))
    with caplog.at_level(logging.WARNING):
        tracker = JsonlTracker(tmp_path)
    assert f"left out {len(lines[1])} bytes between whole lines" in caplog.text
    tracker.log(6, {"loss": 1.0})
    assert [step["step"] for step in read_metrics(tmp_path)] == [1, 3, 4, 5, 6]
    tracker.resume_at(5)
    tracker.close()
    assert path.read_bytes() == b"".join([lines[0], *lines[2:]])


def test_logs_nothing_for_an_intact_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2):
        tracker = JsonlTracker(tmp_path)
        tracker.log(step, {"word": "a\u2028b\x0b"})
        tracker.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
    assert caplog.text == ""


def test_sync_flushes_to_the_disk(tracker: JsonlTracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, synced, real = tmp_path / "run", {}, os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        synced[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    monkeypatch.setattr(os, "fsync", fsync)
    tracker.log(1, {"x": 1})
    tracker.resume_at(1)
    assert synced == {(run / "metrics.jsonl").stat().st_ino: (run / "metrics.jsonl").stat().st_size}
    tracker.log(2, {"x": 2})
    tracker.say("a line")
    tracker.sync()
    files = {(file := run / name).stat().st_ino: file.stat().st_size for name in ("metrics.jsonl", "messages.jsonl")}
    assert files.items() <= synced.items()
    assert run.stat().st_ino in synced


def test_messages_have_their_own_file_and_level(tracker: JsonlTracker, tmp_path: Path) -> None:
    tracker.say("the reward collapsed", level="alarm")
    tracker.progress("training", 1, 2)
    (line,) = lines(tmp_path / "run", "messages.jsonl")
    assert (line["level"], line["message"]) == ("alarm", "the reward collapsed")
    assert lines(tmp_path / "run") == []


def test_a_run_without_metrics_reads_as_empty(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []


def test_messages_are_read_back_but_for_damaged_lines(tracker: JsonlTracker, tmp_path: Path) -> None:
    assert read_messages(tmp_path / "nowhere") == []
    tracker.say("first")
    tracker.say("second", level="alarm")
    with (tmp_path / "run" / "messages.jsonl").open("a") as file:
        file.write('{"time": 1, "mess')
    found = read_messages(tmp_path / "run")
    assert [(body["level"], body["message"]) for body in found] == [("info", "first"), ("alarm", "second")]
    assert all(body["time"] > 0 for body in found)
