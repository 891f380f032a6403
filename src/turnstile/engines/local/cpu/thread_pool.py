"""Keep one OpenMP thread pool active at a time.

libgomp keeps a pool for each thread that has ever computed in parallel. The pool's threads spin while they wait for
work, as long as all pools together have no more threads than there are processors; otherwise they sleep, and every
operation has to wake them. With an engine that computes in one thread and a trainer in another, that took a fifth of a
rollout's time. So a thread that has nothing to compute for now releases its pool, and the other computes alone.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

_SOFT = 1  # omp_pause_soft: keeps the settings


def in_torch_threads(function: int, args: ctypes.Structure) -> None:
    """Call the C function `void (void *)` at address `function` in all threads of torch's pool at once.

    Each call gets the address of `args`. `has_torch_threads` must be true.
    """
    runtime = _runtime_of_torch()
    assert runtime is not None, "there is no thread pool"
    runtime.GOMP_parallel(function, ctypes.addressof(args), torch.get_num_threads(), 0)


def has_torch_threads() -> bool:
    """Return whether functions can run in torch's threads, which must be those of libgomp on Linux."""
    return _runtime_of_torch() is not None


def release_torch_threads() -> None:
    """Stop the calling thread's OpenMP workers; they restart at its next parallel region.

    Without libgomp or outside Linux this does nothing.
    """
    for runtime in _runtimes():
        runtime.omp_pause_resource_all(_SOFT)


@functools.cache
def _runtime_of_torch() -> ctypes.CDLL | None:
    """Return the libgomp that torch bundles, or else the only one in the process; None if there is no such one.

    Any other libgomp would start a second pool, which spins beside torch's.
    """
    home = Path(torch.__file__).parent
    homes = (home / "lib", home.with_name("torch.libs"))
    bundled = {str(path.resolve()) for folder in homes for path in folder.glob("libgomp*")}
    libraries = [runtime for runtime in _runtimes() if runtime._name in bundled] or _runtimes()
    if len(libraries) != 1:
        return None
    libraries[0].GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    libraries[0].GOMP_parallel.restype = None
    return libraries[0]


@functools.cache
def _runtimes() -> list[ctypes.CDLL]:
    """Return the libgomps loaded in this process; torch usually brings its own."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux: pools stay as they are
        return []
    libraries = []
    for path in sorted({line.split(maxsplit=5)[5] for line in lines if "/libgomp" in line}):
        try:
            libraries.append(ctypes.CDLL(path))
        except OSError:  # the file was replaced meanwhile
            continue
    return [runtime for runtime in libraries if hasattr(runtime, "omp_pause_resource_all")]
