"""Requests to the kernel about this container and its processes."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Sequence

NO_ROOM = 1 << 16  # bytes; a disk with less free space counts as full
GROUPS = "/sys/fs/cgroup"


class Kills:
    """A counter of the container's processes that the kernel killed for lack of memory."""

    def __init__(self, files: Sequence[str]) -> None:
        """Open the first of `files` that exists; each could hold the counter."""
        self.file = next((os.open(name, os.O_RDONLY) for name in files if os.path.isfile(name)), None)
        self.known = self.count()

    def count(self) -> int:
        content = b"" if self.file is None else os.pread(self.file, 4096, 0)
        return next((int(line.split()[1]) for line in content.splitlines() if line.startswith(b"oom_kill ")), 0)

    def more(self) -> bool:
        """Return whether the count has grown since the last call, or since the start."""
        before, self.known = self.known, self.count()
        return self.known > before


def kill_counts(cgroup_file: str = "/proc/self/cgroup") -> list[str]:
    """Return the paths of files that may hold the counter, for both versions of control groups."""
    mine = f"{GROUPS}{own_group(cgroup_file)}"  # if this process sees the host's groups
    return [f"{mine}/memory.events", f"{GROUPS}/memory.events", f"{GROUPS}/memory/memory.oom_control"]


def own_group(cgroup_file: str) -> str:
    """Return the path of our control group (version 2) as seen from this process.

    It is empty in a cgroup namespace of our own, or if only version 1 is in use.
    """
    try:
        with open(cgroup_file) as file:
            return next((line[3:].strip().rstrip("/") for line in file if line.startswith("0::")), "")
    except FileNotFoundError:
        return ""


def kill_all() -> bool:
    """Kill every other process in the container. Return False if there is none."""
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def count_others() -> int:
    """Return the number of processes besides this one."""
    return sum(name.isdigit() for name in os.listdir("/proc")) - 1


def is_full(folder: str) -> bool:
    """Return whether the disk that holds a folder has no room left."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize < NO_ROOM


def prctl(option: int, value: int) -> None:
    """Set an option of this process."""
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
