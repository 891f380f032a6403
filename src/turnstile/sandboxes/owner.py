"""Labels that identify the process that owns a container, even after its process id is reused."""

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
    """Return whether the process that `labels` identify has ended.

    Returns False for a process of another machine, which cannot be checked, and for labels without a process id.
    """
    if labels.get(HOST) != host_name() or not labels.get(PID, "").isdigit():
        return False
    return start_time(int(labels[PID])) != labels.get(STARTED)


def host_name() -> str:
    """Return the name of this machine and, on Linux, the PID namespace in which process ids are unique."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except FileNotFoundError:
        return socket.gethostname()


def start_time(pid: int) -> str | None:
    """Return when a process of this machine started, as text to compare, or None if it is not running."""
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
