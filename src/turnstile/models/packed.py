"""Linear layers in the layout that a CPU's kernels want: decoding a few rows is bound by how weights lie in memory.

oneDNN keeps a matrix in blocks that fit its registers. Reordering takes as long as two forward passes, so it is done
once for as long as the weights stay what they are.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

ROWS = 32
"""The number of rows that the layout is chosen for; others are right, too, and gain less."""


_here = threading.local()
"""Whether this thread is one that samples."""


@dataclass(frozen=True, slots=True)
class _Packed:
    weight: Tensor
    version: int  # of the weight when it was reordered
    place: int  # where that lay


class PackedLinears:
    """Reordered copies of a model's linear layers, at the price of their memory a second time.

    Float32 on a CPU with oneDNN: elsewhere there are none, and the model runs as it is. A layer that something else
    leads already (a `forward` of its own) is left alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [module for module in model.modules() if type(module) is nn.Linear and _can_be_packed(module)]
        self._packed: dict[nn.Linear, _Packed] = {}
        self._learnt = False

    def forget(self) -> None:
        """The weights that learn have changed, in whatever way. Heeded at the next use, as one may be going on."""
        self._learnt = True

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, what this thread runs without gradients runs on the copies; those of weights that changed in place
        are made again first. Other threads, whose weights may be newer, run on the weights themselves."""
        if self._learnt:
            self._learnt = False
            self._packed = {layer: one for layer, one in self._packed.items() if not layer.weight.requires_grad}
        led = []
        try:
            for layer in self._layers:
                if "forward" not in vars(layer):
                    vars(layer)["forward"] = functools.partial(_forward, layer, self._of(layer).weight)
                    led.append(layer)
            _here.inside = True
            yield
        finally:
            _here.inside = False
            for layer in led:
                del vars(layer)["forward"]

    def _of(self, layer: nn.Linear) -> _Packed:
        weight = layer.weight
        packed = self._packed.get(layer)
        if packed is None or (packed.version, packed.place) != (weight._version, weight.data_ptr()):
            reordered = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
            packed = self._packed[layer] = _Packed(reordered, weight._version, weight.data_ptr())
        return packed


def _can_be_packed(layer: nn.Linear) -> bool:
    weight = layer.weight
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def _forward(layer: nn.Linear, packed: Tensor, x: Tensor) -> Tensor:
    if torch.is_grad_enabled() or not getattr(_here, "inside", False):  # the copy has no gradient, and is of its time
        return linear(x, layer.weight, layer.bias)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, layer.bias, "none", [], "")
    return out
