"""The compiled kernels of sampling beside what torch has for the same: milliseconds, in one process, in turns.

    python -m benchmarks.speed.compiled
    python -m benchmarks.speed.compiled --tables   only writes the tables of what is kept

What is multiplied by are matrices of the sizes that SmolLM2-135M has, all of them one after the other, as in a pass:
each comes from memory. Attention is that of one token a sequence, in all layers one after the other, whose keys and
values come from memory as well.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from benchmarks.page import Body, Kept, spread, table, write
from benchmarks.speed.decode import bandwidth, peak
from turnstile.engines.local.cpu.compiled import KernelAttention, is_available
from turnstile.engines.local.cpu.packed_matrix import PackedMatrix

Way = Callable[[], None]
"""Computes all of it once."""

LAYERS, HEADS, KV_HEADS, WIDTH = 30, 9, 3, 64
IN_LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))
"""Numbers that come out and go in: queries, keys and values; what was seen; gate and up; down."""
HEAD = (49152, 576)
ROWS = (1, 4, 8, 16, 32, 64, 256)
SEEN = ((32, 96), (8, 1000))
"""Sequences, and the tokens of each."""
OURS = "compiled"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--tables", action="store_true", help="only write the tables of what is kept")
    args = parser.parse_args()
    kept = Kept("compiled")
    if not args.tables:
        if not is_available():
            parser.exit(2, "error: kernels cannot be compiled here: pip install 'turnstile-rl[cpu]', on Linux\n")
        about: Body = {"threads": torch.get_num_threads(), "torch": torch.__version__}
        about |= {"peak": peak(), "bandwidth": bandwidth()}
        products = Products()
        for rows in ROWS:
            kept.put(f"products {rows}", {**about, "ms": in_turns(products.ways(rows), args.repeats)})
        for count, length in SEEN:
            kept.put(f"attention {count}x{length}", {**about, "ms": in_turns(attending(count, length), args.repeats)})
    write("compiled", parts(kept.results))


@torch.no_grad()
def in_turns(ways: Mapping[str, Way], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each, once a repeat."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(repeats + 1):
        for name, compute in ways.items():
            started = time.perf_counter()
            compute()
            if number:  # the first round warms up
                found[name].append(1e3 * (time.perf_counter() - started))
    print({name: round(statistics.median(each), 2) for name, each in found.items()}, flush=True)
    return found


class Products:
    """The matrices of a model, in two layouts."""

    def __init__(self) -> None:
        self._plain = [torch.randn(shape) for shape in (*IN_LAYER * LAYERS, HEAD)]
        self._panels = [PackedMatrix([matrix]) for matrix in self._plain]
        self.flops = 2 * sum(matrix.numel() for matrix in self._plain)

    def ways(self, rows: int) -> dict[str, Way]:
        x = {depth: torch.randn(rows, depth) for depth in {matrix.shape[1] for matrix in self._plain}}
        inputs = [x[matrix.shape[1]] for matrix in self._plain]

        def ours() -> None:
            for panels, given in zip(self._panels, inputs, strict=True):
                panels(given)

        def plain() -> None:
            for matrix, given in zip(self._plain, inputs, strict=True):
                linear(given, matrix)

        return {OURS: ours, "torch": plain}


def attending(count: int, length: int) -> dict[str, Way]:
    kept = torch.randn(LAYERS, 2, count, KV_HEADS, length, WIDTH)
    query = torch.randn(count, HEADS, 1, WIDTH)
    attention = KernelAttention([[(kept, row, length)] for row in range(count)])
    across = query[:, :, 0].transpose(0, 1)[None]

    def ours() -> None:
        for layer in range(LAYERS):
            attention.attend(layer, across, WIDTH**-0.5)

    def torchs() -> None:
        for keys, values in kept:
            scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    return {OURS: ours, "torch": torchs}


def parts(results: Mapping[str, Body]) -> list[str]:
    products: list[list[Any]] = []
    for rows in ROWS:
        if body := results.get(f"products {rows}"):
            products += beside(str(rows), body["ms"])
    attention: list[list[Any]] = []
    for count, length in SEEN:
        if body := results.get(f"attention {count}x{length}"):
            attention += beside(f"{count} of {length} tokens", body["ms"])
    return [
        table(("rows", "products", "ms", f"times {OURS}"), products),
        table(("sequences", "attention", "ms", f"times {OURS}"), attention),
    ]


def beside(what: str, found: Mapping[str, list[float]]) -> list[list[Any]]:
    return [
        [what, way, spread(ms, 1), spread([one / ours for one, ours in zip(ms, found[OURS], strict=True)], 2)]
        for way, ms in found.items()
    ]


if __name__ == "__main__":
    main()
