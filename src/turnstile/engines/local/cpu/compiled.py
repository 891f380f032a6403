"""Small operations of sampling, compiled for this CPU where numba is installed.

Beside matrices that come from memory an operation of torch costs some eight microseconds, however little it computes,
and its attention of few queries reads keys and values at half the speed of memory. These kernels run in the team of
threads that torch computes with (`engines/local/cpu/thread_pool.py`). What they give for a token does not depend, to
the last bit, on what other tokens there are, nor on how many threads there are. Products are in
`engines/local/cpu/packed_matrix.py`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import importlib.util
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from turnstile.cache import cache_dir, file_lock
from turnstile.engines.local.cpu.kernel_args import AttendArgs, DrawArgs, WriteArgs
from turnstile.engines.local.cpu.processor import features
from turnstile.engines.local.cpu.thread_pool import has_torch_threads, in_torch_threads

_log = logging.getLogger(__name__)
T = TypeVar("T")

Part = tuple[Tensor, int, int]
"""Kept keys and values [L, 2, R, Hkv, capacity, D], one of their rows, and how many of its columns are seen."""

CHUNKS = 4
"""Into how many parts the attention of a pass is divided for each thread: few enough that tokens that see the same are
together, and so many that no thread has to wait for long."""

CHUNK = 64
"""Tasks of a part at most: what a thread has at hand for them must fit its cache."""


def can_compute(x: Tensor) -> bool:
    """Whether the kernels are made for numbers of this kind, and can be used."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and available()


@functools.cache
def available() -> bool:
    """Whether the kernels can be used here; what all models need of them is compiled by then."""
    if importlib.util.find_spec("numba") is None:
        _log.warning("sampling on this CPU is slower without numba; install it with: pip install 'turnstile-rl[cpu]'")
        return False
    if not has_torch_threads():
        _log.info("sampling goes without compiled kernels: torch does not compute with libgomp here")
        return False
    try:
        numba = importlib.import_module("numba")
    except (ImportError, SystemError) as error:  # it is made for certain Pythons and NumPys
        first = str(error).partition("\n")[0]
        why = f"{type(error).__name__}: {first}"
        _log.warning("numba is installed and of no use here, so that sampling on this CPU is slower (%s)", why)
        return False
    if numba.config.DISABLE_JIT:
        return False
    _compile(lambda: importlib.import_module("turnstile.engines.local.cpu.kernels"))
    return True


def _compile(make: Callable[[], T]) -> T:
    """Has numba compile. What a crash has left in its cache is removed, and compiled anew."""
    folder = _folder()
    with _cached_in(folder):
        try:
            return make()
        except Exception as error:
            broken = [file for file in folder.rglob("*.nb?") if file.is_file()]
            if not broken:
                raise
            _log.warning("the compiled kernels in %s are made anew: %s: %s", folder, type(error).__name__, error)
            for file in broken:
                file.unlink()
            return make()


@contextmanager
def _cached_in(folder: Path) -> Iterator[None]:
    """Inside, what numba compiles is kept there, by one process at a time: where two write to one place, the index that
    numba keeps may name one kernel and have the code of another."""
    from numba import config

    with file_lock(folder):
        config.reload_config()  # numba does so when it compiles, and would forget what is set here
        before, config.CACHE_DIR = config.CACHE_DIR, str(folder)
        try:
            yield
        finally:
            config.CACHE_DIR = before


@functools.cache
def _folder() -> Path:
    """Where these kernels are kept: in the user's cache, or for this process alone where that cannot be written. One
    folder for each wording of their source and each processor, which numba's own cache does not follow in all parts."""
    here = Path(__file__).parent
    source = b"".join(file.read_bytes() for file in (here / "kernel_args.py", *sorted((here / "kernels").glob("*.py"))))
    named = hashlib.sha256(source + " ".join(sorted(features())).encode()).hexdigest()[:16]
    folder = cache_dir() / "kernels" / named
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        _log.warning("kernels are compiled anew in every process: %s", error)
    return Path(_scratch().name) / "kernels"


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="turnstile-kernels-")


def run(kernel: str, work: ctypes.Structure, tasks: int, *made_for: int) -> None:
    """Runs a kernel on what it is told, in all threads; there is at least one task."""
    in_torch_threads(_address(kernel, *made_for), work)
    if work.taken < tasks:  # no thread got as far as its first: what goes wrong in there is printed, and not raised
        raise MemoryError(f"kernel {kernel} could not begin; see what it printed")


def kernels() -> ModuleType:
    """The module `engines.local.cpu.kernels`, which to import is to compile. Raises RuntimeError where they cannot be
    used."""
    if not available():
        raise RuntimeError("kernels cannot be used here; ask `available` first")
    return importlib.import_module("turnstile.engines.local.cpu.kernels")


@functools.cache
def _address(kernel: str, *made_for: int) -> int:
    named = getattr(kernels(), kernel)
    address: int = (_compile(lambda: named(*made_for)) if made_for else named).address
    return address


class Attention:
    """Attention of the first tokens of a run. Each sees a few parts of what is kept, and its own keys and values lie in
    the last column of the last of them."""

    def __init__(self, seen: Sequence[Sequence[Part]]) -> None:
        parts = [part for each in seen for part in each]
        self._kept = {id(kv): kv for kv, _, _ in parts}  # in memory for as long as their addresses are used
        self._layers, _, _, self._kv_heads, _, self._width = parts[0][0].shape
        for kv in self._kept.values():
            want(kv, "kept", (self._layers, 2, None, self._kv_heads, None, self._width))
            if kv.stride()[-2:] != (self._width, 1):
                raise ValueError(f"kept: columns of {self._width} numbers lie {kv.stride()[-2:]} apart")
        begins = {key: (kv.data_ptr(), [step * kv.itemsize for step in kv.stride()]) for key, kv in self._kept.items()}
        table = []  # as of `kernels/attention.py::PART`
        for kv, row, columns in parts:
            address, (layer, values, rows, head, *_) = begins[id(kv)]
            table.append((address + row * rows, values, layer, head, columns))
        self._parts = np.array(table, dtype=np.int64)
        self._first = np.array([0, *map(len, seen)], dtype=np.int64).cumsum()
        begun = self._parts[self._first[:-1]]
        self._order = np.lexsort((begun[:, -1], begun[:, 0])).astype(np.int64)  # those that begin alike, side by side
        self.count = len(seen)
        known = {"tokens": self.count, "kv_heads": self._kv_heads}
        known |= {"first": self._first.ctypes.data, "parts": self._parts.ctypes.data}
        self._write = WriteArgs(**known, width=self._width)
        self._attend = AttendArgs(**known, order=self._order.ctypes.data)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Keeps what the tokens have of key and value [1, Hkv, T, D]."""
        self._check(layer, key, self._kv_heads)
        self._check(layer, value, self._kv_heads)
        work = self._write
        work.taken, work.layer = 0, layer
        key, work.keys, work.keys_head, work.keys_token = _of_heads(key)
        value, work.values, work.values_head, work.values_token = _of_heads(value)
        run("write", work, self.count)

    def attend(self, layer: int, query: Tensor, scale: float) -> Tensor:
        """query [1, Hq, T, D] -> what they see [n, Hq, D]."""
        heads = query.shape[1] // self._kv_heads
        self._check(layer, query, heads * self._kv_heads)
        work, tasks = self._attend, self.count * self._kv_heads
        out = query.new_empty(self.count, query.shape[1], self._width)
        work.taken, work.layer, work.scale, work.out = 0, layer, scale, out.data_ptr()
        work.chunk = min(-(-tasks // (CHUNKS * torch.get_num_threads())), CHUNK)
        query, work.query, work.query_head, work.query_token = _of_heads(query)
        run("attend", work, tasks, heads, self._width)
        return out

    def _check(self, layer: int, x: Tensor, heads: int) -> None:
        want(x, f"for layer {layer} of {self._layers}", (1, heads, None, self._width))
        if not 0 <= layer < self._layers or x.shape[2] < self.count:
            raise ValueError(f"{x.shape[2]} tokens for layer {layer}: {self.count} are kept, of {self._layers} layers")


def draw(
    logits: Tensor, rows: Sequence[int], draws: Sequence[float], temperature: float
) -> list[tuple[int, float, float]]:
    """For each of some rows of logits [R, V]: a token drawn by a number in [0, 1) at a temperature, by inversion, its
    log-probability, and the entropy, which is NaN where logits are not finite."""
    want(logits, "to draw from", (None, None))
    if len(rows) == 0:
        return []
    logits = logits.contiguous()
    chosen, numbers = np.array(rows, dtype=np.int64), np.array(draws, dtype=np.float64)
    if len(chosen) != len(numbers) or not 0 <= chosen.min() <= chosen.max() < len(logits):
        raise ValueError(f"{len(numbers)} draws from rows {rows} of {len(logits)}")
    tokens, found = np.empty(len(chosen), np.int64), np.empty((len(chosen), 2))
    work = DrawArgs(count=len(chosen), vocabulary=logits.shape[1], logits=logits.data_ptr(), cooling=1 / temperature)
    work.row = logits.stride(0) * logits.itemsize
    work.rows, work.draws = chosen.ctypes.data, numbers.ctypes.data
    work.tokens, work.found = tokens.ctypes.data, found.ctypes.data
    run("draw", work, len(chosen))
    logprobs, entropies = found.T.tolist()
    return list(zip(tokens.tolist(), logprobs, entropies, strict=True))


def _of_heads(x: Tensor) -> tuple[Tensor, int, int, int]:
    """x [1, heads, T, D] with what a head of a token has side by side: its address, and the bytes from one head to the
    next and from one token to the next."""
    if x.stride(3) != 1:
        x = x.contiguous()
    return x, x.data_ptr(), x.stride(1) * x.itemsize, x.stride(2) * x.itemsize


def want(x: Tensor, what: str, shape: Sequence[int | None]) -> None:
    """Kernels see addresses alone, and would read and write whatever is there."""
    given, fits = x.shape, x.dtype is torch.float32 and x.is_cpu and x.dim() == len(shape)
    for wanted, n in zip(shape, given, strict=False):  # no generator: this is asked some hundred times a pass
        fits = fits and (wanted is None or wanted == n)
    if not fits:
        raise ValueError(
            f"{what}: {x.dtype} {tuple(x.shape)} on {x.device}; kernels want torch.float32 {tuple(shape)} on a cpu"
        )
