"""A linear layer with a low-rank adapter (Hu et al., arXiv 2106.09685) in few passes over memory.

An adapter computes next to nothing, and still takes as long as its layer does where every step of it (two products, a
scaling, a sum, and what these keep for the backward pass) writes tensors as large as the layer's own. Here the adapter
is added to what the layer gives in place, in both passes, and only what is of its rank is kept.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear


def compute_in_place(layer: nn.Module) -> None:
    """Has a peft layer with the adapter `default`, and nothing more, on a plain linear layer compute like this."""
    layer.forward = MethodType(_forward, layer)


def _forward(layer: Any, x: Tensor) -> Tensor:
    whole = x.dtype.itemsize >= torch.float32.itemsize  # else what follows rounds in other places than peft does
    if whole and not torch.is_grad_enabled():
        own: Tensor = type(layer).forward(layer, x)  # sampling may have replaced the parts of the layer
        return own
    base, down, up = layer.base_layer, layer.lora_A["default"].weight, layer.lora_B["default"].weight
    out: Tensor = _Adapted.apply(x, base.weight, base.bias, down, up, layer.scaling["default"])  # type: ignore[no-untyped-call]
    return out


class _Adapted(torch.autograd.Function):
    """x [..., in], weight [out, in], bias [out] or None, down [r, in], up [out, r] -> [..., out]. Of the layer itself
    nothing learns. The adapter may be in higher precision than the rest, and is then computed in that of the rest."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        low, out = flat @ down.T.to(x.dtype), linear(x, weight, bias)
        out.view(-1, len(weight)).addmm_(low, up.T.to(x.dtype), alpha=scale)
        ctx.save_for_backward(flat, weight, down, up, low)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        flat, weight, down, up, low = ctx.saved_tensors
        above = slope.reshape(-1, slope.shape[-1])
        low_slope = (above @ up.to(above.dtype)).mul_(ctx.scale)
        below = None
        if ctx.needs_input_grad[0]:
            below = (above @ weight).addmm_(low_slope, down.to(above.dtype)).view(*slope.shape[:-1], weight.shape[1])
        slopes = low_slope.T @ flat, (above.T @ low).mul_(ctx.scale)
        return below, None, None, slopes[0].to(down.dtype), slopes[1].to(up.dtype), None
