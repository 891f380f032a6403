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

import torch

_SOFT = 1  # omp_pause_soft: settings stay


def in_team(function: int, given: ctypes.Structure) -> None:
    """Calls the C function `void (void *)` at an address in all threads of torch's team at once, in each with the
    address of what is given. Elsewhere than with libgomp on Linux the calling thread is alone."""
    if runtime := _runtime_of_torch():
        runtime.GOMP_parallel(function, ctypes.addressof(given), torch.get_num_threads(), 0)
    else:
        _FUNCTION(function)(ctypes.addressof(given))


def leave_team() -> None:
    """Ends the threads that help the calling one to compute; they come back when it computes. Elsewhere than with
    libgomp on Linux this does nothing."""
    for runtime in _runtimes():
        runtime.omp_pause_resource_all(_SOFT)


_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@functools.cache
def _runtime_of_torch() -> ctypes.CDLL | None:
    """The libgomp that lies beside torch, or else any: one of which torch has no threads would do, more slowly."""
    home = str(Path(torch.__file__).parent)
    found = sorted(_runtimes(), key=lambda runtime: not runtime._name.startswith(home))
    for runtime in found:
        runtime.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        runtime.GOMP_parallel.restype = None
    return found[0] if found else None


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
