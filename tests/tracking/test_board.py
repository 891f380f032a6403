from __future__ import annotations

from dataclasses import replace

from episodes import stages
from made_groups import attempt
from turnstile.tracking.board import EpisodeStatus, StatusBoard
from turnstile.types import Stop

KEYS = [("g", number) for number in range(4)]


def counted(board: StatusBoard) -> dict[str, int]:
    return {place.value: count for place, count in board.counts().items() if count}


def test_episodes_have_the_status_set_last() -> None:
    board = StatusBoard()
    board.set_status(KEYS)
    board.set_status(KEYS[:2], EpisodeStatus.GENERATING)
    board.set_status(KEYS[:1], EpisodeStatus.ACTING)
    assert counted(board) == {"waiting": 2, "generating": 1, "in a tool": 1}
    board.remove(KEYS)
    assert counted(board) == {}


def test_counts_failures_by_kind() -> None:
    board = StatusBoard()
    played = attempt(0, [2, 3], group="g")
    failed = replace(played, attempt=1, stop=Stop.ERROR, error="SandboxError: it died")
    board.set_status(KEYS)
    board.on_end(played, will_retry=False)
    board.on_end(failed, will_retry=True)
    assert counted(board) == {"waiting": 3, "finished": 1}
    board.on_end(failed, will_retry=False)
    assert counted(board) == {"waiting": 2, "finished": 1, "failed": 1}
    assert board.failures == {"SandboxError": 2}
    for turn in played.turns:
        for stage in stages(turn):
            board.on_turn(stage)
    assert board.tokens == 5


def test_counts_the_episodes_of_another_process() -> None:
    board, other = StatusBoard(), StatusBoard()
    other.set_status(KEYS, EpisodeStatus.GENERATING)
    other.on_end(attempt(3, [1], group="g"), will_retry=False)
    assert other.unfinished() == {EpisodeStatus.GENERATING: 3}
    board.remote_counts = other.unfinished()
    board.set_status([("h", 0)], EpisodeStatus.GENERATING)
    assert counted(board) == {"generating": 4}
