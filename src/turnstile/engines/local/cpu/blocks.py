"""A matrix in the blocks that oneDNN's kernels take, where our own cannot be compiled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROWS = 32
"""The number of rows that the layout is chosen for; others are right, too, and gain less."""


class Blocks:
    """As `engines.local.cpu.packed_matrix.PackedMatrix`."""

    def __init__(
        self,
        matrices: Sequence[Tensor],
        bias: Tensor | None = None,
        *,
        scale: Tensor | None = None,
        order: Tensor | None = None,
        gated: bool = False,
    ) -> None:
        whole = matrices[0] if len(matrices) == 1 else torch.cat(list(matrices))
        whole = whole if scale is None else whole * scale
        whole = whole if order is None else whole[order]
        self._parts = [torch.ops.mkldnn._reorder_linear_weight(part, ROWS) for part in whole.chunk(1 + gated)]
        self._biases = [None] * len(self._parts) if bias is None else bias.contiguous().chunk(len(self._parts))

    def __call__(self, x: Tensor, added: Tensor | None = None, floor: float | None = None) -> Tensor:
        if floor is not None:
            length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            x = x / length.hypot(length.new_tensor(floor))
        x, added = x.contiguous(), None if added is None else added.contiguous()  # oneDNN reads them as if they were
        (first, *second), (bias, *other_bias) = self._parts, self._biases
        linear = torch.ops.mkldnn._linear_pointwise
        if second:
            gate = linear(x, first, bias, "swish", [], "")
            product: Tensor = linear.binary(x, gate, second[0], other_bias[0], "mul")
            return product if added is None else product + added
        if added is not None:
            out: Tensor = linear.binary(x, added, first, bias, "add")
        else:
            out = linear(x, first, bias, "none", [], "")
        return out

    @staticmethod
    def available() -> bool:
        """Whether torch has these kernels here."""
        return (
            torch.backends.mkldnn.is_available()
            and hasattr(torch.ops.mkldnn, "_linear_pointwise")
            and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        )
