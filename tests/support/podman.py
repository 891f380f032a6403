"""Podman's Docker-compatible service as the tests' own engine."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from dockerd import ULIMITS, Dockerd, knock


def why_no_podman() -> str | None:
    """Why no service can be started here; None when one can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "a Podman of the tests' own takes Linux and root"
    if shutil.which("podman") is None or shutil.which("runc") is None:
        return "podman or runc is not installed (apt-get install podman runc)"
    return None


class Podman(Dockerd):
    """A service below one folder, with storage, settings and log of its own."""

    def start(self) -> None:
        limits = ", ".join(f'"{name}={most}:{most}"' for name, most in ULIMITS.items())
        settings = self.folder / "containers.conf"
        settings.write_text(
            f'[containers]\ndefault_ulimits = [{limits}]\nnetns = "none"\n'
            '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
        )
        command = ["podman", "--root", str(self.folder / "data"), "--runroot", str(self.folder / "run")]
        command += ["--tmpdir", str(self.folder / "tmp"), "system", "service", "--time=0", self.address]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "CONTAINERS_CONF": str(settings)},
            )  # fmt: skip
        deadline = time.monotonic() + 120
        while True:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"podman did not start: {(self.folder / 'log').read_text()[-2000:]}")
            with contextlib.suppress(OSError):
                knock(self.folder / "docker.sock")
                return
            time.sleep(0.1)


@contextlib.contextmanager
def podman() -> Iterator[Podman]:
    """A running service with both images."""
    folder = Path(tempfile.mkdtemp(prefix="turnstile-podman-"))
    service = Podman(folder)
    try:
        service.start()
        service.load()
        yield service
    finally:
        service.stop()
        service.sweep()
        shutil.rmtree(folder, ignore_errors=True)
