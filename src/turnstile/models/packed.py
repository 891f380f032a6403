"""Linear layers in the layout that a CPU's kernels want: decoding a few rows is bound by how weights lie in memory.

oneDNN keeps a matrix in blocks that fit its registers. Reordering takes about as long as one pass over a few rows, so
it is done once for as long as the weights stay what they are.
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

from turnstile.models.adapt import bias_of, sources, weight_of

ROWS = 32
"""The number of rows that the layout is chosen for; others are right, too, and gain less."""


Stamp = list[tuple[int, int]]
"""By which it is seen that weights have changed: the version of each, and where it lies."""


def stamp_of(weights: Sequence[Tensor]) -> Stamp:
    return [(weight._version, weight.data_ptr()) for weight in weights]


_here = threading.local()
"""Whether this thread is one that samples."""


class PackedWeight:
    """The weights of one or several linear layers of equal input, stacked and reordered, with their biases.

    Made at first use, and again at the first use after they have changed. The weights of a root-mean-square norm
    before them are multiplied in with `norm`; then what comes in is to have length 1 instead of root mean square 1.
    `order` i64[out] is that of the numbers that come out.
    """

    def __init__(self, *layers: nn.Module, norm: nn.Module | None = None, order: Tensor | None = None) -> None:
        self._layers, self._norm, self._order = layers, norm, order
        self._sources: list[nn.Parameter] = []
        self._stamp: Stamp | None = None
        self.weight = torch.empty(0)
        self.bias: Tensor | None = None

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
        matrices = [weight_of(layer) for layer in self._layers]
        whole = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
        biases = [bias for layer in self._layers if (bias := bias_of(layer)) is not None]
        self.bias = torch.cat(biases) if biases else None
        if self._norm is not None:
            weight = cast(Tensor, self._norm.weight)
            whole = whole * (weight * len(weight) ** 0.5)
        if self._order is not None:
            whole = whole[self._order]
            self.bias = None if self.bias is None else self.bias[self._order]
        self.weight = torch.ops.mkldnn._reorder_linear_weight(whole, ROWS)
        self._stamp = stamp

    def __call__(self, x: Tensor, then: str = "none") -> Tensor:
        """x [..., in] -> [..., out], with `then` ("none" or "swish") of it."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, then, [], "")
        return out

    def with_other(self, x: Tensor, other: Tensor, how: str) -> Tensor:
        """x [..., in] -> [..., out], with `other` [..., out] put to it ("add" or "mul")."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self.weight, self.bias, how)
        return out


class PackedLinears:
    """Reordered copies of a model's linear layers, at the price of their memory a second time.

    Float32 on a CPU with oneDNN: elsewhere there are none, and the model runs as it is. A layer that something else
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
    """Float32 on a CPU, with a torch that has the kernels."""
    return (
        all(tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in sources(layer))
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def _forward(layer: nn.Linear, packed: PackedWeight, x: Tensor) -> Tensor:
    if torch.is_grad_enabled() or not getattr(_here, "inside", False):  # the copy has no gradient, and is of its time
        return linear(x, layer.weight, layer.bias)
    return packed(x)
