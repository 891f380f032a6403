"""Compute a linear layer with a low-rank adapter (Hu et al., arXiv 2106.09685) in few passes over memory.

An adapter needs little arithmetic, but takes as long as its layer if each of its steps (two products, a scaling, a sum,
and what they keep for the backward pass) writes tensors of the layer's size. Here the adapter is added to the layer's
output in place, in both passes, and the only tensors kept besides the input have the adapter's rank.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear


def compute_in_place(layer: nn.Module) -> None:
    """Make a peft layer compute in place. Its only adapter must be `default`, on a plain linear layer."""
    layer.forward = MethodType(_forward, layer)


def _forward(layer: Any, x: Tensor) -> Tensor:
    # In lower precision peft rounds differently, so sampling and training must both run the code below.
    is_full_precision = x.dtype.itemsize >= torch.float32.itemsize
    if is_full_precision and not torch.is_grad_enabled():
        own: Tensor = type(layer).forward(layer, x)  # sampling may have replaced parts of the layer
        return own
    base, down, up = layer.base_layer, layer.lora_A["default"].weight, layer.lora_B["default"].weight
    out: Tensor = _LinearWithAdapter.apply(x, base.weight, base.bias, down, up, layer.scaling["default"])  # type: ignore[no-untyped-call]
    return out


class _LinearWithAdapter(torch.autograd.Function):
    """Map x [..., in], weight [out, in], bias [out] or None, down [r, in] and up [out, r] to outputs [..., out].

    Only x, down and up get gradients. The adapter may be in higher precision than x, and is then computed in the
    precision of x.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        projected, out = flat @ down.T.to(x.dtype), linear(x, weight, bias)
        out.view(-1, len(weight)).addmm_(projected, up.T.to(x.dtype), alpha=scale)
        ctx.save_for_backward(flat, weight, down, up, projected)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flat, weight, down, up, projected = ctx.saved_tensors
        grad_rows = grad.reshape(-1, grad.shape[-1])
        low_grad = (grad_rows @ up.to(grad_rows.dtype)).mul_(ctx.scale)
        input_grad = None
        if ctx.needs_input_grad[0]:
            flat_grad = (grad_rows @ weight).addmm_(low_grad, down.to(grad_rows.dtype))
            input_grad = flat_grad.view(*grad.shape[:-1], weight.shape[1])
        adapter_grads = low_grad.T @ flat, (grad_rows.T @ projected).mul_(ctx.scale)
        return input_grad, None, None, adapter_grads[0].to(down.dtype), adapter_grads[1].to(up.dtype), None
