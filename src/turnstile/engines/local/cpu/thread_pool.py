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


def in_torch_threads(function: int, given: ctypes.Structure) -> None:
    """Calls the C function `void (void *)` at an address in all threads of torch's team at once, in each with the
    address of what is given. Ask `has_torch_threads` first."""
    runtime = _runtime_of_torch()
    assert runtime is not None, "there is no team"
    runtime.GOMP_parallel(function, ctypes.addressof(given), torch.get_num_threads(), 0)


def has_torch_threads() -> bool:
    """Whether work can be given to torch's threads: they are libgomp's, on Linux."""
    return _runtime_of_torch() is not None


def leave_torch_threads() -> None:
    """Ends the threads that help the calling one to compute; they come back when it computes. Elsewhere than with
    libgomp on Linux this does nothing."""
    for runtime in _runtimes():
        runtime.omp_pause_resource_all(_SOFT)


@functools.cache
def _runtime_of_torch() -> ctypes.CDLL | None:
    """The libgomp that lies with torch; elsewhere the only one there is. With another than torch's own there would be a
    second team, which spins beside torch's."""
    home = Path(torch.__file__).parent
    homes = (home / "lib", home.with_name("torch.libs"))
    own = {str(path.resolve()) for folder in homes for path in folder.glob("libgomp*")}
    found = [runtime for runtime in _runtimes() if runtime._name in own] or _runtimes()
    if len(found) != 1:
        return None
    found[0].GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    found[0].GOMP_parallel.restype = None
    return found[0]


@functools.cache
def _runtimes() -> list[ctypes.CDLL]:
    """The libgomps of this process: torch brings its own."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # no Linux: then teams stay, and cost what they cost
        return []
    found = []
    for path in sorted({line.split(maxsplit=5)[5] for line in lines if "/libgomp" in line}):
        try:
            found.append(ctypes.CDLL(path))
        except OSError:  # a file that was replaced since
            continue
    return [runtime for runtime in found if hasattr(runtime, "omp_pause_resource_all")]
