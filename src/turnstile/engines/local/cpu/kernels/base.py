"""Building blocks of kernels: compilation, and operations that numba does not offer.

All threads of a pool run a kernel at the same time; they take their tasks from a shared counter.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, from_dtype, njit, types
from numba.extending import intrinsic

LINE = 64
"""Bytes of a cache line."""

# NaN and infinity must survive: a diverged policy must not sample as if it were sound.
EXACT = {"reassoc", "contract", "arcp", "nsz"}
# Helpers are inlined into their kernel. If they were called, the linker would take the copy that was compiled first
# in this process, alone or for another kernel, whose sums may round differently, so that a process that compiles would
# not compute what a process that loads does.
_COMPILE_OPTIONS = {"error_model": "numpy", "cache": True, "forceinline": True}
compiled = njit(fastmath=EXACT, **_COMPILE_OPTIONS)


def kernel_of(args: type) -> Any:
    """Return a decorator that compiles a kernel, a function of the address of one `args` structure."""
    signature = types.void(types.CPointer(from_dtype(np.dtype(args))))
    return cfunc(signature, fastmath=EXACT, error_model="numpy", cache=True)


def _make_pointer_cast(kind: Any) -> Any:
    """Return the intrinsic that converts an address to a pointer to elements of this type."""

    @intrinsic
    def to_pointer(context: Any, address: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), code

    return to_pointer


floats, doubles, integers = (
    _make_pointer_cast(types.float32),
    _make_pointer_cast(types.float64),
    _make_pointer_cast(types.int64),
)


@compiled
def address_of(x: Any) -> Any:
    """Return the address of an array as i64, since numba would convert it to a float in sums with other integers."""
    return np.int64(x.ctypes.data)


@intrinsic
def take(context: Any, args: Any, count: Any) -> Any:
    """Atomically add `count` to the first field of an argument structure, and return its previous value.

    No two threads get the same value.
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        counter = builder.bitcast(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, arguments[1], "monotonic")

    return types.int64(args, types.int64), code


def emit_prefetch(builder: Any, address: Any) -> None:
    """Emit a prefetch of the memory at an address, which need not be mapped."""
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    prefetch = builder.module.declare_intrinsic(
        "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    )
    read, second_cache, data = ir.Constant(number, 0), ir.Constant(number, 2), ir.Constant(number, 1)
    builder.call(prefetch, [builder.inttoptr(address, byte), read, second_cache, data])


@intrinsic
def fetch(context: Any, address: Any) -> Any:
    """Prefetch the memory at an address."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit_prefetch(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), code


EXP_UNDERFLOW = np.float32(-87)
"""Below this, e^x counts as 0."""


@compiled
def exp(x: Any) -> Any:
    """Return e^x for x <= 0 to a relative error of 2e-7: 2^n by its bits, and a polynomial for the rest."""
    clamped = x if x >= EXP_UNDERFLOW else EXP_UNDERFLOW  # keeps NaN out of the integer conversion
    n = np.floor(clamped * np.float32(1.44269504) + np.float32(0.5))
    r = clamped - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1 / 720) + r * np.float32(1 / 5040)
    p = np.float32(1 / 24) + r * (np.float32(1 / 120) + r * p)
    p = np.float32(1 / 2) + r * (np.float32(1 / 6) + r * p)
    p = np.float32(1) + r * (np.float32(1) + r * p)
    p *= np.int32((np.int32(n) + 127) << 23).view(np.float32)
    below = np.float32(0) if x < EXP_UNDERFLOW else x
    return p if x >= EXP_UNDERFLOW else below


@njit(fastmath={*EXACT, "nnan"}, **_COMPILE_OPTIONS)  # otherwise the loop is not vectorised
def highest_of(scores: Any) -> Any:
    """Return the maximum of scores f32[n]; any number if there is a NaN among them."""
    highest = scores[0]
    for column in range(1, len(scores)):
        highest = max(highest, scores[column])
    return highest
