"""What compiled kernels are told: one structure each.

Addresses and distances are in bytes. `taken` counts the tasks that threads have taken; it comes first, and is 0 before.
"""

from __future__ import annotations

import ctypes


def _integers(*names: str) -> list[tuple[str, type[ctypes.c_int64]]]:
    return [(name, ctypes.c_int64) for name in names]


class AttendArgs(ctypes.Structure):
    """Arguments of the kernel that attends."""

    _fields_ = (
        *_integers("taken", "chunk", "layer", "tokens", "kv_heads", "order", "first", "parts"),
        *_integers("query", "query_token", "query_head", "out"),
        ("scale", ctypes.c_float),
    )


class WriteArgs(ctypes.Structure):
    """Arguments of the kernel that writes keys and values into the cache."""

    _fields_ = (
        *_integers("taken", "layer", "tokens", "kv_heads", "width", "first", "parts"),
        *_integers("keys", "keys_token", "keys_head", "values", "values_token", "values_head"),
    )


class ProductArgs(ctypes.Structure):
    """Arguments of the kernel that multiplies by a packed matrix."""

    _fields_ = (
        *_integers("taken", "chunk", "rows", "depth", "width", "sides", "given", "matrix", "bias", "added", "out"),
        ("floor", ctypes.c_float),
    )


class PackArgs(ctypes.Structure):
    """Arguments of the kernel that packs a matrix."""

    _fields_ = (*_integers("taken", "depth", "width", "sides", "rows", "scale", "out"),)


class DrawArgs(ctypes.Structure):
    """Arguments of the kernel that draws tokens."""

    _fields_ = (
        *_integers("taken", "count", "vocabulary", "logits", "row", "rows", "draws", "tokens", "found"),
        ("cooling", ctypes.c_float),
    )
