"""Linear layers in the layout that a CPU's kernels want: decoding a few rows is bound by how weights lie in memory.

They lie in the panels of our own kernel (`engines/local/cpu/packed_matrix.py`), which numba compiles; without numba
the model runs as it is. Reordering takes about as long as one pass over a few rows, so it is done once for as long as
the weights stay what they are.
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
from turnstile.models.adapt import bias_of, eps_of, sources, weight_of

Stamp = list[tuple[int, int]]
"""By which it is seen that weights have changed: the version of each, and where it lies."""


def stamp_of(weights: Sequence[Tensor]) -> Stamp:
    """Return the stamp of weights, which differs once they have changed in place or moved."""
    return [(weight._version, weight.data_ptr()) for weight in weights]


_here = threading.local()
"""Whether this thread is one that samples."""


class PackedWeight:
    """One or several linear layers of equal input, stacked and reordered, with their biases.

    Made at first use, and again at the first use after they have changed. With `norm`, a root-mean-square norm, that
    of what comes in is computed here, and its weights are multiplied in. `order` i64[out] is that of the numbers that
    come out. Where it is `gated`, the second half of those is multiplied by the swish of the first.
    """

    def __init__(
        self, *layers: nn.Module, norm: nn.Module | None = None, order: Tensor | None = None, gated: bool = False
    ) -> None:
        self._layers, self._norm, self._order, self._gated = layers, norm, order, gated
        self._floor = None if norm is None else _floor(norm)
        self._sources: list[nn.Parameter] = []
        self._stamp: Stamp | None = None
        self._matrix: PackedMatrix | None = None

    def forget(self) -> None:
        """What learns has changed, in whatever way."""
        self._sources = self._found()
        if any(tensor.requires_grad for tensor in self._sources):
            self._stamp = None

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that decide what this computes."""
        self._sources = self._sources or self._found()
        return self._sources

    def _found(self) -> list[nn.Parameter]:
        parts = (*self._layers, *(() if self._norm is None else (self._norm,)))
        return [tensor for part in parts for tensor in sources(part)]

    @torch.no_grad()
    def refresh(self) -> None:
        """Follows changes in place, and of place."""
        stamp = stamp_of(self.parameters())
        if stamp == self._stamp:
            return
        self._matrix = self._stamp = None  # its memory may serve the next
        matrices, bias, scale = [weight_of(layer) for layer in self._layers], None, None
        biases = [bias_of(layer) for layer in self._layers]
        if any(one is not None for one in biases):
            known = zip(matrices, biases, strict=True)
            bias = torch.cat([matrix.new_zeros(len(matrix)) if one is None else one for matrix, one in known])
            bias = bias if self._order is None else bias[self._order]
        if self._norm is not None:
            weight = cast(Tensor, self._norm.weight)
            scale = weight * len(weight) ** 0.5
        self._matrix = PackedMatrix(matrices, bias, scale=scale, order=self._order, gated=self._gated)
        self._stamp = stamp

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """x [..., in] -> [..., out], to which `added` [..., out] is added."""
        assert self._matrix is not None, "`refresh` comes first"
        return self._matrix(x, added, self._floor)


class PackedLinears:
    """Reordered copies of a model's linear layers, at the price of their memory a second time.

    Float32 on a CPU: elsewhere there are none, and the model runs as it is. A layer that something else
    leads already (a `forward` of its own) is left alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._packed = {
            module: PackedWeight(module)
            for module in model.modules()
            if type(module) is nn.Linear and can_be_packed(module)
        }
        self._learnt = False

    def forget(self) -> None:
        """The weights that learn have changed, in whatever way. Heeded at the next use, as one may be going on."""
        self._learnt = True

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, what this thread runs without gradients runs on the copies; those of weights that changed in place
        are made again first. Other threads, whose weights may be newer, run on the weights themselves."""
        learnt, self._learnt = self._learnt, False
        led = []
        try:
            for layer, packed in self._packed.items():
                if learnt:
                    packed.forget()
                if "forward" not in vars(layer):
                    packed.refresh()
                    vars(layer)["forward"] = functools.partial(_forward, layer, packed)
                    led.append(layer)
            _here.inside = True
            yield
        finally:
            _here.inside = False
            for layer in led:
                del vars(layer)["forward"]


def can_be_packed(layer: nn.Module) -> bool:
    """Return whether a layer is in float32 on a CPU, where our kernels can be compiled."""
    on_cpu = all(tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in sources(layer))
    return on_cpu and compiled.available()


def _floor(norm: nn.Module) -> float:
    """With x of n numbers, sqrt(mean(x^2) + eps) is hypot(|x|, this) / sqrt(n)."""
    return float((cast(float, eps_of(norm)) * cast(Tensor, norm.weight).numel()) ** 0.5)


def _forward(layer: nn.Linear, packed: PackedWeight, x: Tensor) -> Tensor:
    if torch.is_grad_enabled() or not getattr(_here, "inside", False):  # the copy has no gradient, and is of its time
        return linear(x, layer.weight, layer.bias)
    return packed(x)
