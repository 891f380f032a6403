"""The worker process that plays episodes while training computes: its messages and training's end of the pipe.

The worker's end is in `runs.worker`.
"""

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
"""The file of a run folder that holds the worker's output."""
MAX_LINES = 20  # lines of its output passed on at once
MAX_BYTES = 2**16  # bytes at the end of the output that are searched for those lines
GRACE_SECONDS = 10.0  # time for the worker to close its sandboxes before it is killed
SHORT_GRACE_SECONDS = 1.5  # the same, when training is being stopped


@dataclass(frozen=True, slots=True)
class PlayJobs:
    """To the worker: play these jobs, preferring earlier ones."""

    jobs: Sequence[tuple[Task, Attempt]]


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """To the worker: sample with these weights from the next token on."""

    version: int
    file: Path


@dataclass(frozen=True, slots=True)
class AttemptStarted:
    """From the worker: an attempt has started from its beginning."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class TurnReached:
    """From the worker: a turn of an attempt reached its stage."""

    attempt: Attempt
    number: int
    turn: Turn


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """From the worker: an attempt ended. `will_retry` is true if it is played again.

    The trajectory comes without its turns, which were sent before. `stats` holds the sampling statistics since the last
    such message.
    """

    trajectory: Trajectory
    will_retry: bool
    stats: dict[str, float]


Event = AttemptStarted | TurnReached | AttemptEnded


@dataclass(frozen=True, slots=True)
class StatusCounts:
    """From the worker, from time to time: the number of episodes in each status."""

    counts: Mapping[EpisodeStatus, int]


@dataclass(frozen=True, slots=True)
class WorkerFault:
    """From the worker as it exits: the error of an episode or of the worker itself."""

    error: BaseException
    where: str


class Worker:
    """Training's handle to the worker process. Must be created in a running event loop."""

    def __init__(self, setup: Any, *, log: Path, on_message: OnMessage = lambda message: message) -> None:
        """Start the process.

        `setup` is sent to `runs.worker`, which builds its parts from it. The process's output is appended to the file
        `log`, and its messages are passed to `on_message` in a thread as they arrive. Raises ConfigError if `setup`
        cannot be pickled.
        """
        self._log = _LogTail(log)
        local_end, worker_end = socket.socketpair()
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-u", "-P", "-m", MODULE, str(worker_end.fileno())],
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[worker_end.fileno()],
                    start_new_session=True,  # Ctrl-C goes to training, which then ends this process
                )
        finally:
            worker_end.close()
        self._pipe = Pipe(local_end, on_message=on_message)
        try:
            self._pipe.send(setup)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            self._pipe.close()
            self._process.wait()
            raise pickling_error(error) from None

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    def send(self, message: PlayJobs | WeightUpdate) -> None:
        """Queue a message to the worker."""
        self._pipe.send(message)

    async def receive(self) -> Any:
        """Return the result of `on_message` for the next message.

        Raises EngineError if the worker died, the worker's error if it reported one, and what `on_message` raised.
        """
        message = await self._pipe.receive()
        if message is None:
            code = await asyncio.to_thread(self._process.wait)
            raise EngineError(f"the process that plays episodes {describe_exit(code)}")
        if isinstance(message, Exception):
            raise message
        if isinstance(message, WorkerFault):
            message.error.add_note(message.where)
            raise message.error
        return message

    async def pending(self) -> int:
        """Return how many messages `receive` returns without waiting."""
        return await self._pipe.pending()

    def new_output(self) -> list[str]:
        """Return the lines that the worker printed since the last call, each prefixed with the worker's process id."""
        return [f"worker process {self.pid}: {line}" for line in self._log.new_lines()]

    async def close(self, *, grace: float = GRACE_SECONDS) -> None:
        """Ask the worker to close, and kill it after `grace` seconds."""
        self._pipe.shutdown()
        try:
            await asyncio.to_thread(self._process.wait, grace)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            await asyncio.to_thread(self._process.wait)
        await asyncio.to_thread(self._pipe.close)


class _LogTail:
    """Reads the lines that another process appends to a file, continuing after the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = path.stat().st_size if path.exists() else 0

    def new_lines(self) -> list[str]:
        """Return the complete lines since the last call, or only the last ones if there are too many."""
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
    """Return the ConfigError for a setup that cannot be sent to another process."""
    return ConfigError(
        f"this run cannot be played ahead, as a part of it cannot be sent to another process ({error}); define it in a "
        "module, or set rollout.max_staleness = 0"
    )


def describe_exit(code: int) -> str:
    """Return how a process ended, in words."""
    if code == 128 + signal.SIGTERM or code == 128 + signal.SIGINT:
        return f"was stopped ({signal.Signals(code - 128).name})"
    if code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name
    return f"was killed ({name}{', as when memory runs out' if -code == signal.SIGKILL else ''})"
