"""A device that is not there: its tensors compute on the CPU and refuse what those of a CUDA device refuse.

The device `standin` exists in every process that imports this. What lies on it is computed with the CPU's own
functions, so the numbers are the CPU's to the last bit, and the mistakes that only a GPU shows are shown without one:
operands on two devices, `.numpy()` of what is on the device, kernels that read a CPU's memory. A copy from the device
to the host waits for all that was asked of the device, so `reads` counts these.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import PreTrainedModel

import turnstile


class _Backend:
    """What torch asks a kind of device about, also where it only asks which kind there is."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def manual_seed_all(self, seed: int) -> None:
        """The CPU draws its random numbers."""

    def _is_in_bad_fork(self) -> bool:
        return False


_setup_privateuseone_for_python_backend("standin", _Backend())  # for good: torch lets Python make one kind of device
DEVICE = torch.device("standin", 0)

_aten = torch.ops.aten
_COPIES = {_aten._to_copy.default, _aten.copy_.default}
_INDEXING = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}
"""What takes operands on two devices, as on CUDA: copies, and indexing by indices that lie on the CPU."""

_SIZED_BY_DATA = {_aten.nonzero.default, _aten._unique2.default, _aten.unique_dim.default, _aten.masked_select.default}
"""What gives as many numbers as the data say, so that CUDA has to wait for it to know how many."""

_OURS = str(Path(turnstile.__file__).parent)
_counting: list[Counter[str]] = []


@contextmanager
def reads() -> Iterator[Counter[str]]:
    """Counts the copies to the host inside, in all threads, by the line of turnstile that made them."""
    _counting.append(Counter())
    try:
        yield _counting[-1]
    finally:
        _counting.pop()


class OnDevice(torch.Tensor):
    """A tensor of the device. `held` is what it computes with, on the CPU."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnDevice:
        made: OnDevice = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"OnDevice({self.held!r})"

    @property
    def data(self) -> torch.Tensor:
        return super().data  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.held = value.held  # type: ignore[attr-defined]

    def tolist(self) -> Any:
        """Copies to the host first, as CUDA's does. Torch has none for what Python dispatches."""
        return self.cpu().tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        """What it lies in, by which those who save find out what is tied."""
        return self.held.untyped_storage()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saves it as a tensor of the CPU; where it goes is for those to say who load it."""
        return self.detach().cpu().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied: torch.Tensor = OnDevice(self.held.clone()).requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied.detach(), self.requires_grad)
        memo[id(self)] = copied
        return copied

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        leaves = tree_leaves((args, kwargs))
        _check(func, args, leaves)
        to_host = func is _aten._local_scalar_dense.default
        if func is _aten.copy_.default:
            to_host = not isinstance(args[0], OnDevice)
        elif kwargs.get("device") is not None:
            to_host = torch.device(kwargs["device"]).type == "cpu"
            kwargs["device"] = torch.device("cpu")
        if to_host or func in _SIZED_BY_DATA or _by_mask(func, args):
            _count()
        held_args, held_kwargs = tree_map(_held, (tuple(args), kwargs))
        found = func(*held_args, **held_kwargs)
        for leaf in leaves:
            if isinstance(leaf, OnDevice) and leaf.held.shape != leaf.shape:
                raise NotImplementedError(
                    f"{func} resizes what it writes to, and a wrapper cannot follow: make it whole"
                )
        if to_host:
            return args[0] if func is _aten.copy_.default else found
        return return_and_correct_aliasing(func, args, kwargs, tree_map(_put, found))


def put(model: PreTrainedModel) -> PreTrainedModel:
    """The network on the device, weights that are tied still tied: torch keeps ties only of its own devices."""
    model.to(DEVICE)  # type: ignore[arg-type]
    model.tie_weights()
    return model


def _empty(size: Sequence[int], *, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
    return OnDevice(torch.empty(size, dtype=dtype, memory_format=options.get("memory_format")))


def _empty_strided(
    size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype | None = None, **options: Any
) -> torch.Tensor:
    return OnDevice(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _held(target).copy_(_held(source))
    return target


def _arange(
    *bounds: float, dtype: torch.dtype | None = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> torch.Tensor:
    return OnDevice(torch.arange(*bounds, dtype=dtype))


_library = torch.library.Library("aten", "IMPL")  # torch makes every other tensor out of these
_library.impl("_copy_from", _copy_from, "PrivateUse1")
_library.impl("empty.memory_format", _empty, "PrivateUse1")
_library.impl("empty_strided", _empty_strided, "PrivateUse1")
for overload in ("arange", "arange.start", "arange.start_step"):  # torch's own makes an empty one, and resizes it
    _library.impl(overload, _arange, "PrivateUse1")


def _check(func: Any, args: Sequence[Any], leaves: Sequence[Any]) -> None:
    """Raises what CUDA raises for operands on two devices, and for functions that only a CPU has."""
    if func._schema.name.endswith("_for_cpu") or "mkldnn" in func._schema.name:
        raise NotImplementedError(f"{func} is of the CPU, and was given what lies on {DEVICE}")
    if func in _COPIES:
        return
    allowed = {id(leaf) for leaf in tree_leaves(args[1])} if func in _INDEXING else set()
    for leaf in leaves:
        on_host = isinstance(leaf, torch.Tensor) and not isinstance(leaf, OnDevice)
        if on_host and leaf.dim() and id(leaf) not in allowed:
            raise RuntimeError(f"Expected all tensors to be on the same device: {func} got {DEVICE} and {leaf.device}")


def _by_mask(func: Any, args: Sequence[Any]) -> bool:
    """Whether it picks with a mask out of a tensor, which is `nonzero` and then picking."""
    return func in _INDEXING and any(getattr(index, "dtype", None) == torch.bool for index in tree_leaves(args[1]))


def _count() -> None:
    frame = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back  # type: ignore[assignment]
    where = "elsewhere"
    if frame is not None:
        where = f"{Path(frame.f_code.co_filename).relative_to(_OURS).as_posix()}:{frame.f_lineno}"
    for counter in _counting:
        counter[where] += 1


def _held(value: Any) -> Any:
    return value.held if isinstance(value, OnDevice) else value


def _put(value: Any) -> Any:
    return OnDevice(value) if isinstance(value, torch.Tensor) else value
