"""Small operations of sampling, compiled for this CPU where numba is installed.

Beside matrices that come from memory an operation of torch costs some eight microseconds, however little it computes,
and its attention of few queries reads keys and values at half the speed of memory. These kernels run in the team of
threads that torch computes with (`models/teams.py`). What they give for a token does not depend, to the last bit, on
what other tokens there are, nor on how many threads there are.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from turnstile.models.teams import in_team

_log = logging.getLogger(__name__)

Part = tuple[Tensor, int, int]
"""Kept keys and values [L, 2, R, Hkv, capacity, D], one of their rows, and how many of its columns are seen."""


@functools.cache
def available() -> bool:
    """Whether the kernels can be used here."""
    if importlib.util.find_spec("numba") is None:
        return False
    try:
        importlib.import_module("turnstile.models.kernels")
    except Exception as error:  # numba is made for certain Pythons and NumPys, and says so in many ways
        first = str(error).partition("\n")[0]
        why = f"{type(error).__name__}: {first}"
        _log.warning("numba is installed and of no use here, so that sampling on this CPU is slower (%s)", why)
        return False
    return True


def can_compute(x: Tensor) -> bool:
    """Whether the kernels are made for numbers of this kind, and can be used."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and available()


def _integers(*names: str) -> list[tuple[str, type[ctypes.c_int64]]]:
    return [(name, ctypes.c_int64) for name in names]


class AttendWork(ctypes.Structure):
    """For `kernels.attend`. Distances (`..._token`, `..._head`) are in bytes, what is not a number is an address."""

    _fields_ = (
        *_integers("taken", "chunk", "layer", "tokens", "kv_heads", "heads", "width", "most"),
        *_integers("query", "query_token", "query_head", "first", "parts", "out"),
        ("scale", ctypes.c_float),
    )


class WriteWork(ctypes.Structure):
    """For `kernels.write`, in the same way."""

    _fields_ = (
        *_integers("taken", "layer", "tokens", "kv_heads", "width", "first", "parts"),
        *_integers("keys", "keys_token", "keys_head", "values", "values_token", "values_head"),
    )


class ShortenWork(ctypes.Structure):
    """For `kernels.shorten`, in the same way."""

    _fields_ = tuple(_integers("taken", "rows", "width", "given", "floor", "out"))


class DrawWork(ctypes.Structure):
    """For `kernels.draw`, in the same way."""

    _fields_ = (
        *_integers("taken", "count", "vocabulary", "logits", "row", "rows", "draws", "tokens", "found"),
        ("cooling", ctypes.c_float),
    )


class Attention:
    """Attention of the first tokens of a run. Each sees a few parts of what is kept, and its own keys and values lie in
    the last column of the last of them."""

    def __init__(self, seen: Sequence[Sequence[Part]]) -> None:
        parts = [part for each in seen for part in each]
        self._kept = {id(kv): kv for kv, _, _ in parts}  # in memory for as long as their addresses are used
        begins = {key: (kv.data_ptr(), [step * kv.itemsize for step in kv.stride()]) for key, kv in self._kept.items()}
        table = []  # as of `kernels.PART`
        for kv, row, columns in parts:
            address, (layer, values, rows, head, *_) = begins[id(kv)]
            table.append((address + row * rows, values, layer, head, columns))
        self._parts = np.array(table, dtype=np.int64)
        self._first = np.array([0, *map(len, seen)], dtype=np.int64).cumsum()
        self.count, (kv_heads, _, width) = len(seen), parts[0][0].shape[3:]
        known = {"tokens": self.count, "kv_heads": kv_heads, "width": width}
        known |= {"first": self._first.ctypes.data, "parts": self._parts.ctypes.data}
        self._write = WriteWork(**known)
        self._attend = AttendWork(**known, most=max(sum(columns for _, _, columns in each) for each in seen))

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Keeps what the tokens have of key and value [1, Hkv, T, D]."""
        work = self._write
        work.taken, work.layer = 0, layer
        key, work.keys, work.keys_head, work.keys_token = _of_heads(key)
        value, work.values, work.values_head, work.values_token = _of_heads(value)
        _run("write", work)

    def attend(self, layer: int, query: Tensor, scale: float) -> Tensor:
        """query [1, Hq, T, D] -> what they see [n, Hq, D]."""
        work = self._attend
        out = query.new_empty(self.count, query.shape[1], query.shape[3])
        work.taken, work.layer, work.scale, work.out = 0, layer, scale, out.data_ptr()
        work.heads = query.shape[1] // work.kv_heads
        work.chunk = 1 + self.count * work.kv_heads // (CHUNKS * torch.get_num_threads())
        query, work.query, work.query_head, work.query_token = _of_heads(query)
        from turnstile.models import kernels

        in_team(kernels.attend(work.heads, work.width), work)
        return out


CHUNKS = 16
"""Into how many parts the attention of a pass is divided for each thread: they take one after the other, and none has
to wait for long."""


def of_length_one(x: Tensor, floor: Tensor) -> Tensor:
    """x [T, H], each row divided by its length; by a little more where that is hardly above floor []."""
    x = x.contiguous()
    out = torch.empty_like(x)
    rows, width = x.shape
    work = ShortenWork(rows=rows, width=width, given=x.data_ptr(), floor=floor.data_ptr(), out=out.data_ptr())
    _run("shorten", work)
    return out


def draw(
    logits: Tensor, rows: Sequence[int], draws: Sequence[float], temperature: float
) -> list[tuple[int, float, float]]:
    """For each of some rows of logits [R, V]: a token drawn by a number in [0, 1) at a temperature, by inversion, its
    log-probability, and the entropy, which is NaN where logits are not finite."""
    logits = logits.contiguous()
    chosen, numbers = np.array(rows, dtype=np.int64), np.array(draws, dtype=np.float64)
    tokens, found = np.empty(len(rows), np.int64), np.empty((len(rows), 2))
    work = DrawWork(count=len(rows), vocabulary=logits.shape[1], logits=logits.data_ptr(), cooling=1 / temperature)
    work.row = logits.stride(0) * logits.itemsize
    work.rows, work.draws = chosen.ctypes.data, numbers.ctypes.data
    work.tokens, work.found = tokens.ctypes.data, found.ctypes.data
    _run("draw", work)
    logprobs, entropies = found.T.tolist()
    return list(zip(tokens.tolist(), logprobs, entropies, strict=True))


def _of_heads(x: Tensor) -> tuple[Tensor, int, int, int]:
    """x [1, heads, T, D] with what a head of a token has side by side: its address, and the bytes from one head to the
    next and from one token to the next."""
    if x.stride(3) != 1:
        x = x.contiguous()
    return x, x.data_ptr(), x.stride(1) * x.itemsize, x.stride(2) * x.itemsize


def _run(kernel: str, work: ctypes.Structure) -> None:
    in_team(_address(kernel), work)


@functools.cache
def _address(kernel: str) -> int:
    from turnstile.models import kernels

    address: int = getattr(kernels, kernel).address
    return address
