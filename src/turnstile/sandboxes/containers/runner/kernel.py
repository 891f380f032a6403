"""Queries to the kernel about this container and its processes."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Sequence

NO_ROOM = 1 << 16  # bytes; a disk with less left is full
GROUPS = "/sys/fs/cgroup"


class Kills:
    """The number of processes of this container that the kernel killed for lack of memory."""

    def __init__(self, files: Sequence[str]) -> None:
        """Open the first of `files`, the candidate counters, that exists."""
        self.file = next((os.open(name, os.O_RDONLY) for name in files if os.path.isfile(name)), None)
        self.known = self.count()

    def count(self) -> int:
        content = b"" if self.file is None else os.pread(self.file, 4096, 0)
        return next((int(line.split()[1]) for line in content.splitlines() if line.startswith(b"oom_kill ")), 0)

    def more(self) -> bool:
        """Return whether the number has grown since the last call."""
        before, self.known = self.known, self.count()
        return self.known > before


def kill_counts(cgroup_file: str = "/proc/self/cgroup") -> list[str]:
    """Return the files that may hold the counter, in either version of control groups."""
    mine = f"{GROUPS}{own_group(cgroup_file)}"  # where we see the machine's view
    return [f"{mine}/memory.events", f"{GROUPS}/memory.events", f"{GROUPS}/memory/memory.oom_control"]


def own_group(cgroup_file: str) -> str:
    """Return our control group of version 2 as we see it: empty in a namespace of our own, or with version 1."""
    try:
        with open(cgroup_file) as file:
            return next((line[3:].strip().rstrip("/") for line in file if line.startswith("0::")), "")
    except FileNotFoundError:
        return ""


def kill_all() -> bool:
    """Kill every other process of the container; return False if there is none."""
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def count_others() -> int:
    """Return how many processes there are besides this one."""
    return sum(name.isdigit() for name in os.listdir("/proc")) - 1


def is_full(folder: str) -> bool:
    """Return whether a folder's disk has no room left."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize < NO_ROOM


def prctl(option: int, value: int) -> None:
    """Set an option of this process."""
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
