"""What went wrong while sampling: the machine's doing, or a fault of the program."""

from __future__ import annotations

import re

import torch

from turnstile.errors import EngineError

FAILURES = (
    torch.OutOfMemoryError,
    getattr(torch, "AcceleratorError", torch.OutOfMemoryError),  # not in every version
    MemoryError,
    FloatingPointError,
    OSError,
)
DEVICE = re.compile(r"\b(CUDA|cuDNN|HIP|MPS)\b.* (error|out of memory)\b|\bDefaultCPUAllocator\b")
"""What torch's plain RuntimeErrors say that are a device's: of the libraries it calls, and of the CPU's memory."""


def failure(error: Exception) -> Exception:
    """What those who wait are told. What the device or the numbers did is the engine's failure, and may be tried
    again; anything else, like shapes that do not fit, is a fault of the program and stays what it is."""
    device = type(error) is RuntimeError and DEVICE.search(str(error))
    if not device and not isinstance(error, FAILURES):
        return error
    failed = EngineError(f"sampling failed: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed
