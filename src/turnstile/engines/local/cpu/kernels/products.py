"""Products of a few rows with a matrix that streams from memory.

The matrix is packed into panels f32[in, WIDTH], in which the weights of WIDTH outputs are contiguous. A thread walks a
panel in blocks that fit its first-level cache. It multiplies each block by all rows, one tile of rows at a time whose
sums stay in registers, while the next block is prefetched. So a product takes the time of its arithmetic and hardly
waits for the matrix, unlike a library's product of 8 to 32 rows.

Each sum is accumulated in the order of the inputs, whatever the number of rows, so the output of a row depends on that
row alone, to the last bit.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from turnstile.engines.local.cpu.kernel_args import PackArgs, ProductArgs
from turnstile.engines.local.cpu.kernels.base import (
    address_of,
    compiled,
    emit_prefetch,
    exp,
    floats,
    integers,
    kernel_of,
    take,
)
from turnstile.engines.local.cpu.processor import cpu_features


def _tile_shape() -> tuple[int, int, int]:
    """Return (elements per register, registers per row, rows per tile) for this CPU.

    Sums, weights and one input must fit into the registers, and there must be enough sums that none waits for another.
    """
    if "avx512f" in cpu_features():
        return 16, 3, 8  # of 32 registers
    if "avx" in cpu_features():
        return 8, 3, 4  # of 16
    return (4, 3, 8) if platform.machine() in ("aarch64", "arm64") else (4, 3, 4)


LANES, REGISTERS, ROWS = _tile_shape()

WIDTH = LANES * REGISTERS
"""Columns of a panel: the outputs that it computes for a row."""

BLOCK = 18 * 1024 // (4 * WIDTH)
"""Rows of a panel that are in the first-level cache at once."""

BAND = 64
"""Rows whose inputs and sums are in the second-level cache at once."""


@intrinsic
def _add_products(
    context: Any, rows: Any, inputs: Any, row: Any, block: Any, depth: Any, sums: Any, prefetch: Any, stride: Any
) -> Any:
    """Add the products of up to ROWS rows with a block f32[depth, WIDTH] of a panel to sums f32[rows, WIDTH].

    The rows begin at `inputs`, `row` bytes apart. For each of the block's rows, one cache line is prefetched; the lines
    begin at `prefetch`, `stride` bytes apart. All arguments are i64, addresses or numbers.
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        count, *others = arguments
        done = builder.append_basic_block("done")
        chosen = builder.switch(count, done)
        for tile_rows in range(1, ROWS + 1):
            case = builder.append_basic_block(f"rows_{tile_rows}")
            chosen.add_case(_const_i64(tile_rows), case)
            builder.position_at_end(case)
            _emit_tile(builder, tile_rows, *others)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), code


_FLOAT, _INTEGER, _LANES = ir.FloatType(), ir.IntType(64), ir.VectorType(ir.FloatType(), LANES)


def _const_i64(n: int) -> Any:
    return ir.Constant(_INTEGER, n)


def _emit_tile(
    builder: Any, rows: int, inputs: Any, row: Any, block: Any, depth: Any, sums: Any, prefetch: Any, stride: Any
) -> None:
    """Emit the loop over a block for a fixed number of rows."""
    multiply_add = get_or_insert_function(
        builder.module, ir.FunctionType(_LANES, [_LANES] * 3), f"llvm.fmuladd.v{LANES}f32"
    )
    nothing, first = ir.Constant(_LANES, ir.Undefined), ir.Constant(ir.IntType(32), 0)
    to_all = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    tile = [(one, register) for one in range(rows) for register in range(REGISTERS)]

    def at(address: Any, number: int, kind: Any = _LANES) -> Any:
        return builder.inttoptr(builder.add(address, _const_i64(4 * number)), kind.as_pointer())

    places = {(one, register): at(sums, one * WIDTH + register * LANES) for one, register in tile}
    begins = [builder.add(inputs, builder.mul(row, _const_i64(one))) for one in range(rows)]
    initial = {each: builder.load(place, align=4) for each, place in places.items()}
    before, loop, after = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("after")
    builder.branch(loop)

    builder.position_at_end(loop)
    step = builder.phi(_INTEGER)
    sum_of = {each: builder.phi(_LANES) for each in tile}
    emit_prefetch(builder, builder.add(prefetch, builder.mul(step, stride)))
    line = builder.add(block, builder.mul(step, _const_i64(4 * WIDTH)))
    multipliers = [builder.load(at(line, register * LANES), align=4) for register in range(REGISTERS)]
    here = builder.mul(step, _const_i64(4))
    updated = {}
    for one in range(rows):
        number = builder.load(at(builder.add(begins[one], here), 0, _FLOAT), align=4)
        spread = builder.shuffle_vector(builder.insert_element(nothing, number, first), nothing, to_all)
        for register, multiplier in enumerate(multipliers):
            updated[one, register] = builder.call(multiply_add, [spread, multiplier, sum_of[one, register]])
    following = builder.add(step, _const_i64(1))
    builder.cbranch(builder.icmp_signed("<", following, depth), loop, after)
    step.add_incoming(_const_i64(0), before)
    step.add_incoming(following, loop)
    for each in tile:
        sum_of[each].add_incoming(initial[each], before)
        sum_of[each].add_incoming(updated[each], loop)

    builder.position_at_end(after)
    for each, place in places.items():
        builder.store(updated[each], place, align=4)


@compiled
def _sum_up(inputs: Any, rows: Any, panel: Any, depth: Any, sums: Any) -> None:
    """Write the products of inputs f32[rows, depth] with a panel f32[depth, WIDTH] to sums f32[rows or more, WIDTH].

    `inputs` and `panel` are addresses. The memory after each block is prefetched, which usually is the next block.
    """
    sums[:rows] = 0
    tiles = (rows + ROWS - 1) // ROWS
    stride = 4 * WIDTH // tiles
    for begin in range(0, depth, BLOCK):
        deep = min(BLOCK, depth - begin)
        block = panel + begin * 4 * WIDTH
        prefetch = block + deep * 4 * WIDTH
        done = 0
        for tile in range(tiles):
            count = (rows - done + tiles - tile - 1) // (tiles - tile)  # tiles of similar size: small ones wait more
            _add_products(
                count, inputs + (done * depth + begin) * 4, depth * 4, block, deep, address_of(sums[done:]),
                prefetch + tile * deep * stride, stride,
            )  # fmt: skip
            done += count


@compiled
def _inverse_norms(inputs: Any, norm_floor: Any, inverse_norms: Any) -> None:
    """Write 1 / hypot(|row|, floor) for each row of inputs f32[n, in], or ones if the floor is negative."""
    inverse_norms[:] = 1
    if norm_floor >= 0:
        for row in range(len(inputs)):
            squares = norm_floor * norm_floor
            for i in range(inputs.shape[1]):
                squares += inputs[row, i] * inputs[row, i]
            inverse_norms[row] = np.float32(1) / np.sqrt(squares)


@compiled
def _swish(x: Any) -> Any:
    """Return x / (1 + e^-x)."""
    e = exp(-abs(x))
    return x * (np.float32(1) if x >= 0 else e) / (np.float32(1) + e)


@kernel_of(ProductArgs)
def product(args_address: Any) -> None:
    """Multiply rows by a packed matrix.

    Work is split by panel (or by pair of panels, one of which gates the other) and by band of rows, so that with many
    rows there is work for more processors than panels.
    """
    args = carray(args_address, 1)[0]
    rows, depth, width, halves, chunk = args.rows, args.depth, args.width, args.halves, args.chunk
    panels = (width + WIDTH - 1) // WIDTH
    out = carray(floats(args.out), (rows, width))
    bias = carray(floats(args.bias), (halves, width))
    residual = carray(floats(args.residual), (rows, width))
    inverse_norms, sums = np.empty(rows, np.float32), np.empty((halves, min(rows, BAND), WIDTH), np.float32)
    _inverse_norms(carray(floats(args.inputs), (rows, depth)), args.norm_floor, inverse_norms)
    tasks = panels * ((rows + BAND - 1) // BAND)
    while True:
        begin = take(args_address, chunk)
        if begin >= tasks:
            break
        for task in range(begin, min(begin + chunk, tasks)):
            top, panel = task // panels * BAND, task % panels
            count, first = min(BAND, rows - top), panel * WIDTH
            for half in range(halves):
                matrix = args.matrix + (panel * halves + half) * depth * WIDTH * 4
                _sum_up(args.inputs + top * depth * 4, count, matrix, depth, sums[half])
            for i in range(count):
                row, inverse_norm = top + i, inverse_norms[top + i]
                tile = out[row, first : min(first + WIDTH, width)]
                for j in range(len(tile)):
                    tile[j] = sums[0, i, j] * inverse_norm + bias[0, first + j]
                if halves == 2:
                    for j in range(len(tile)):
                        tile[j] = _swish(tile[j]) * (sums[1, i, j] * inverse_norm + bias[1, first + j])
                if args.residual != 0:
                    for j in range(len(tile)):
                        tile[j] += residual[row, first + j]


@kernel_of(PackArgs)
def pack(args_address: Any) -> None:
    """Pack the rows of a matrix into panels, each element multiplied by its column's scale; work is split by panel."""
    args = carray(args_address, 1)[0]
    depth, width, halves = args.depth, args.width, args.halves
    panels = (width + WIDTH - 1) // WIDTH
    rows = carray(integers(args.rows), (halves, width))
    scale = carray(floats(args.scale), depth)
    out = carray(floats(args.out), (panels, halves, depth, WIDTH))
    while True:
        task = take(args_address, 1)
        if task >= panels * halves:
            break
        panel, half = task // halves, task % halves
        packed = out[panel, half]
        for column in range(WIDTH):
            if panel * WIDTH + column < width:
                row = carray(floats(rows[half, panel * WIDTH + column]), depth)
                for i in range(depth):
                    packed[i, column] = row[i] * scale[i]
            else:
                for i in range(depth):
                    packed[i, column] = 0
