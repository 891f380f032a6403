"""Running commands one at a time, each until it and all the processes that it started have ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import time

from turnstile.sandboxes.containers.runner.cut import Cut
from turnstile.sandboxes.containers.runner.files import GoneError, check_root
from turnstile.sandboxes.containers.runner.frames import CHUNK, PIECE, Input
from turnstile.sandboxes.containers.runner.kernel import Kills, count_others, is_full, kill_all, kill_counts
from turnstile.sandboxes.containers.runner.start import spawn

TYPE_CHECKING = False  # importing typing would take a tenth of a start
if TYPE_CHECKING:
    from typing import Any


TICK = 0.1  # seconds between two counts of the processes
STUBBORN = 10.0  # seconds within which killed processes must be gone
TIMED_OUT = 124
NOT_FOUND = 127
F_SETPIPE_SZ = 1031


class Output:
    """One output stream of a command: a pipe, and the part of the text that is kept."""

    def __init__(self, limit: int) -> None:
        self.descriptor, self.write_end = os.pipe()
        os.set_blocking(self.descriptor, False)
        self.cut = Cut(limit)
        self.piece = PIECE
        self.ended = False

    def take(self) -> bool:
        """Read once; return False if nothing is available now, or the stream has ended."""
        try:
            data = os.read(self.descriptor, self.piece)
        except BlockingIOError:
            return False
        self.cut.feed(data)
        if len(data) == PIECE:  # the pipe was full, so the command writes a lot
            with contextlib.suppress(OSError):  # this user may not have a larger pipe
                fcntl.fcntl(self.descriptor, F_SETPIPE_SZ, CHUNK)
                self.piece = CHUNK
        self.ended = not data
        return bool(data)

    def drain(self) -> None:
        """Read what is left without waiting, since a process that could not be killed may still hold the other end."""
        while not self.ended and self.take():
            pass

    def close_write_end(self) -> None:
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def close(self) -> None:
        self.close_write_end()
        os.close(self.descriptor)


class Commands:
    """An executor of commands. `source` is the input on which the host asks to end the running one."""

    def __init__(self, source: Input) -> None:
        self.source = source
        self.kills = Kills(kill_counts())
        self.bell, ring = os.pipe()  # rings when a process has ended
        for descriptor in (self.bell, ring):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(ring, warn_on_full_buffer=False)

    def execute(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a command to its end, kill the processes that it leaves behind, and return its result."""
        check_root(request["cwd"])
        limits = request["limits"]
        out, err = outputs = Output(limits["output_chars"]), Output(limits["output_chars"])
        try:
            started = time.monotonic()
            child = spawn(request, out.write_end, err.write_end)
            for output in outputs:
                output.close_write_end()
            status, spent, verdict = NOT_FOUND << 8, 0.0, ""
            if child is not None:
                status, spent, verdict = self.watch(child, started, limits, outputs)
            seconds = time.monotonic() - started
            self.end_all()
            for output in outputs:
                output.drain()
        finally:
            for output in outputs:
                output.close()
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
        if verdict == "crowd":  # caused by the command, and not to be mistaken for an out-of-memory kill
            code = 128 + signal.SIGTERM
        used_up = spent >= limits["cpu_seconds"]
        timed_out = verdict == "time" or code == 128 + signal.SIGXCPU or (code == 128 + signal.SIGKILL and used_up)
        note = "\n[too many processes]\n" if verdict == "crowd" else ""
        return {
            "exit_code": TIMED_OUT if timed_out else code,
            "stdout": out.cut.text(),
            "stderr": err.cut.text() + note,
            "seconds": seconds,
            "timed_out": timed_out,
            "out_of_memory": self.kills.more(),
            "disk_full": any(is_full(folder) for folder in request["disks"]),
        }

    def watch(
        self, child: int, started: float, limits: dict[str, Any], outputs: tuple[Output, ...]
    ) -> tuple[int, float, str]:
        """Read a command's output until it ends, or until a limit or the host stops it.

        Returns its wait status, its processor time in seconds and why it was stopped: "time", "crowd" (too many
        processes), "cancelled", or "" if it ended on its own.
        """
        poll = select.poll()
        for descriptor in (*(output.descriptor for output in outputs), self.bell, self.source.descriptor):
            poll.register(descriptor, select.POLLIN)
        by_descriptor = {output.descriptor: output for output in outputs}
        verdict = "cancelled" if self.source.buffer else ""
        next_count = started + TICK
        deadline = 0.0
        while True:
            now = time.monotonic()
            left = started + limits["seconds"] - now
            if not verdict and left <= 0:
                verdict = "time"
            if not verdict and now >= next_count:
                next_count = now + TICK
                verdict = "crowd" if count_others() > limits["processes"] else ""
            if verdict:
                kill_all()
                deadline = deadline or now + STUBBORN
                if now > deadline:
                    raise GoneError(f"its command does not end {STUBBORN:.0f} s after it was killed")
            rang = False
            for descriptor, _ in poll.poll(max(0.0, TICK if verdict else min(left, TICK)) * 1000):
                if descriptor == self.bell:
                    rang = bool(os.read(self.bell, 4096))
                elif descriptor == self.source.descriptor:
                    verdict = verdict or "cancelled"
                    poll.unregister(descriptor)
                elif not by_descriptor[descriptor].take() and by_descriptor[descriptor].ended:
                    poll.unregister(descriptor)
            ended = reap(child) if rang else None
            if ended is not None:
                return (*ended, verdict)

    def end_all(self) -> None:
        """Kill every other process in the container and wait until they have ended.

        Raises GoneError if they do not end in time.
        """
        deadline = time.monotonic() + STUBBORN
        while kill_all():
            reap(0)
            if time.monotonic() > deadline:
                raise GoneError(f"processes that were killed are still there after {STUBBORN:.0f} s")
            if select.select([self.bell], [], [], 0.01)[0]:
                os.read(self.bell, 4096)


def reap(child: int) -> tuple[int, float] | None:
    """Collect all ended processes. Return the status and processor time of `child`, or None if it is not among them."""
    found = None
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            found = status, usage.ru_utime + usage.ru_stime
