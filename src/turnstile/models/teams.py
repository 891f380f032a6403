"""One team of OpenMP threads at a time.

libgomp keeps a team for each thread that ever computed in parallel. Its threads spin while they wait for work, as long
as all teams together have no more of them than there are processors; else they sleep, and every operation has to wake
them. Where an engine computes in a thread beside the one that plans and trains, that was a fifth of a rollout's time.
So whoever is done for now leaves its team, and the next to compute is alone.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

_SOFT = 1  # omp_pause_soft: settings stay


def leave_team() -> None:
    """Ends the threads that help the calling one to compute; they come back when it computes. Elsewhere than with
    libgomp on Linux this does nothing."""
    for runtime in _runtimes():
        runtime.omp_pause_resource_all(_SOFT)


@functools.cache
def _runtimes() -> list[ctypes.CDLL]:
    """The libgomps of this process: torch brings its own."""
    found: list[ctypes.CDLL] = []
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        paths = {line.split(maxsplit=5)[5] for line in lines if "/libgomp" in line}
        found = [ctypes.CDLL(path) for path in sorted(paths)]
    except OSError:  # no Linux, or a file that was replaced since: then teams stay, and cost what they cost
        pass
    return [runtime for runtime in found if hasattr(runtime, "omp_pause_resource_all")]
