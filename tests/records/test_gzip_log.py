"""Damaged files of gzip members: complete members are read, and nothing is discarded."""

from __future__ import annotations

import gzip
import logging
from pathlib import Path

import numpy as np
import pytest

from turnstile.records.gzip_log import Appender, read_members


def written(path: Path, count: int, size: int = 0) -> tuple[list[object], list[int]]:
    """Write members; return their contents, and where each begins, followed by the file's end."""
    rng, appender = np.random.default_rng(0), Appender(path.parent)
    bodies: list[object] = [{"number": number, "noise": rng.bytes(size).hex()} for number in range(count)]
    begins = [0]
    for body in bodies:
        appender.append(path, body)
        begins.append(path.stat().st_size)
    return bodies, begins


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("size", [0, 20_000])
def test_one_flipped_byte_costs_one_entry(tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int) -> None:
    """Anywhere in the entry: its header, its contents, its checksum, its length."""
    path = tmp_path / "x.jsonl.gz"
    bodies, begins = written(path, 50, size)
    whole = path.read_bytes()
    begin, end = begins[5], begins[6]
    for place in (*range(begin, begin + 12), *np.linspace(begin + 12, end - 9, 20).astype(int), *range(end - 8, end)):
        path.write_bytes(whole)
        flip(path, place)
        caplog.clear()
        found = list(read_members(path))
        harmless = begin + 3 <= place < begin + 10  # the header says "text", another time, level or system
        assert found == (bodies if harmless else [*bodies[:5], *bodies[6:]]), place
        if not harmless:
            assert (
                f"skipped 1 damaged or torn entry of {end - begin} bytes (at byte {begin}); 49 are complete"
                in caplog.text
            )


def test_appends_after_complete_entries(tmp_path: Path) -> None:
    """Damage in the middle stays where it is, and nothing is cut off."""
    path = tmp_path / "x.jsonl.gz"
    bodies, begins = written(path, 50)
    flip(path, begins[5] + 20)
    damaged = path.read_bytes()
    Appender(tmp_path).append(path, "more")
    assert path.read_bytes()[: len(damaged)] == damaged
    assert list(read_members(path)) == [*bodies[:5], *bodies[6:], "more"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["x.jsonl.gz"]


def test_several_damages_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "x.jsonl.gz"
    bodies, begins = written(path, 20)
    for number in (3, 4, 5, 11):
        flip(path, begins[number] + 20)
    assert list(read_members(path)) == [body for number, body in enumerate(bodies) if number not in (3, 4, 5, 11)]
    assert "skipped 4 damaged or torn entries of" in caplog.text
    assert f"(at byte {begins[3]}, {begins[11]}); 16 are complete" in caplog.text


@pytest.mark.parametrize("lost", [1, 3])
def test_moves_a_torn_end_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture, lost: int) -> None:
    path = tmp_path / "x.jsonl.gz"
    bodies, begins = written(path, 10)
    for number in range(10 - lost, 10):
        flip(path, begins[number] + 20)
    tail = path.read_bytes()[begins[10 - lost] :]
    with caplog.at_level(logging.WARNING):
        Appender(tmp_path).append(path, "more")
    aside = tmp_path / "x.jsonl.gz.damaged"
    assert aside.read_bytes() == tail
    assert list(read_members(path)) == [*bodies[: 10 - lost], "more"]
    assert f"moved {lost} damaged or torn" in caplog.text
    gzip.decompress(path.read_bytes())
    with path.open("ab") as file:
        file.write(b"\x1f\x8btorn")
    Appender(tmp_path).append(path, "and more")
    assert aside.read_bytes() == tail + b"\x1f\x8btorn"  # what was moved before is still there
    Appender(tmp_path).remove(path)
    assert list(tmp_path.iterdir()) == []


def test_file_of_another_kind_is_all_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(b"{}\n" * 100)
    assert list(read_members(path)) == []
    assert "skipped 1 damaged or torn entry of 300 bytes (at byte 0); 0 are complete" in caplog.text
    path.write_bytes(b"")
    assert list(read_members(path)) == []
