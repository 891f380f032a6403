"""The process that plays episodes while another one trains: what is said between the two, and the end that training
has. `build.worker` is the other end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from turnstile.errors import ConfigError, EngineError
from turnstile.rollout.episode import Attempt
from turnstile.types import Task, Trajectory, Turn

MODULE = "turnstile.build.worker"
PATIENCE = 10.0  # seconds that it is given to put away what it has
HURRY = 1.5  # the same where training is being stopped


@dataclass(frozen=True, slots=True)
class Play:
    """To the worker: play these, in this order of preference."""

    jobs: Sequence[tuple[Task, Attempt]]


@dataclass(frozen=True, slots=True)
class Weights:
    """To the worker: sample with these from the next token on."""

    version: int
    file: Path


@dataclass(frozen=True, slots=True)
class Began:
    """From the worker: an attempt is played from its start."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Turned:
    """From the worker: a turn of an attempt ended."""

    attempt: Attempt
    number: int
    turn: Turn


@dataclass(frozen=True, slots=True)
class Ended:
    """From the worker: an attempt came to an end, `again` if it is played once more; without its turns, which were
    told. With what sampling has cost since the last one."""

    trajectory: Trajectory
    again: bool
    stats: dict[str, float]


Told = Began | Turned | Ended


@dataclass(frozen=True, slots=True)
class Fault:
    """From the worker, which has ended: an episode, or what it plays them with, has a fault."""

    error: BaseException
    where: str


class Line:
    """One end of the line. What comes is taken off it by a thread, so that nobody waits for a reader who computes."""

    def __init__(self, end: socket.socket, *, at_end: Callable[[], None] = lambda: None) -> None:
        """`at_end` is called in that thread when the line is closed."""
        self._socket = end
        self._at_end = at_end
        self._connection = Connection(os.dup(end.fileno()))
        self._news: asyncio.Queue[Any] = asyncio.Queue()  # never more than what was asked for
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._read, name="line", daemon=True)
        self._thread.start()

    def send(self, message: Any) -> None:
        """Raises what pickle raises for what cannot be sent. Who is gone does not hear it; `receive` tells."""
        data = pickle.dumps(message)
        with contextlib.suppress(OSError):
            self._connection.send_bytes(data)

    async def receive(self) -> Any:
        """The next message, or the exception that it could not be read for; None, again and again, when the line is
        closed."""
        found = await self._news.get()
        if found is None:
            self._news.put_nowait(None)
        return found

    def waiting(self) -> Iterator[Any]:
        """The messages that are there by now."""
        while not self._news.empty():
            found = self._news.get_nowait()
            if found is None:
                self._news.put_nowait(None)
                return
            yield found

    def shut(self) -> None:
        with contextlib.suppress(OSError):  # the other end was quicker
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut()
        self._thread.join()
        self._connection.close()
        self._socket.close()

    def _read(self) -> None:
        found: Any = True
        while found is not None:
            try:
                found = self._connection.recv_bytes()
            except (EOFError, OSError):
                found = None
                self._at_end()
            try:
                found = found and pickle.loads(found)
            except Exception as error:  # whoever waits for the message is told
                found = error
            try:
                self._loop.call_soon_threadsafe(self._news.put_nowait, found)
            except RuntimeError:
                return  # the loop is closed: nobody waits any more


class Worker:
    """The process, as training has it. Start it in an event loop."""

    def __init__(self, setup: Any) -> None:
        """`setup` is what `build.worker` makes its parts of. Raises ConfigError for one that cannot be sent to another
        process."""
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, str(theirs.fileno())],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # an interrupt at the terminal is for training, which then ends this
            )
        finally:
            theirs.close()
        self._line = Line(ours)
        self._other: Any = None  # what came and is nothing that happened to an attempt
        try:
            self._line.send(setup)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            self._line.close()
            self._process.wait()
            raise cannot_be_sent(error) from None

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Play | Weights) -> None:
        self._line.send(message)

    async def receive(self) -> Told:
        """What happened next. Raises EngineError when the worker died, and the fault that ended it."""
        found, self._other = self._other, None
        return await self._told(await self._line.receive() if found is None else found)

    def waiting(self) -> list[Told]:
        """What has come by now. A fault among it is for `receive` to raise."""
        found = list(self._line.waiting())
        self._other = next((each for each in found if not isinstance(each, Told)), self._other)
        return [each for each in found if isinstance(each, Told)]

    async def _told(self, found: Any) -> Told:
        if found is None:
            code = await asyncio.to_thread(self._process.wait)
            raise EngineError(f"the process that plays episodes {ending(code)}")
        if isinstance(found, Exception):
            raise found
        if isinstance(found, Fault):
            found.error.add_note(found.where)
            raise found.error
        assert isinstance(found, Told)
        return found

    async def close(self, *, patience: float = PATIENCE) -> None:
        """Has it put away what it has, and ends it, after so many seconds by force."""
        self._line.shut()
        try:
            await asyncio.to_thread(self._process.wait, patience)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            await asyncio.to_thread(self._process.wait)
        await asyncio.to_thread(self._line.close)


def cannot_be_sent(error: Exception) -> ConfigError:
    return ConfigError(
        f"this run cannot be played ahead, as a part of it cannot be sent to another process ({error}); define it in a "
        "module, or set rollout.ahead = 0"
    )


def ending(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name
    return f"was killed ({name}{', as when memory runs out' if -code == signal.SIGKILL else ''})"
