"""The journal: turns as they are played, and the finished attempts of an incomplete file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from episodes import stages
from made_groups import attempt
from turnstile.errors import LedgerError
from turnstile.records.codec import encode
from turnstile.records.gzip_log import Appender, read_members
from turnstile.records.journal import Journal, Key
from turnstile.types import Stage, Stop, Trajectory


def write_turn(journal: Journal, step: int, trajectory: Trajectory, number: int) -> None:
    for stage in stages(trajectory.turns[number]):
        journal.turn(step, trajectory.key, number, stage)


def write(journal: Journal, step: int, trajectory: Trajectory) -> None:
    for number in range(len(trajectory.turns)):
        write_turn(journal, step, trajectory, number)
    journal.end(step, trajectory)


def found(run: Path, step: int) -> dict[Key, object]:
    return {key: encode(trajectory) for key, trajectory in Journal(run).finished_attempts(step).items()}


def test_restores_finished_attempts(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    one, two, three = (attempt(number, [3, 1, 2]) for number in range(3))
    for number in range(3):  # turn by turn, as they come
        for each in (one, two, three):
            write_turn(journal, 1, each, number)
    journal.end(1, two)
    journal.end(1, one)
    assert found(tmp_path, 1) == {each.key: encode(each) for each in (two, one)}
    assert found(tmp_path, 2) == {}


def test_restores_the_last_playing_of_an_attempt(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    first, second = attempt(0, [3, 1, 2]), attempt(0, [4, 4])
    write(journal, 1, replace(first, stop=Stop.ERROR))
    write(journal, 1, second)
    assert found(tmp_path, 1) == {second.key: encode(second)}
    write_turn(journal, 1, first, 0)  # and once more, without an end
    assert found(tmp_path, 1) == {}


@pytest.mark.parametrize("stage", [Stage.SAMPLED, Stage.DELIVERED])
def test_restores_an_uncompleted_last_turn(tmp_path: Path, stage: Stage) -> None:
    journal, whole = Journal(tmp_path), attempt(0, [3, 2], states=["a", "b"])
    write_turn(journal, 1, whole, 0)
    reached = []
    for turn in stages(whole.turns[1]):
        journal.turn(1, whole.key, 1, turn)
        reached.append(turn)
        if turn.stage is stage:
            break
    ended = replace(whole, turns=(whole.turns[0], reached[-1]), stop=Stop.TIMEOUT)
    journal.end(1, ended)
    assert found(tmp_path, 1) == {whole.key: encode(ended)}


def test_attempt_with_a_missing_line_is_unfinished(tmp_path: Path) -> None:
    """For every line, also if the attempt was played before and an older line has its place."""
    journal, one = Journal(tmp_path), attempt(0, [3, 2], states=["a", "b"])
    for number in range(2):  # played, but not to its end
        write_turn(journal, 1, one, number)
    (file,) = (tmp_path / "record").iterdir()
    before = list(read_members(file))
    write(journal, 1, one)
    after = list(read_members(file))[len(before) :]
    assert (len(before), len(after)) == (6, 7)
    for lost in range(7):
        file.unlink()
        for line in [*before, *after[:lost], *after[lost + 1 :]]:
            Appender(file.parent).append(file, line)
        harmless = lost in (1, 4)  # delivered: completed says as much
        assert found(tmp_path, 1) == ({one.key: encode(one)} if harmless else {}), lost


def test_attempt_without_turns_may_end(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    nothing = replace(attempt(0, [3]), turns=(), stop=Stop.CONTEXT)
    journal.end(1, nothing)
    assert found(tmp_path, 1) == {nothing.key: encode(nothing)}


@pytest.mark.parametrize("last", ["turn", "end"])
def test_cut_at_every_byte_of_its_last_line(tmp_path: Path, last: str) -> None:
    """Complete entries are restored, nothing else is, and appending continues after them."""
    journal = Journal(tmp_path)
    one, two = attempt(0, [2, 1]), attempt(1, [1, 1])
    write(journal, 1, one)
    (file,) = (tmp_path / "record").iterdir()
    if last == "end":
        for number in range(len(two.turns)):
            write_turn(journal, 1, two, number)
    before = file.stat().st_size
    if last == "end":
        journal.end(1, two)
    else:
        journal.turn(1, two.key, 0, next(stages(two.turns[0])))
    whole = file.read_bytes()
    for size in range(before, len(whole)):
        file.write_bytes(whole[:size])
        assert set(found(tmp_path, 1)) == {one.key}
        write(Journal(tmp_path), 1, two)
        assert found(tmp_path, 1) == {each.key: encode(each) for each in (one, two)}


def test_refuses_a_file_of_another_version(tmp_path: Path) -> None:
    journal, one = Journal(tmp_path), attempt(0, [1])
    body = {"group": one.group, "attempt": 0, "number": 0, "turn": encode(one.turns[0]), "end": None}
    Appender(tmp_path / "record").append(tmp_path / "record" / "000001-played.jsonl.gz", body)
    with pytest.raises(LedgerError, match=r"played\.jsonl\.gz was written by another version of Turnstile"):
        journal.finished_attempts(1)


def test_drops_steps_that_checkpoints_hold(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for step in (1, 2, 3):
        write(journal, step, attempt(0, [1]))
    journal.drop_until(2)
    assert [bool(found(tmp_path, step)) for step in (1, 2, 3)] == [False, False, True]
    write(journal, 2, attempt(0, [1]))
    assert found(tmp_path, 2)
