"""Turns as they are played, and which attempts had come to an end when the file broke off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from made_groups import attempt
from turnstile.rollout.codec import encode
from turnstile.rollout.journal import Journal, Key
from turnstile.types import Stop, Trajectory


def write(journal: Journal, step: int, trajectory: Trajectory) -> None:
    for number, turn in enumerate(trajectory.turns):
        journal.turn(step, trajectory.key, number, turn)
    journal.end(step, trajectory)


def found(run: Path, step: int) -> dict[Key, object]:
    return {key: encode(trajectory) for key, trajectory in Journal(run).finished(step).items()}


def test_what_had_finished_is_read_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    one, two, three = (attempt(number, [3, 1, 2]) for number in range(3))
    for number in range(3):  # turn by turn, as they come
        for each in (one, two, three):
            journal.turn(1, each.key, number, each.turns[number])
    journal.end(1, two)
    journal.end(1, one)
    assert found(tmp_path, 1) == {each.key: encode(each) for each in (two, one)}
    assert found(tmp_path, 2) == {}


def test_an_attempt_played_again_counts_as_it_was_last(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    first, second = attempt(0, [3, 1, 2]), attempt(0, [4, 4])
    write(journal, 1, replace(first, stop=Stop.ERROR))
    write(journal, 1, second)
    assert found(tmp_path, 1) == {second.key: encode(second)}
    journal.turn(1, first.key, 0, first.turns[0])  # and once more, without an end
    assert found(tmp_path, 1) == {}


def test_an_attempt_without_a_turn_may_come_to_an_end(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    nothing = replace(attempt(0, [3]), turns=(), stop=Stop.CONTEXT)
    journal.end(1, nothing)
    assert found(tmp_path, 1) == {nothing.key: encode(nothing)}


@pytest.mark.parametrize("last", ["turn", "end"])
def test_cut_at_every_byte_of_its_last_line(tmp_path: Path, last: str) -> None:
    """Whatever was whole before is there, nothing else is, and writing goes on behind it."""
    journal = Journal(tmp_path)
    one, two = attempt(0, [2, 1]), attempt(1, [1, 1])
    write(journal, 1, one)
    (file,) = (tmp_path / "record").iterdir()
    if last == "end":
        for number, turn in enumerate(two.turns):
            journal.turn(1, two.key, number, turn)
    before = file.stat().st_size
    if last == "end":
        journal.end(1, two)
    else:
        journal.turn(1, two.key, 0, two.turns[0])
    whole = file.read_bytes()
    for size in range(before, len(whole)):
        file.write_bytes(whole[:size])
        assert set(found(tmp_path, 1)) == {one.key}
        write(Journal(tmp_path), 1, two)
        assert found(tmp_path, 1) == {each.key: encode(each) for each in (one, two)}


def test_steps_that_are_safe_are_forgotten(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for step in (1, 2, 3):
        write(journal, step, attempt(0, [1]))
    journal.drop_until(2)
    assert [bool(found(tmp_path, step)) for step in (1, 2, 3)] == [False, False, True]
    write(journal, 2, attempt(0, [1]))
    assert found(tmp_path, 2)
