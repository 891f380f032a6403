from __future__ import annotations

import gzip
import json
import logging
import math
import os
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnstile.errors import TurnstileError
from turnstile.records.codec import decode, encode
from turnstile.records.record import LOGPROB, WEIGHT, Entry, Recorder, label_of, read_record
from turnstile.types import Completion, Group, Message, Sampling, Score, Stop, Task, ToolCall, Trajectory, Turn


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def turn(n: int = 3, **changes: Any) -> Turn:
    completion = Completion(
        token_ids=i32(*range(n)),
        logprobs=np.linspace(-1.1, -0.1, n, dtype=np.float32),
        versions=i32(*([2] * n)),
        sampling=Sampling(temperature=0.7, stop=("\n", "<|im_end|>"), seed=2**53),
        finish="stop",
        seconds=0.1,
        entropies=np.full(n, 0.3, np.float32),
    )
    call = ToolCall(id="c1", name="fix", arguments={"old": "a < b", "lines": [1, 2.5, None]})
    return replace(
        Turn(
            context_ids=i32(7, 8),
            completion=completion,
            message=Message(role="assistant", content="fix é \ud83d", reasoning="because", tool_calls=(call,)),
            observation=(Message(role="tool", content="ok\n", tool_call_id="c1"),),
            rewards={"env": 0.1},
            signals={"ok": True, "nested": {"n": [1]}},
            state_key="abc",
            seconds=1 / 3,
        ),
        **changes,
    )


def group(name: str = "train/1/0/t", attempts: int = 2) -> Group:
    trajectories = tuple(
        Trajectory(
            task_id="t",
            group=name,
            attempt=attempt,
            turns=(turn(3), turn(1, fresh=True, trainable=False)),
            stop=Stop.SUBMITTED,
            signals={"resolved": attempt == 1},
            parent=(0, 1, 2) if attempt else None,
            times={"generate": 0.5},
        )
        for attempt in range(attempts)
    )
    return Group(id=name, task=Task(id="t", env="swe", data={"f2p": ["x"]}, seed=3), trajectories=trajectories)


def scores(attempts: int = 2) -> list[Score]:
    return [
        Score(
            outcome={"agent": 1.0} if attempt else None,
            turn=f32(0.1, 0.0),
            total=1.1 if attempt else math.nan,
            granted={"ran_tests": f32(0.1, 0)},
            withheld={"valid_format": f32(0, 0.1)},
            gates={"outcome": bool(attempt)},
            in_gradient=bool(attempt),
        )
        for attempt in range(attempts)
    ]


def per_token(value: float, attempts: int = 2) -> list[list[np.ndarray]]:
    return [[np.full(3, value, np.float32), np.full(1, value, np.float32)] for _ in range(attempts)]


def same(a: Any, b: Any) -> bool:
    """Whether two values are bitwise identical, NaN included, with the same types."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if is_dataclass(a):
        return all(same(getattr(a, field.name), getattr(b, field.name)) for field in fields(a))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def test_reads_back_what_was_written_bit_by_bit(tmp_path: Path) -> None:
    trained = {WEIGHT: per_token(0.25), LOGPROB: per_token(math.nan)}
    Recorder(tmp_path).write(4, "train", group(), scores(), per_token(-1.5), trained)
    (entry,) = read_record(tmp_path)
    expected = Entry(
        step=4,
        phase="train",
        group=group(),
        scores=tuple(scores()),
        advantages=tuple(map(tuple, per_token(-1.5))),
        trained={name: tuple(map(tuple, arrays)) for name, arrays in trained.items()},
    )
    assert same(entry, expected)


def test_arrays_read_back_may_be_given_to_torch(tmp_path: Path) -> None:
    Recorder(tmp_path).write(1, "train", group(), scores())
    (entry,) = read_record(tmp_path)
    assert entry.group.trajectories[0].turns[0].context_ids.flags.writeable


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(width=32), max_size=5),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=6,
    ),
)
def test_any_number_and_any_json_survive(values: list[float], data: Any) -> None:
    completion = replace(
        turn(len(values)).completion, logprobs=np.array(values, np.float32), entropies=np.array(values, np.float32)
    )
    before = turn(completion=completion, signals={"data": data})
    text = json.dumps(encode(before)).encode("utf-8", "surrogatepass")
    assert same(decode(json.loads(text), Turn), before)


def test_refuses_what_json_cannot_hold() -> None:
    with pytest.raises(TypeError, match="cannot record a set"):
        encode(turn(signals={"files": {"a"}}))
    with pytest.raises(TypeError, match="key 1"):
        encode(turn(signals={1: "a"}))  # type: ignore[dict-item]


def test_filters_by_phase_step_and_label(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.write(10, "train", group("b"), scores())
    recorder.write(0, "warmstart", group("w"), scores())
    recorder.write(0, "eval", group("o"), scores(), label="oracle")
    recorder.write(0, "eval", group("u"), scores(), label="untouched")
    recorder.write(2, "train", group("a"), scores())

    def ids(**filters: Any) -> list[str]:
        return [entry.group.id for entry in read_record(tmp_path, **filters)]

    assert ids() == ["w", "o", "u", "a", "b"]  # by step, so 2 before 10
    assert ids(phase="train") == ["a", "b"]
    assert ids(step=0, phase="eval") == ["o", "u"]
    assert ids(label="oracle") == ["o"]


def test_writing_a_group_again_replaces_it(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.write(1, "eval", group("a"), scores())
    recorder.write(1, "eval", group("b"), scores())
    recorder.write(1, "eval", group("a"), scores(), per_token(9.0))
    entries = list(read_record(tmp_path))
    assert [(entry.group.id, entry.advantages is None) for entry in entries] == [("a", False), ("b", True)]


def test_resume_drops_later_steps(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for step in (1, 2, 3):
        recorder.write(step, "train", group(), scores())
    recorder.resume_at(2)
    recorder.write(3, "train", group("again"), scores())
    assert [(entry.step, entry.group.id) for entry in read_record(tmp_path)] == [
        (1, "train/1/0/t"),
        (2, "train/1/0/t"),
        (3, "again"),
    ]


@pytest.mark.slow
def test_cut_at_every_byte_of_its_last_entry(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Only that entry is lost, and appending continues after the complete ones."""
    recorder = Recorder(tmp_path)
    recorder.write(1, "train", group("a"), scores())
    (file,) = (tmp_path / "record").iterdir()
    before = file.stat().st_size
    recorder.write(1, "train", group("b"), scores())
    whole = file.read_bytes()
    for kept in range(1, len(whole) - before):
        file.write_bytes(whole[: before + kept])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert [entry.group.id for entry in read_record(tmp_path)] == ["a"]
        assert f"skipped 1 damaged or torn entry of {kept} bytes (at byte {before}); 1 are complete" in caplog.text

        caplog.clear()
        with caplog.at_level(logging.WARNING):
            Recorder(tmp_path).write(1, "train", group("c"), scores())
            assert [entry.group.id for entry in read_record(tmp_path)] == ["a", "c"]
        (record,) = caplog.records  # when it was moved; reading finds nothing more
        assert f"moved 1 damaged or torn entry of {kept} bytes to {file.name}.damaged" in record.getMessage()
        aside = file.with_name(f"{file.name}.damaged")
        assert aside.read_bytes() == whole[before : before + kept]
        aside.unlink()


def test_skips_an_entry_with_a_changed_byte(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(tmp_path)
    recorder.write(1, "train", group("a"), scores())
    (file,) = (tmp_path / "record").iterdir()
    before = file.stat().st_size
    recorder.write(1, "train", group("b"), scores())
    whole = file.read_bytes()
    for place in range(before + 10, len(whole), 7):  # behind the header, which holds nothing
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert [entry.group.id for entry in read_record(tmp_path)] == ["a"], place
    assert "1 damaged or torn entry" in caplog.text


def test_files_are_gzip_with_one_line_of_json_an_entry(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.write(1, "train", group("a"), scores())
    recorder.write(1, "train", group("b"), scores())
    (file,) = (tmp_path / "record").iterdir()
    found = [json.loads(line)["group"]["id"] for line in gzip.decompress(file.read_bytes()).splitlines()]
    assert (file.name, found) == ("000001-train.jsonl.gz", ["a", "b"])


def test_sync_flushes_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: dict[int, int] = {}
    real = os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        synced[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    monkeypatch.setattr(os, "fsync", fsync)
    recorder = Recorder(tmp_path)
    recorder.write(1, "train", group("a"), scores())
    recorder.write(1, "train", group("b"), scores())
    recorder.write(1, "eval", group("c"), scores(), label="warm")
    assert synced == {}
    recorder.sync()
    files = list((tmp_path / "record").iterdir())
    assert len(files) == 2
    assert {file.stat().st_ino: file.stat().st_size for file in files}.items() <= synced.items()
    assert (tmp_path / "record").stat().st_ino in synced
    synced.clear()
    recorder.sync()
    assert synced == {}
    recorder.write(2, "train", group("d"), scores())
    recorder.resume_at(1)
    recorder.sync()  # of what was dropped there is nothing to bring


def test_an_evaluation_is_found_by_its_name(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.write(3, "eval", group("a"), scores(), label=label_of("step-000003"))
    recorder.write(0, "eval", group("b"), scores(), label=label_of("../org/name:1.5"))
    assert [entry.group.id for entry in read_record(tmp_path, label="step-000003")] == ["a"]
    assert [entry.group.id for entry in read_record(tmp_path, label="../org/name:1.5")] == ["b"]


def test_drop_removes_a_label(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.drop(3, "eval", "last")  # nothing is there yet
    for name, label in (("a", "last"), ("b", "other")):
        recorder.write(3, "eval", group(name), scores(), label=label)
    recorder.drop(3, "eval", "last")
    recorder.write(3, "eval", group("c"), scores(), label="last")
    recorder.sync()
    assert [entry.group.id for entry in read_record(tmp_path)] == ["c", "b"]


def test_arrays_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    with pytest.raises(ValueError, match="2 trajectories has 1 scores"):
        recorder.write(1, "train", group(), scores(1))
    with pytest.raises(ValueError, match=r"advantages of group .* lengths"):
        recorder.write(1, "train", group(), scores(), per_token(1.0, attempts=1))
    with pytest.raises(ValueError, match=r"weight of group"):
        recorder.write(1, "train", group(), scores(), None, {WEIGHT: [[f32(1), f32(1)], [f32(1), f32(1)]]})
    with pytest.raises(ValueError, match="label"):
        recorder.write(1, "eval", group(), scores(), label="a/b")
    with pytest.raises(ValueError, match="phase"):
        recorder.write(1, "play", group(), scores())  # type: ignore[arg-type]
    assert list(read_record(tmp_path)) == []


def test_a_folder_without_a_record_is_named(tmp_path: Path) -> None:
    with pytest.raises(TurnstileError, match="has no record of episodes"):
        read_record(tmp_path)
