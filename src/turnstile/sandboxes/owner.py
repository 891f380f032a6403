"""The process that owns a container, identified so that a reused process id is not mistaken for it."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

HOST = "turnstile.owner.host"
PID = "turnstile.owner.pid"
STARTED = "turnstile.owner.started"


def owner_labels() -> dict[str, str]:
    """Return labels that identify this process."""
    return {HOST: host_name(), PID: str(os.getpid()), STARTED: start_time(os.getpid()) or ""}


def is_gone(labels: Mapping[str, str]) -> bool:
    """Return whether the labelled process has ended; False for one of another machine, which cannot be checked."""
    if labels.get(HOST) != host_name() or not labels.get(PID, "").isdigit():
        return False
    return start_time(int(labels[PID])) != labels.get(STARTED)


def host_name() -> str:
    """Return the name of this machine, and on Linux its PID namespace, in which process ids are unique."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except FileNotFoundError:
        return socket.gethostname()


def start_time(pid: int) -> str | None:
    """Return when a process of this machine started, as a string to compare; None if there is no such process."""
    if Path("/proc/self/stat").exists():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        if fields[0] in ("Z", "X"):
            return None
        return f"{fields[19]} ticks after boot {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    shown = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return shown.stdout.strip() or None
