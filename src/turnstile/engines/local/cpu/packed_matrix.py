"""A matrix packed into panels for the compiled product kernel (`engines/local/cpu/kernels/products.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from turnstile.engines.local.cpu.compiled import check_tensor, load_kernels, run_kernel
from turnstile.engines.local.cpu.kernel_args import PackArgs, ProductArgs

CHUNKS_PER_THREAD = 4
"""Parts per thread into which tasks are divided, so that neighbours are read in one go and no thread waits long."""


class PackedMatrix:
    """Matrices f32[out, in], stacked and packed for multiplication.

    Rows are reordered by `order` i64[out], and columns are multiplied by `scale` f32[in]. The bias f32[out] is in that
    order already. With `gated`, the second half of the outputs is multiplied by the swish of the first.

    Raises RuntimeError if the kernels are not available, ValueError if shapes do not fit.
    """

    def __init__(
        self,
        matrices: Sequence[Tensor],
        bias: Tensor | None = None,
        *,
        scale: Tensor | None = None,
        order: Tensor | None = None,
        gated: bool = False,
    ) -> None:
        panel_width, self._band = load_kernels().WIDTH, load_kernels().BAND
        depth = matrices[0].shape[1]
        for matrix in matrices:
            check_tensor(matrix, "a matrix", (None, depth))
        matrices = [matrix if matrix.stride(1) == 1 else matrix.contiguous() for matrix in matrices]
        rows = np.concatenate([_row_addresses(matrix) for matrix in matrices])
        if order is not None:
            rows = rows[order.numpy()]
        self.depth, self.halves = depth, 2 if gated else 1
        self.width, odd = divmod(len(rows), self.halves)
        if odd:
            raise ValueError(f"{len(rows)} outputs cannot be split into outputs and gates")
        self._bias = matrices[0].new_zeros(len(rows)) if bias is None else bias.contiguous()
        check_tensor(self._bias, "biases", (len(rows),))
        self._panels = -(-self.width // panel_width)
        self._packed = torch.empty(self._panels * self.halves, depth, panel_width, dtype=torch.float32)
        scale = matrices[0].new_ones(depth) if scale is None else scale.contiguous()
        check_tensor(scale, "scales", (depth,))
        args = PackArgs(depth=depth, width=self.width, halves=self.halves, scale=scale.data_ptr())
        args.rows, args.out = rows.ctypes.data, self._packed.data_ptr()
        run_kernel("pack", args, len(self._packed))

    def __call__(self, x: Tensor, added: Tensor | None = None, floor: float | None = None) -> Tensor:
        """Return the outputs [..., out] of x [..., in], plus `added` [..., out] if given.

        With a `floor`, each row of x is first divided by hypot(|row|, floor).
        """
        rows = (x if x.dim() == 2 else x.reshape(-1, x.shape[-1])).contiguous()
        check_tensor(rows, "the input", (None, self.depth))
        shape = (*x.shape[:-1], self.width)
        out = rows.new_empty(shape)
        args = ProductArgs(rows=len(rows), depth=self.depth, width=self.width, halves=self.halves)
        tasks = self._panels * -(-len(rows) // self._band)
        args.chunk = max(1, tasks // (CHUNKS_PER_THREAD * torch.get_num_threads()))
        args.inputs, args.matrix, args.bias = rows.data_ptr(), self._packed.data_ptr(), self._bias.data_ptr()
        args.norm_floor, args.out = -1 if floor is None else floor, out.data_ptr()
        if added is not None:
            check_tensor(added, "the added tensor", shape)
            added = added.contiguous()
            args.residual = added.data_ptr()
        if tasks:
            run_kernel("product", args, tasks)
        return out


def _row_addresses(matrix: Tensor) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the address of each row of a matrix."""
    return matrix.data_ptr() + np.arange(len(matrix), dtype=np.int64) * (matrix.stride(0) * matrix.itemsize)
