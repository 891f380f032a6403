"""What the processor at hand can do: what kernels are made for, and kept by."""

from __future__ import annotations

import functools


@functools.cache
def features() -> frozenset[str]:
    """By the names of LLVM; none where it cannot tell. Wants numba."""
    from llvmlite import binding

    try:
        known = binding.get_host_cpu_features()
    except RuntimeError:
        return frozenset()
    return frozenset(name for name, has in known.items() if has)
