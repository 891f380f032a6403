"""Small operations of sampling, compiled for this CPU if numba is installed.

While weights stream from memory, an operation of torch costs about eight microseconds however little it computes, and
torch's attention of few queries reads keys and values at half the memory bandwidth. These kernels run in the thread
pool that torch computes with (`engines/local/cpu/thread_pool.py`). What they compute for a token does not depend, to
the last bit, on the other tokens or on the number of threads. Matrix products are in
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
from turnstile.engines.local.cpu.processor import cpu_features
from turnstile.engines.local.cpu.thread_pool import has_torch_threads, in_torch_threads

_log = logging.getLogger(__name__)
T = TypeVar("T")

CacheSegment = tuple[Tensor, int, int]
"""Cached keys and values [L, 2, R, Hkv, capacity, D], one of their rows, and how many of its columns are seen."""

CHUNKS_PER_THREAD = 4
"""Number of parts per thread into which the attention of a pass is divided.

They are few enough that tokens that see the same segment stay together, and many enough that no thread waits for long.
"""

MAX_CHUNK = 64
"""Most tasks of a part, since a thread's buffers for them must fit its cache."""


def can_compute(x: Tensor) -> bool:
    """Return whether the kernels support this tensor's dtype and device, and are available."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and is_available()


@functools.cache
def is_available() -> bool:
    """Return whether the kernels can be used. If so, those that all models need are compiled by then."""
    if importlib.util.find_spec("numba") is None:
        _log.warning("sampling on this CPU is slower without numba; install it with: pip install 'turnstile-rl[cpu]'")
        return False
    if not has_torch_threads():
        _log.info("sampling runs without compiled kernels: torch does not compute with libgomp here")
        return False
    try:
        numba = importlib.import_module("numba")
    except (ImportError, SystemError) as error:  # numba supports certain versions of Python and NumPy only
        first = str(error).partition("\n")[0]
        why = f"{type(error).__name__}: {first}"
        _log.warning("numba is installed but does not work here, so sampling on this CPU is slower (%s)", why)
        return False
    if numba.config.DISABLE_JIT:
        return False
    _compile(lambda: importlib.import_module("turnstile.engines.local.cpu.kernels"))
    return True


def _compile(make: Callable[[], T]) -> T:
    """Return the result of `make`, which compiles with numba.

    If that fails, remove the cached kernels, which a crash may have corrupted, and try again.
    """
    folder = _cache_folder()
    with _numba_caching_in(folder):
        try:
            return make()
        except Exception as error:
            broken = [file for file in folder.rglob("*.nb?") if file.is_file()]
            if not broken:
                raise
            _log.warning("recompiling the kernels in %s: %s: %s", folder, type(error).__name__, error)
            for file in broken:
                file.unlink()
            return make()


@contextmanager
def _numba_caching_in(folder: Path) -> Iterator[None]:
    """Make numba cache in `folder` what it compiles inside, one process at a time.

    If two processes wrote to one folder, numba's index might name one kernel and point to the code of another.
    """
    from numba import config

    with file_lock(folder):
        config.reload_config()  # numba reloads when it compiles, which would undo the setting below
        before, config.CACHE_DIR = config.CACHE_DIR, str(folder)
        try:
            yield
        finally:
            config.CACHE_DIR = before


@functools.cache
def _cache_folder() -> Path:
    """Return the folder for compiled kernels: in the user's cache, or temporary if that is not writable.

    There is one folder for each version of the kernels' source and each kind of processor, neither of which numba's own
    cache tracks completely.
    """
    here = Path(__file__).parent
    source = b"".join(file.read_bytes() for file in (here / "kernel_args.py", *sorted((here / "kernels").glob("*.py"))))
    digest = hashlib.sha256(source + " ".join(sorted(cpu_features())).encode()).hexdigest()[:16]
    folder = cache_dir() / "kernels" / digest
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        _log.warning("kernels are compiled again in every process: %s", error)
    return Path(_scratch().name) / "kernels"


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="turnstile-kernels-")


def run_kernel(kernel: str, args: ctypes.Structure, tasks: int, *constants: int) -> None:
    """Run a kernel with its arguments in all threads, which share its `tasks`; there must be at least one.

    `constants` are the arguments of the function that makes the kernel, if there is such a function. Raises MemoryError
    if no thread reached its first task.
    """
    in_torch_threads(_address(kernel, *constants), args)
    if args.taken < tasks:  # no thread reached its first task: errors in a kernel are printed, not raised
        raise MemoryError(f"kernel {kernel} could not start; see the error that it printed")


def load_kernels() -> ModuleType:
    """Return the module `engines.local.cpu.kernels`, which is compiled on import.

    Raises RuntimeError if the kernels are not available.
    """
    if not is_available():
        raise RuntimeError("kernels are not available here; call `is_available` first")
    return importlib.import_module("turnstile.engines.local.cpu.kernels")


@functools.cache
def _address(kernel: str, *constants: int) -> int:
    function = getattr(load_kernels(), kernel)
    address: int = (_compile(lambda: function(*constants)) if constants else function).address
    return address


class KernelAttention:
    """Attention of the first n tokens of a run.

    Each token sees a few segments of the cache; its own key and value belong in the last column of its last segment.
    """

    def __init__(self, seen: Sequence[Sequence[CacheSegment]]) -> None:
        segments = [segment for token_segments in seen for segment in token_segments]
        self._caches = {id(kv): kv for kv, _, _ in segments}  # keeps the tensors alive while their addresses are used
        self._layers, _, _, self._kv_heads, _, self._width = segments[0][0].shape
        for kv in self._caches.values():
            check_tensor(kv, "cached", (self._layers, 2, None, self._kv_heads, None, self._width))
            if kv.stride()[-2:] != (self._width, 1):
                raise ValueError(f"cached: columns of {self._width} numbers have strides {kv.stride()[-2:]}")
        addresses = {
            key: (kv.data_ptr(), [step * kv.itemsize for step in kv.stride()]) for key, kv in self._caches.items()
        }
        table = []  # fields as in `kernels/attention.py::SEGMENT_FIELDS`
        for kv, row, columns in segments:
            address, (layer, values, rows, head, *_) = addresses[id(kv)]
            table.append((address + row * rows, values, layer, head, columns))
        self._segments = np.array(table, dtype=np.int64)
        self._first = np.array([0, *map(len, seen)], dtype=np.int64).cumsum()
        first_segments = self._segments[self._first[:-1]]
        # Tokens that begin with the same segment are adjacent, so that its tiles stay in the cache.
        self._order = np.lexsort((first_segments[:, -1], first_segments[:, 0])).astype(np.int64)
        self.count = len(seen)
        common = {"tokens": self.count, "kv_heads": self._kv_heads}
        common |= {"first": self._first.ctypes.data, "segments": self._segments.ctypes.data}
        self._write = WriteArgs(**common, width=self._width)
        self._attend = AttendArgs(**common, order=self._order.ctypes.data)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write one layer's key and value [1, Hkv, T, D] of the first n tokens to the cache."""
        self._check(layer, key, self._kv_heads)
        self._check(layer, value, self._kv_heads)
        args = self._write
        args.taken, args.layer = 0, layer
        key, args.keys, args.keys_head, args.keys_token = _with_strides(key)
        value, args.values, args.values_head, args.values_token = _with_strides(value)
        run_kernel("write", args, self.count)

    def attend(self, layer: int, query: Tensor, scale: float) -> Tensor:
        """Return the output [n, Hq, D] for the first n tokens of query [1, Hq, T, D]."""
        heads = query.shape[1] // self._kv_heads
        self._check(layer, query, heads * self._kv_heads)
        args, tasks = self._attend, self.count * self._kv_heads
        out = query.new_empty(self.count, query.shape[1], self._width)
        args.taken, args.layer, args.scale, args.out = 0, layer, scale, out.data_ptr()
        args.chunk = min(-(-tasks // (CHUNKS_PER_THREAD * torch.get_num_threads())), MAX_CHUNK)
        query, args.query, args.query_head, args.query_token = _with_strides(query)
        run_kernel("attend", args, tasks, heads, self._width)
        return out

    def _check(self, layer: int, x: Tensor, heads: int) -> None:
        check_tensor(x, f"for layer {layer} of {self._layers}", (1, heads, None, self._width))
        if not 0 <= layer < self._layers or x.shape[2] < self.count:
            limits = f"{self.count} tokens, {self._layers} layers"
            raise ValueError(f"{x.shape[2]} tokens for layer {layer}: the cache holds {limits}")


def draw(
    logits: Tensor, rows: Sequence[int], draws: Sequence[float], temperature: float
) -> list[tuple[int, float, float]]:
    """Draw a token from row `rows[i]` of logits [R, V] for each number `draws[i]` in [0, 1), by inversion.

    Returns (token, log-probability, entropy in nats) of each; the entropy is NaN if logits are not finite. Raises
    ValueError if the arguments do not fit.
    """
    check_tensor(logits, "to draw from", (None, None))
    if len(rows) == 0:
        return []
    logits = logits.contiguous()
    chosen, numbers = np.array(rows, dtype=np.int64), np.array(draws, dtype=np.float64)
    if len(chosen) != len(numbers) or not 0 <= chosen.min() <= chosen.max() < len(logits):
        raise ValueError(f"{len(numbers)} draws from rows {rows} of {len(logits)}")
    tokens, stats = np.empty(len(chosen), np.int64), np.empty((len(chosen), 2))
    args = DrawArgs(count=len(chosen), vocabulary=logits.shape[1], inverse_temperature=1 / temperature)
    args.logits = logits.data_ptr()
    args.row = logits.stride(0) * logits.itemsize
    args.rows, args.draws = chosen.ctypes.data, numbers.ctypes.data
    args.tokens, args.stats = tokens.ctypes.data, stats.ctypes.data
    run_kernel("draw", args, len(chosen))
    logprobs, entropies = stats.T.tolist()
    return list(zip(tokens.tolist(), logprobs, entropies, strict=True))


def _with_strides(x: Tensor) -> tuple[Tensor, int, int, int]:
    """Return x [1, heads, T, D] with contiguous heads, its address, and the strides of heads and tokens in bytes."""
    if x.stride(3) != 1:
        x = x.contiguous()
    return x, x.data_ptr(), x.stride(1) * x.itemsize, x.stride(2) * x.itemsize


def check_tensor(x: Tensor, name: str, shape: Sequence[int | None]) -> None:
    """Raise ValueError unless x is float32 on a CPU and has this shape (None: any size).

    Kernels only get addresses, and would read and write whatever is there.
    """
    shape_found, fits = x.shape, x.dtype is torch.float32 and x.is_cpu and x.dim() == len(shape)
    for expected, n in zip(
        shape, shape_found, strict=False
    ):  # no generator, since this runs some hundred times per pass
        fits = fits and (expected is None or expected == n)
    if not fits:
        raise ValueError(
            f"{name}: {x.dtype} {tuple(x.shape)} on {x.device}; kernels need torch.float32 {tuple(shape)} on a cpu"
        )
