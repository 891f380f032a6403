"""Features of this processor, for which kernels are compiled and which are part of their cache's key."""

from __future__ import annotations

import functools


@functools.cache
def cpu_features() -> frozenset[str]:
    """Return this CPU's features by LLVM's names; none if LLVM cannot tell. Needs numba."""
    from llvmlite import binding

    try:
        available = binding.get_host_cpu_features()
    except RuntimeError:
        return frozenset()
    return frozenset(name for name, has in available.items() if has)
