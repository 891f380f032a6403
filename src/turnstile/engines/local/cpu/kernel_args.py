"""Argument structures of the compiled kernels, one for each kernel.

Arrays are given by address, and strides are in bytes. `taken` counts the tasks that threads have taken; it is the first
field, and starts at 0.
"""

from __future__ import annotations

import ctypes


def _integers(*names: str) -> list[tuple[str, type[ctypes.c_int64]]]:
    return [(name, ctypes.c_int64) for name in names]


class AttendArgs(ctypes.Structure):
    """Arguments of `kernels.attend`."""

    _fields_ = (
        *_integers("taken", "chunk", "layer", "tokens", "kv_heads", "order", "first", "segments"),
        *_integers("query", "query_token", "query_head", "out"),
        ("scale", ctypes.c_float),
    )


class WriteArgs(ctypes.Structure):
    """Arguments of `kernels.write`."""

    _fields_ = (
        *_integers("taken", "layer", "tokens", "kv_heads", "width", "first", "segments"),
        *_integers("keys", "keys_token", "keys_head", "values", "values_token", "values_head"),
    )


class ProductArgs(ctypes.Structure):
    """Arguments of `kernels.product`."""

    _fields_ = (
        *_integers("taken", "chunk", "rows", "depth", "width", "halves", "inputs", "matrix", "bias", "residual", "out"),
        ("norm_floor", ctypes.c_float),
    )


class PackArgs(ctypes.Structure):
    """Arguments of `kernels.pack`."""

    _fields_ = (*_integers("taken", "depth", "width", "halves", "rows", "scale", "out"),)


class DrawArgs(ctypes.Structure):
    """Arguments of `kernels.draw`."""

    _fields_ = (
        *_integers("taken", "count", "vocabulary", "logits", "row", "rows", "draws", "tokens", "stats"),
        ("inverse_temperature", ctypes.c_float),
    )
