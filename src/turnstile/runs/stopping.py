"""Handling of SIGINT and SIGTERM, which end a run within seconds and leave it a checkpoint.

The first signal cancels the run at its next wait. While it plays or evaluates, this is at once, and the network is that
of the last complete step. If the run keeps computing for longer than `PATIENCE`, it is interrupted in the middle of the
step and later continues from the previous checkpoint. If what it waits for does not end (for example a tool that hangs
in a thread), the last complete step is saved anyway and the process ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from turnstile.errors import StoppedError

T = TypeVar("T")
PATIENCE = 3.0
"""Seconds until the run is interrupted, and again until the process ends."""
SOON = 0.05


class Stopping:
    """Runs a coroutine so that signals stop it. Outside the main thread, signals are left alone."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.save: Callable[[], None] | None = None
        """Saves the last complete step, if the coroutine waits only between steps."""
        self._interrupted = False
        self._task: asyncio.Task[Any] | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine and return its result.

        Raises KeyboardInterrupt if SIGINT stopped it, and StoppedError if SIGTERM did.
        """
        if threading.current_thread() is not threading.main_thread():
            return asyncio.run(work)
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
        try:
            return asyncio.run(self._main(work, before))
        except (asyncio.CancelledError, KeyboardInterrupt):
            if self.signal is signal.SIGTERM:
                raise StoppedError(self.signal) from None
            if self.signal is signal.SIGINT:
                raise KeyboardInterrupt from None
            raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Protect the `with` block from the timer that interrupts the run or ends the process."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            yield
        finally:
            if self.signal is not None:
                self._interrupted = True
                signal.setitimer(signal.ITIMER_REAL, PATIENCE)

    async def _main(self, work: Coroutine[Any, Any, T], before: dict[signal.Signals, Any]) -> T:
        loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        assert self._task is not None
        cancel = self._task.cancel

        def stop(number: int, frame: FrameType | None) -> None:
            if self.signal is not None:  # this is a second signal
                raise KeyboardInterrupt
            self.signal = signal.Signals(number)
            loop.call_soon_threadsafe(cancel)
            signal.setitimer(signal.ITIMER_REAL, PATIENCE, PATIENCE)

        for number in before:
            signal.signal(number, self._on_timer if number is signal.SIGALRM else stop)
        with _woken_by_signals(loop):
            return await work

    def _on_timer(self, number: int, frame: FrameType | None) -> None:
        assert self.signal is not None
        if self._interrupted:
            print(f"{self.signal.name}: something does not end, and is left behind", file=sys.stderr, flush=True)
            os._exit(128 + self.signal)
        assert self._task is not None
        running = asyncio.current_task(self._task.get_loop())
        if running is self._task or self.save is None:  # the run is computing
            self._interrupted = True
            raise KeyboardInterrupt
        if running is not None:  # another task may be writing to the ledger
            signal.setitimer(signal.ITIMER_REAL, SOON, PATIENCE)
        else:
            with self.saving():
                self.save()


@contextmanager
def _woken_by_signals(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Wake up the loop for each signal, so that Python runs its handler.

    Python runs handlers between two bytecodes of the main thread. A signal that arrives after the last bytecode before
    the loop's `select`, or in another thread, does not end that `select`, so its handler would wait for the next event.
    """
    reading, writing = socket.socketpair()
    with reading, writing:
        reading.setblocking(False)
        writing.setblocking(False)
        loop.add_reader(reading, reading.recv, 4096)
        before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            loop.remove_reader(reading)
