"""A pipe between two processes, with both ends in this one."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

from turnstile.rollout.pipe import Pipe
from turnstile.rollout.workers import MAX_BYTES, MAX_LINES, _LogTail

LARGE = bytes(32 << 20)  # far more than a socket takes by itself


async def test_receives_messages_in_order_and_then_none() -> None:
    ours, theirs = socket.socketpair()
    one, other = Pipe(ours), Pipe(theirs)
    for number in range(100):
        one.send(number)
    assert [await other.receive() for _ in range(100)] == list(range(100))
    one.close()
    assert [await other.receive() for _ in range(3)] == [None, None, None]
    assert await other.pending() == 1  # the end is there to stay
    other.send("to nobody")
    other.close()


async def test_send_does_not_wait_for_the_reader() -> None:
    """The worker imports for seconds before it reads, and training continues."""
    ours, theirs = socket.socketpair()
    one = Pipe(ours)
    one.send(LARGE)
    one.send("more")
    other = Pipe(theirs)
    assert await other.receive() == LARGE
    assert await other.receive() == "more"
    one.close()
    other.close()


async def test_finish_sending_waits_until_messages_are_written() -> None:
    ours, theirs = socket.socketpair()
    one, other = Pipe(ours), Pipe(theirs)
    one.send(LARGE)
    one.finish_sending()
    assert await other.receive() == LARGE
    one.close()
    other.close()


async def test_on_message_runs_while_the_loop_is_blocked() -> None:
    heard: list[Any] = []

    def on_message(message: Any) -> Any:
        heard.append((message, threading.current_thread() is threading.main_thread()))
        if message == "wrong":
            raise ValueError("cannot be booked")
        return None if message == "kept" else message

    ours, theirs = socket.socketpair()
    one, other = Pipe(ours), Pipe(theirs, on_message=on_message)
    for message in ("kept", "passed on", "wrong"):
        one.send(message)
    while len(heard) < 3:
        time.sleep(0.01)  # noqa: ASYNC251 - as training computes
    assert heard == [("kept", False), ("passed on", False), ("wrong", False)]
    assert await other.receive() == "passed on"
    assert str(await other.receive()) == "cannot be booked"
    one.close()
    other.close()


def test_log_tail_reads_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    path.write_text("of an earlier process\n")
    log = _LogTail(path)
    assert log.new_lines() == []
    with path.open("a") as printing:
        printing.write("one\n\nprogress 1 %\rprogress 100 %\nbeg")
        printing.flush()
        assert log.new_lines() == ["one", "progress 100 %"]
        printing.write("un\n")
        printing.flush()
        assert log.new_lines() == ["begun"]
        printing.write("".join(f"{number}\n" for number in range(MAX_LINES + 5)))
        printing.flush()
        last = f"(the last lines of {path})"
        assert log.new_lines() == [last, *map(str, range(5, MAX_LINES + 5))]
        printing.write("x" * MAX_BYTES + "\nthe last\n")
        printing.flush()
        assert log.new_lines()[-1] == "the last"
    assert log.new_lines() == []
