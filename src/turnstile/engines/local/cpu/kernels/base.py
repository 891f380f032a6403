"""What kernels are made of: how they are compiled, and what numba has no word for.

Every member of a team of threads runs a kernel at the same time as the others; they take their tasks from a counter
that they share.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, from_dtype, njit, types
from numba.extending import intrinsic

LINE = 64
"""Bytes that come from memory together."""

# NaN and infinity are what they are: a policy that has lost its numbers must not sample as if it had not.
EXACT = {"reassoc", "contract", "arcp", "nsz"}
# Helpers become part of the kernel that calls them. Where they were called, the linker would take the one that was
# compiled first in this process, by itself or for another kernel: its sums may be rounded otherwise, so that a process
# that compiles would not compute what one that loads does.
_made_by = {"error_model": "numpy", "cache": True, "forceinline": True}
compiled = njit(fastmath=EXACT, **_made_by)


def kernel_of(work: type) -> Any:
    """Compiles a function of one work, given by address."""
    signature = types.void(types.CPointer(from_dtype(np.dtype(work))))
    return cfunc(signature, fastmath=EXACT, error_model="numpy", cache=True)


def _numbers(kind: Any) -> Any:
    """What finds the numbers of a kind that begin at an address."""

    @intrinsic
    def found(context: Any, address: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), code

    return found


floats, doubles, integers = _numbers(types.float32), _numbers(types.float64), _numbers(types.int64)


@compiled
def address_of(x: Any) -> Any:
    """Where an array begins, as i64: beside numbers of that kind numba would make one of its own kind a float."""
    return np.int64(x.ctypes.data)


@intrinsic
def take(context: Any, work: Any, count: Any) -> Any:
    """Adds to the first number of a work, which counts what is taken; what it was before. No two threads get the
    same."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        counter = builder.bitcast(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, arguments[1], "monotonic")

    return types.int64(work, types.int64), code


def code_of_fetch(builder: Any, address: Any) -> None:
    """Asks for the memory at an address, and does not wait for it. There need be none."""
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    prefetch = builder.module.declare_intrinsic(
        "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    )
    read, second_cache, data = ir.Constant(number, 0), ir.Constant(number, 2), ir.Constant(number, 1)
    builder.call(prefetch, [builder.inttoptr(address, byte), read, second_cache, data])


@intrinsic
def fetch(context: Any, address: Any) -> Any:
    """As `code_of_fetch`."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code_of_fetch(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), code


LEAST = np.float32(-87)
"""Below this e^x is nothing."""


@compiled
def exp(x: Any) -> Any:
    """e^x for x <= 0, to 2e-7 of it: 2^n by its bits, and a polynomial for what is left."""
    inside = x if x >= LEAST else LEAST  # NaN does not get as far as an integer
    n = np.floor(inside * np.float32(1.44269504) + np.float32(0.5))
    r = inside - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1 / 720) + r * np.float32(1 / 5040)
    p = np.float32(1 / 24) + r * (np.float32(1 / 120) + r * p)
    p = np.float32(1 / 2) + r * (np.float32(1 / 6) + r * p)
    p = np.float32(1) + r * (np.float32(1) + r * p)
    p *= np.int32((np.int32(n) + 127) << 23).view(np.float32)
    below = np.float32(0) if x < LEAST else x
    return p if x >= LEAST else below


@njit(fastmath={*EXACT, "nnan"}, **_made_by)  # else it goes one by one
def highest_of(scores: Any) -> Any:
    """Of scores f32[n]. Of those that hold NaN it is any number, and they stay what they are."""
    highest = scores[0]
    for column in range(1, len(scores)):
        highest = max(highest, scores[column])
    return highest
