"""Ways to compute the attention of a forest on a CPU, side by side: seconds forward and back, in one process, in turns.

    python -m benchmarks.speed.attention
    python -m benchmarks.speed.attention --tables   only writes the table of what is kept

A group of attempts with a common prompt is attended to by nodes (what Turnstile does on a CPU), by runs with masks
(what it does where nothing better is), under one mask for all tokens, and row by row with the prompt in each of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.page import Body, Kept, spread, table, write
from benchmarks.speed.forest import group_of
from turnstile.batching.forest import pack_prefix_trees
from turnstile.batching.weights import token as token_weights
from turnstile.models.allocator import keep_freed_memory
from turnstile.models.forest_attention import attend_by_nodes, attend_by_runs, nodes_of, runs_of

Way = Callable[[], Tensor]
"""Attends once, forward."""

CASES = {  # group, prompt, answer, heads of queries and of keys
    "8 x (250 + 200), 9 and 3 heads": (8, 250, 200, 9, 3),
    "4 x (1000 + 200), 9 and 3 heads": (4, 1000, 200, 9, 3),
    "8 x (1000 + 200), 4 and 2 heads": (8, 1000, 200, 4, 2),
    "16 x (4000 + 200), 4 and 2 heads": (16, 4000, 200, 4, 2),
}
WIDTH = 64
OURS = "by nodes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tables", action="store_true", help="only write the table of what is kept")
    args = parser.parse_args()
    kept = Kept("attention")
    keep_freed_memory()
    for name, case in {} if args.tables else CASES.items():
        inputs, ways = made(*case)
        found: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(args.repeats + 1):
            for way, attend in ways.items():
                seconds = timed(attend, inputs)
                if number:  # the first round warms up
                    found[way].append(seconds)
        kept.put(name, {"seconds": found, "threads": torch.get_num_threads(), "torch": torch.__version__})
        print(name, {way: round(statistics.median(each), 4) for way, each in found.items()}, flush=True)
    write("attention", parts(kept.results))


def made(group: int, prompt: int, answer: int, heads: int, kv_heads: int) -> tuple[list[Tensor], dict[str, Way]]:
    """Queries, keys and values of a group's tree, and what attends to them."""
    rows = group_of(group, prompt, answer)
    (batch,) = pack_prefix_trees(rows, token_weights(rows), budget=10**9)
    ends, length = batch.subtree_end, batch.size
    draw = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, n, length, WIDTH, generator=draw).requires_grad_() for n in (heads, kv_heads, kv_heads)
    )
    nodes, runs, index = nodes_of(ends), runs_of(ends), torch.arange(length)
    seen = (index[None] <= index[:, None]) & (index[:, None] < ends[None])
    slots = [torch.from_numpy(batch.slots[r]) for r in range(group)]

    def by_rows() -> Tensor:
        each = []
        for own in slots:
            q, k, v = (x[:, :, own] for x in (query, key, value))
            each.append(scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
        return torch.cat(each, dim=2)

    return [query, key, value], {
        OURS: lambda: attend_by_nodes(query, key, value, nodes, None),
        "by runs": lambda: attend_by_runs(query, key, value, runs, None),
        "one mask": lambda: scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True),
        "row by row": by_rows,
    }


def timed(attend: Way, inputs: list[Tensor]) -> float:
    """Seconds of one pass forward and back."""
    started = time.perf_counter()
    out = attend()
    torch.autograd.grad(out, inputs, torch.ones_like(out))
    return time.perf_counter() - started


def parts(results: Mapping[str, Body]) -> list[str]:
    rows: list[list[Any]] = []
    for name in CASES:
        found = results.get(name, {"seconds": {}})["seconds"]
        for way, seconds in found.items():
            times = [one / ours for one, ours in zip(seconds, found[OURS], strict=True)]
            rows.append([name, way, spread([1e3 * each for each in seconds], 0), spread(times, 2)])
    return [table(("group", "way", "ms", f"times {OURS}"), rows)]


if __name__ == "__main__":
    main()
