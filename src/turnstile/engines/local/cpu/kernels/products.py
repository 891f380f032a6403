"""Products of a few rows with a matrix that comes from memory.

The matrix is kept in panels f32[in, WIDTH]: what is read for so many of the numbers that come out lies in one stretch.
A thread walks a panel in blocks that fit its nearest cache, and for each takes all rows, a tile of them at a time,
whose sums stay in registers; meanwhile the block that follows comes from memory. So a matrix costs its operations, and
hardly the time it takes to read, for which a library's product of 8 to 32 rows waits.

Each sum is added up in the order of the numbers that come in, whatever rows there are beside: what comes out for a row
depends on that row alone, to the last bit.
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
    code_of_fetch,
    compiled,
    exp,
    floats,
    integers,
    kernel_of,
    take,
)
from turnstile.engines.local.cpu.processor import features


def _tile() -> tuple[int, int, int]:
    """Numbers in a register, registers of a row and rows of a tile: their sums, the numbers that they are multiplied by
    and one number of a row must find room in the registers of this CPU, and be enough that none waits for another."""
    if "avx512f" in features():
        return 16, 3, 8  # of 32 registers
    if "avx" in features():
        return 8, 3, 4  # of 16
    return (4, 3, 8) if platform.machine() in ("aarch64", "arm64") else (4, 3, 4)


LANES, REGISTERS, ROWS = _tile()

WIDTH = LANES * REGISTERS
"""Columns of a panel: the numbers that come out of it for a row."""

BLOCK = 18 * 1024 // (4 * WIDTH)
"""Rows of a panel that are in the nearest cache at once."""

BAND = 64
"""Rows whose numbers and sums are in the second cache at once."""


@intrinsic
def _add_products(
    context: Any, rows: Any, given: Any, row: Any, block: Any, depth: Any, sums: Any, then: Any, share: Any
) -> Any:
    """Adds the products of up to ROWS rows, which begin at `given` and lie `row` bytes apart, with a block f32[depth,
    WIDTH] of a panel to sums f32[rows, WIDTH]. With each of the block's rows it asks for a line of what lies at `then`,
    `share` bytes behind the one before. All are i64, addresses or numbers."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        count, *others = arguments
        done = builder.append_basic_block("done")
        chosen = builder.switch(count, done)
        for some in range(1, ROWS + 1):
            case = builder.append_basic_block(f"rows_{some}")
            chosen.add_case(_number(some), case)
            builder.position_at_end(case)
            _code_of_tile(builder, some, *others)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), code


_FLOAT, _INTEGER, _LANES = ir.FloatType(), ir.IntType(64), ir.VectorType(ir.FloatType(), LANES)


def _number(n: int) -> Any:
    return ir.Constant(_INTEGER, n)


def _code_of_tile(
    builder: Any, rows: int, given: Any, row: Any, block: Any, depth: Any, sums: Any, then: Any, share: Any
) -> None:
    """The loop over a block, for so many rows."""
    times_plus = get_or_insert_function(
        builder.module, ir.FunctionType(_LANES, [_LANES] * 3), f"llvm.fmuladd.v{LANES}f32"
    )
    nothing, first = ir.Constant(_LANES, ir.Undefined), ir.Constant(ir.IntType(32), 0)
    to_all = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    tile = [(one, register) for one in range(rows) for register in range(REGISTERS)]

    def at(address: Any, number: int, kind: Any = _LANES) -> Any:
        return builder.inttoptr(builder.add(address, _number(4 * number)), kind.as_pointer())

    places = {(one, register): at(sums, one * WIDTH + register * LANES) for one, register in tile}
    begins = [builder.add(given, builder.mul(row, _number(one))) for one in range(rows)]
    begun = {each: builder.load(place, align=4) for each, place in places.items()}
    before, loop, after = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("after")
    builder.branch(loop)

    builder.position_at_end(loop)
    step = builder.phi(_INTEGER)
    sum_of = {each: builder.phi(_LANES) for each in tile}
    code_of_fetch(builder, builder.add(then, builder.mul(step, share)))
    line = builder.add(block, builder.mul(step, _number(4 * WIDTH)))
    factors = [builder.load(at(line, register * LANES), align=4) for register in range(REGISTERS)]
    here = builder.mul(step, _number(4))
    more = {}
    for one in range(rows):
        number = builder.load(at(builder.add(begins[one], here), 0, _FLOAT), align=4)
        spread = builder.shuffle_vector(builder.insert_element(nothing, number, first), nothing, to_all)
        for register, factor in enumerate(factors):
            more[one, register] = builder.call(times_plus, [spread, factor, sum_of[one, register]])
    following = builder.add(step, _number(1))
    builder.cbranch(builder.icmp_signed("<", following, depth), loop, after)
    step.add_incoming(_number(0), before)
    step.add_incoming(following, loop)
    for each in tile:
        sum_of[each].add_incoming(begun[each], before)
        sum_of[each].add_incoming(more[each], loop)

    builder.position_at_end(after)
    for each, place in places.items():
        builder.store(more[each], place, align=4)


@compiled
def _sum_up(given: Any, rows: Any, panel: Any, depth: Any, sums: Any) -> None:
    """Products of f32[rows, depth] at an address with the panel f32[depth, WIDTH] at another, to sums f32[rows or more,
    WIDTH]. What lies behind each block is asked for meanwhile: most often it is walked next."""
    sums[:rows] = 0
    tiles = (rows + ROWS - 1) // ROWS
    share = 4 * WIDTH // tiles
    for begin in range(0, depth, BLOCK):
        deep = min(BLOCK, depth - begin)
        block = panel + begin * 4 * WIDTH
        then = block + deep * 4 * WIDTH
        done = 0
        for tile in range(tiles):
            count = (rows - done + tiles - tile - 1) // (tiles - tile)  # tiles of like size: small ones wait more
            _add_products(
                count, given + (done * depth + begin) * 4, depth * 4, block, deep, address_of(sums[done:]),
                then + tile * deep * share, share,
            )  # fmt: skip
            done += count


@compiled
def _shares(given: Any, floor: Any, shares: Any) -> None:
    """What each of rows f32[n, in] is multiplied by to have length 1, or a little less where its length is hardly above
    the floor. With a floor below zero they stay what they are."""
    shares[:] = 1
    if floor >= 0:
        for row in range(len(given)):
            squares = floor * floor
            for i in range(given.shape[1]):
                squares += given[row, i] * given[row, i]
            shares[row] = np.float32(1) / np.sqrt(squares)


@compiled
def _swish(x: Any) -> Any:
    """x / (1 + e^-x)."""
    e = exp(-abs(x))
    return x * (np.float32(1) if x >= 0 else e) / (np.float32(1) + e)


@kernel_of(ProductArgs)
def product(given: Any) -> None:
    """Products of rows with a matrix in panels; a task is a panel, or two of which one gates the other, for a band of
    the rows: where there are many, also more processors than panels have work."""
    work = carray(given, 1)[0]
    rows, depth, width, sides, chunk = work.rows, work.depth, work.width, work.sides, work.chunk
    panels = (width + WIDTH - 1) // WIDTH
    out = carray(floats(work.out), (rows, width))
    bias = carray(floats(work.bias), (sides, width))
    added = carray(floats(work.added), (rows, width))
    shares, sums = np.empty(rows, np.float32), np.empty((sides, min(rows, BAND), WIDTH), np.float32)
    _shares(carray(floats(work.given), (rows, depth)), work.floor, shares)
    tasks = panels * ((rows + BAND - 1) // BAND)
    while True:
        begin = take(given, chunk)
        if begin >= tasks:
            break
        for task in range(begin, min(begin + chunk, tasks)):
            top, panel = task // panels * BAND, task % panels
            count, first = min(BAND, rows - top), panel * WIDTH
            for side in range(sides):
                matrix = work.matrix + (panel * sides + side) * depth * WIDTH * 4
                _sum_up(work.given + top * depth * 4, count, matrix, depth, sums[side])
            for i in range(count):
                row, share = top + i, shares[top + i]
                own = out[row, first : min(first + WIDTH, width)]
                for j in range(len(own)):
                    own[j] = sums[0, i, j] * share + bias[0, first + j]
                if sides == 2:
                    for j in range(len(own)):
                        own[j] = _swish(own[j]) * (sums[1, i, j] * share + bias[1, first + j])
                if work.added != 0:
                    for j in range(len(own)):
                        own[j] += added[row, first + j]


@kernel_of(PackArgs)
def pack(given: Any) -> None:
    """Panels of the rows of a matrix, each number multiplied by that of its column; a task is a panel."""
    work = carray(given, 1)[0]
    depth, width, sides = work.depth, work.width, work.sides
    panels = (width + WIDTH - 1) // WIDTH
    rows = carray(integers(work.rows), (sides, width))
    scale = carray(floats(work.scale), depth)
    out = carray(floats(work.out), (panels, sides, depth, WIDTH))
    while True:
        task = take(given, 1)
        if task >= panels * sides:
            break
        panel, side = task // sides, task % sides
        own = out[panel, side]
        for column in range(WIDTH):
            if panel * WIDTH + column < width:
                row = carray(floats(rows[side, panel * WIDTH + column]), depth)
                for i in range(depth):
                    own[i, column] = row[i] * scale[i]
            else:
                for i in range(depth):
                    own[i, column] = 0
