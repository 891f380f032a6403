"""Packed copies of linear layers for CPU kernels, since the weights' memory layout limits the decoding of few rows.

The copies are panels for our own kernel (`engines/local/cpu/packed_matrix.py`), which numba compiles; without numba the
model runs as it is. Packing takes about as long as one pass over a few rows, so it is done once and repeated only after
the weights have changed.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from turnstile.engines.local.cpu import compiled
from turnstile.engines.local.cpu.packed_matrix import PackedMatrix
from turnstile.models.adapt import bias_of, eps_of, parameters_of, weight_of

Stamp = list[tuple[int, int]]
"""Version counter and address of each weight, which show that weights have changed."""


def stamp_of(weights: Sequence[Tensor]) -> Stamp:
    """Return the stamp of weights, which differs after they have changed in place or moved."""
    return [(weight._version, weight.data_ptr()) for weight in weights]


_thread = threading.local()
"""Its attribute `is_sampling` says whether the current thread samples."""


class PackedWeight:
    """One or several linear layers with the same input, stacked and packed, with their biases.

    `refresh` packs them, and packs them again after a change. With `norm`, an RMS norm of the input is computed here,
    and its weights are multiplied in. `order` i64[out] reorders the outputs. With `gated`, the second half of the
    outputs is multiplied by the swish of the first.
    """

    def __init__(
        self, *layers: nn.Module, norm: nn.Module | None = None, order: Tensor | None = None, gated: bool = False
    ) -> None:
        self._layers, self._norm, self._order, self._gated = layers, norm, order, gated
        self._norm_floor = None if norm is None else _norm_floor(norm)
        self._parameters: list[nn.Parameter] = []
        self._stamp: Stamp | None = None
        self._matrix: PackedMatrix | None = None

    def invalidate(self) -> None:
        """Mark the copy as stale if any of its weights is trainable."""
        self._parameters = self._collect_parameters()
        if any(tensor.requires_grad for tensor in self._parameters):
            self._stamp = None

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the outputs depend on."""
        self._parameters = self._parameters or self._collect_parameters()
        return self._parameters

    def _collect_parameters(self) -> list[nn.Parameter]:
        parts = (*self._layers, *(() if self._norm is None else (self._norm,)))
        return [tensor for part in parts for tensor in parameters_of(part)]

    @torch.no_grad()
    def refresh(self) -> None:
        """Pack the weights if they are not packed yet, are stale, have changed in place or were replaced."""
        stamp = stamp_of(self.parameters())
        if stamp == self._stamp:
            return
        self._matrix = self._stamp = None  # frees its memory for the next one
        matrices, bias, scale = [weight_of(layer) for layer in self._layers], None, None
        biases = [bias_of(layer) for layer in self._layers]
        if any(one is not None for one in biases):
            pairs = zip(matrices, biases, strict=True)
            bias = torch.cat([matrix.new_zeros(len(matrix)) if one is None else one for matrix, one in pairs])
            bias = bias if self._order is None else bias[self._order]
        if self._norm is not None:
            weight = cast(Tensor, self._norm.weight)
            scale = weight * len(weight) ** 0.5
        self._matrix = PackedMatrix(matrices, bias, scale=scale, order=self._order, gated=self._gated)
        self._stamp = stamp

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the outputs [..., out] of x [..., in], plus `residual` [..., out] if given."""
        assert self._matrix is not None, "`refresh` comes first"
        return self._matrix(x, residual, self._norm_floor)


class PackedLinears:
    """Packed copies of a model's linear layers, which take as much memory again.

    Only layers in float32 on a CPU are packed; elsewhere the model runs as it is. A layer whose `forward` is already
    replaced is left alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._packed = {
            module: PackedWeight(module)
            for module in model.modules()
            if type(module) is nn.Linear and can_be_packed(module)
        }
        self._is_stale = False

    def invalidate(self) -> None:
        """Mark the copies of trainable weights as stale, even while they are in use. The next use renews them."""
        self._is_stale = True

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run this thread's forward passes without gradients on the copies, and first renew those that are stale.

        Other threads, whose weights may be newer, run on the weights themselves.
        """
        was_stale, self._is_stale = self._is_stale, False
        replaced = []
        try:
            for layer, packed in self._packed.items():
                if was_stale:
                    packed.invalidate()
                if "forward" not in vars(layer):
                    packed.refresh()
                    vars(layer)["forward"] = functools.partial(_forward, layer, packed)
                    replaced.append(layer)
            _thread.is_sampling = True
            yield
        finally:
            _thread.is_sampling = False
            for layer in replaced:
                del vars(layer)["forward"]


def can_be_packed(layer: nn.Module) -> bool:
    """Return whether a layer is in float32 on a CPU where our kernels can be compiled."""
    on_cpu = all(tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in parameters_of(layer))
    return on_cpu and compiled.is_available()


def _norm_floor(norm: nn.Module) -> float:
    """Return the `floor` of an RMS norm, with which sqrt(mean(x^2) + eps) is hypot(|x|, floor) / sqrt(n).

    x has n elements, so the floor is sqrt(n * eps).
    """
    return float((cast(float, eps_of(norm)) * cast(Tensor, norm.weight).numel()) ** 0.5)


def _forward(layer: nn.Linear, packed: PackedWeight, x: Tensor) -> Tensor:
    # The copy has no gradient, and holds the weights as they were when sampling began.
    if torch.is_grad_enabled() or not getattr(_thread, "is_sampling", False):
        return linear(x, layer.weight, layer.bias)
    return packed(x)
