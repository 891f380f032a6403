"""Distinguish failures of the machine from bugs in the program."""

from __future__ import annotations

import re

import torch

from turnstile.errors import EngineError

ENGINE_ERRORS = (
    torch.OutOfMemoryError,
    getattr(torch, "AcceleratorError", torch.OutOfMemoryError),  # not in every version
    MemoryError,
    FloatingPointError,
    OSError,
)
DEVICE_MESSAGE = re.compile(r"\b(CUDA|cuDNN|HIP|MPS)\b.* (error|out of memory)\b|\bDefaultCPUAllocator\b")
"""Matches messages of plain RuntimeErrors of torch that come from a device's libraries or the CPU's allocator."""


def as_engine_error(error: Exception) -> Exception:
    """Return the error that waiting requests receive.

    A failure of the device, of memory or of the numerics becomes an EngineError, so that the attempt is retried. Every
    other error, such as a shape mismatch, is a bug and is returned as it is.
    """
    device = type(error) is RuntimeError and DEVICE_MESSAGE.search(str(error))
    if not device and not isinstance(error, ENGINE_ERRORS):
        return error
    wrapped = EngineError(f"sampling failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
