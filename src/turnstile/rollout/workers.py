"""The process that plays episodes while another one trains: what is said between the two, and the end that training
has. `runs.worker` is the other end."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnstile.errors import ConfigError, EngineError
from turnstile.rollout.episode import Attempt
from turnstile.rollout.pipe import OnMessage, Pipe
from turnstile.tracking.board import EpisodeStatus
from turnstile.types import Task, Trajectory, Turn

MODULE = "turnstile.runs.worker"
LOG = "worker.log"
"""The file of a run folder with what the process prints."""
MAX_LINES = 20  # lines of it that are passed on at once
MAX_BYTES = 2**16  # in which they are
GRACE_SECONDS = 10.0  # seconds that it is given to put away what it has
SHORT_GRACE_SECONDS = 1.5  # the same where training is being stopped


@dataclass(frozen=True, slots=True)
class PlayJobs:
    """To the worker: play these, in this order of preference."""

    jobs: Sequence[tuple[Task, Attempt]]


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """To the worker: sample with these from the next token on."""

    version: int
    file: Path


@dataclass(frozen=True, slots=True)
class AttemptStarted:
    """From the worker: an attempt is played from its start."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class TurnReached:
    """From the worker: a turn of an attempt reached its stage."""

    attempt: Attempt
    number: int
    turn: Turn


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """From the worker: an attempt came to an end, `again` if it is played once more; without its turns, which were
    told. With what sampling has cost since the last one."""

    trajectory: Trajectory
    will_retry: bool
    stats: dict[str, float]


Event = AttemptStarted | TurnReached | AttemptEnded


@dataclass(frozen=True, slots=True)
class StatusCounts:
    """From the worker, now and then: where its episodes are."""

    counts: Mapping[EpisodeStatus, int]


@dataclass(frozen=True, slots=True)
class WorkerFault:
    """From the worker, which has ended: an episode, or what it plays them with, has a fault."""

    error: BaseException
    where: str


class Worker:
    """The process, as training has it. Start it in an event loop."""

    def __init__(self, setup: Any, *, log: Path, on_message: OnMessage = lambda told: told) -> None:
        """`setup` is what `runs.worker` makes its parts of; what it prints is added to the file `log`, and what it
        tells given to `hear` as it comes, in a thread. Raises ConfigError for a setup that cannot be sent to another
        process."""
        self._log = _LogTail(log)
        ours, theirs = socket.socketpair()
        try:
            with log.open("ab") as printed:
                self._process = subprocess.Popen(
                    [sys.executable, "-u", "-P", "-m", MODULE, str(theirs.fileno())],
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # an interrupt at the terminal is for training, which then ends this
                )
        finally:
            theirs.close()
        self._pipe = Pipe(ours, on_message=on_message)
        try:
            self._pipe.send(setup)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            self._pipe.close()
            self._process.wait()
            raise pickling_error(error) from None

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: PlayJobs | WeightUpdate) -> None:
        self._pipe.send(message)

    async def receive(self) -> Any:
        """What `hear` made of what was told next. Raises EngineError when the worker died, the fault that ended it,
        and what `hear` raised."""
        found = await self._pipe.receive()
        if found is None:
            code = await asyncio.to_thread(self._process.wait)
            raise EngineError(f"the process that plays episodes {describe_exit(code)}")
        if isinstance(found, Exception):
            raise found
        if isinstance(found, WorkerFault):
            found.error.add_note(found.where)
            raise found.error
        return found

    async def pending(self) -> int:
        """How often `receive` does not wait."""
        return await self._pipe.pending()

    def new_output(self) -> list[str]:
        """The lines that it has printed since the last call, each with whose they are."""
        return [f"process {self.pid}, which plays: {line}" for line in self._log.new_lines()]

    async def close(self, *, grace: float = GRACE_SECONDS) -> None:
        """Has it put away what it has, and ends it, after so many seconds by force."""
        self._pipe.shutdown()
        try:
            await asyncio.to_thread(self._process.wait, grace)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            await asyncio.to_thread(self._process.wait)
        await asyncio.to_thread(self._pipe.close)


class _LogTail:
    """A file that another process writes, read on from where it ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = path.stat().st_size if path.exists() else 0

    def new_lines(self) -> list[str]:
        """The whole lines since the last call, of many the last ones."""
        with self._path.open("rb") as file:
            begin = max(self._read, file.seek(0, os.SEEK_END) - MAX_BYTES)
            file.seek(begin)
            whole = file.read().rpartition(b"\n")[0]
        skipped = begin > self._read
        self._read = begin + len(whole) + bool(whole)
        texts = [line.rpartition("\r")[2].rstrip() for line in whole.decode(errors="replace").split("\n")]
        lines = [text for text in texts if text]
        if skipped or len(lines) > MAX_LINES:
            return [f"(the last lines of {self._path})", *lines[-MAX_LINES:]]
        return lines


def pickling_error(error: Exception) -> ConfigError:
    return ConfigError(
        f"this run cannot be played ahead, as a part of it cannot be sent to another process ({error}); define it in a "
        "module, or set rollout.max_staleness = 0"
    )


def describe_exit(code: int) -> str:
    """How a process ended, in words."""
    if code == 128 + signal.SIGTERM or code == 128 + signal.SIGINT:
        return f"was told to end ({signal.Signals(code - 128).name})"
    if code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name
    return f"was killed ({name}{', as when memory runs out' if -code == signal.SIGKILL else ''})"
