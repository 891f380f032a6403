"""A matrix in panels, as the compiled kernel of products takes it (`engines/local/cpu/kernels/products.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from turnstile.engines.local.cpu.compiled import kernels, run, want
from turnstile.engines.local.cpu.kernel_args import PackArgs, ProductArgs

CHUNKS = 4
"""Into how many parts the tasks are divided for each thread: neighbours are read in one go, and none waits long."""


class PackedMatrix:
    """The rows of some matrices f32[out, in], one below the other, or in an order i64[out]; each column multiplied by
    that of `scale` f32[in]. The bias f32[out] is in that order already. Where it is `gated`, the second half of what
    comes out is multiplied by the swish of the first.

    Raises RuntimeError where kernels cannot be used, ValueError where something does not fit.
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
        across, self._band = kernels().WIDTH, kernels().BAND
        depth = matrices[0].shape[1]
        for matrix in matrices:
            want(matrix, "a matrix", (None, depth))
        matrices = [matrix if matrix.stride(1) == 1 else matrix.contiguous() for matrix in matrices]
        rows = np.concatenate([_addresses(matrix) for matrix in matrices])
        if order is not None:
            rows = rows[order.numpy()]
        self.depth, self.sides = depth, 2 if gated else 1
        self.width, odd = divmod(len(rows), self.sides)
        if odd:
            raise ValueError(f"{len(rows)} numbers come out, half of which are to gate the others")
        self._bias = matrices[0].new_zeros(len(rows)) if bias is None else bias.contiguous()
        want(self._bias, "biases", (len(rows),))
        self._panels = -(-self.width // across)
        self._packed = torch.empty(self._panels * self.sides, depth, across, dtype=torch.float32)
        scale = matrices[0].new_ones(depth) if scale is None else scale.contiguous()
        want(scale, "scales", (depth,))
        work = PackArgs(depth=depth, width=self.width, sides=self.sides, scale=scale.data_ptr())
        work.rows, work.out = rows.ctypes.data, self._packed.data_ptr()
        run("pack", work, len(self._packed))

    def __call__(self, x: Tensor, added: Tensor | None = None, floor: float | None = None) -> Tensor:
        """x [..., in] -> [..., out], to which `added` [..., out] is added. With a floor each row of x is divided by its
        length first; by a little more where that is hardly above the floor."""
        rows = (x if x.dim() == 2 else x.reshape(-1, x.shape[-1])).contiguous()
        want(rows, "what comes in", (None, self.depth))
        shape = (*x.shape[:-1], self.width)
        out = rows.new_empty(shape)
        work = ProductArgs(rows=len(rows), depth=self.depth, width=self.width, sides=self.sides)
        tasks = self._panels * -(-len(rows) // self._band)
        work.chunk = max(1, tasks // (CHUNKS * torch.get_num_threads()))
        work.given, work.matrix, work.bias = rows.data_ptr(), self._packed.data_ptr(), self._bias.data_ptr()
        work.floor, work.out = -1 if floor is None else floor, out.data_ptr()
        if added is not None:
            want(added, "what is added", shape)
            added = added.contiguous()
            work.added = added.data_ptr()
        if tasks:
            run("product", work, tasks)
        return out


def _addresses(matrix: Tensor) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Of the rows of a matrix."""
    return matrix.data_ptr() + np.arange(len(matrix), dtype=np.int64) * (matrix.stride(0) * matrix.itemsize)
