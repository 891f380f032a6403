"""`turnstile serve` in a process of its own, which tests kill and start again."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STARTING = 180.0  # seconds


class ModelProcess:
    """Serves a model at an address that stays the same; takes weights from below `weights_from`."""

    def __init__(self, folder: Path, model: str, weights_from: Path, *overrides: str) -> None:
        self.port = 0
        self._log = folder / "log"
        self._command = [sys.executable, "-u", "-m", "turnstile", "serve", model, *overrides, "--renderer", "lines"]
        self._command += ["--weights-from", str(weights_from)]
        self.process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def begin(self) -> None:
        """Starts it, and does not wait until it serves."""
        with self._log.open("wb") as log:
            self.process = subprocess.Popen([*self._command, "--port", str(self.port)], stdout=log, stderr=log)

    def wait(self) -> None:
        """Until it serves."""
        assert self.process is not None
        deadline = time.monotonic() + STARTING
        while "is served at " not in self._log.read_text():
            assert self.process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        self.port = int(self._log.read_text().split("is served at ")[1].split()[0].rpartition(":")[2].partition("/")[0])

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


@contextmanager
def model_processes(
    count: int, folder: Path, model: str, weights_from: Path, *overrides: str
) -> Iterator[list[ModelProcess]]:
    found = [ModelProcess(folder / str(number), model, weights_from, *overrides) for number in range(count)]
    try:
        for each in found:
            each.begin()
        for each in found:
            each.wait()
        yield found
    finally:
        for each in found:
            each.kill()
