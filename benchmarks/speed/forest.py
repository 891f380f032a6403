"""Training on shared prefixes: seconds and memory of an update, shared, unshared, and as a plain loop would do it.

    python -m benchmarks.speed.forest               the grid; what is measured is not measured again
    python -m benchmarks.speed.forest --minutes 4   stops in between, and goes on with the next call
    python -m benchmarks.speed.forest --again       measures again what is kept
    python -m benchmarks.speed.forest --memory      counts what updates allocate; other processes do not matter to that
    python -m benchmarks.speed.forest --tables      only writes the tables of what is kept

A group of attempts at one task shares its prompt. One update (forward, backward, clipping, AdamW, all weights) over
such a group is timed in a process of its own, for four contestants with the same weights, rows and optimiser:

- `shared`: Turnstile's learner; the prompt is computed once
- `unshared`: the same learner with every row by itself, as many of them at once as it sees fit
- `batches`: a plain loop over the model as transformers runs it, as many rows at once as `unshared`
- `rows`: the same loop, one row at a time

The plain loops project only the answers to the vocabulary, as the learner does. Contestants take turns, and their order
changes from repeat to repeat. Measurements are kept in docs/results/performance/forest.json, each with its commit.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import multiprocessing
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.page import Body, Kept, spread, table, write
from turnstile.batching.forest import pack_prefix_trees
from turnstile.batching.weights import token as token_weights
from turnstile.losses.reinforce import reinforce
from turnstile.models.allocator import keep_freed_memory
from turnstile.models.load import load_model
from turnstile.trainer.learner import Learner, LearnerConfig, Objective
from turnstile.trainer.optim import constant
from turnstile.types import F32, Row

SMALL, SMOLLM2 = "llama-8m", "smollm2-135m"
MEMORY = "memory"  # where others have their repeat
RESPONSE = 200  # tokens of each attempt, all of them trained
CONTESTANTS = ("shared", "unshared", "batches", "rows")
LEAST_SECONDS = 2.0  # of a measurement; short updates are repeated


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One group of attempts at a task."""

    model: str
    group: int
    prompt: int
    budget: int  # tokens computed at once

    @property
    def contestants(self) -> tuple[str, ...]:
        """Batches of one row are rows."""
        return tuple(c for c in CONTESTANTS if c != "batches" or self.at_once > 1)

    @property
    def at_once(self) -> int:
        """Rows that `unshared` takes at once, and `batches` with it."""
        rows = group_of(self.group, self.prompt, RESPONSE)
        return -(-self.group // len(pack_prefix_trees(rows, token_weights(rows), budget=self.budget, share=False)))

    @property
    def name(self) -> str:
        return f"{self.model} {self.group} x {self.prompt}"


GRID = tuple(
    Point(model=SMALL, group=group, prompt=prompt, budget=8192) for prompt in (250, 1000, 4000) for group in (4, 8, 16)
)
POINTS = (
    *GRID,
    Point(model=SMOLLM2, group=8, prompt=250, budget=2400),
    Point(model=SMOLLM2, group=4, prompt=1000, budget=2400),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=0, help="begin no measurement after these (0: no limit)")
    parser.add_argument("--only", default="", help="a part of the names of points, like '8m 4 x' or 'smollm2'")
    parser.add_argument("--threads", type=int, default=0, help="default: torch's own choice")
    parser.add_argument("--memory", action="store_true", help="count what updates allocate, and time nothing")
    parser.add_argument("--again", action="store_true", help="measure again what is kept")
    parser.add_argument("--tables", action="store_true", help="only write the tables of what is kept")
    args = parser.parse_args()
    if args.again and args.minutes:
        parser.error("--again begins anew with each call and would not come to the end; leave out --minutes")
    kept, began = Kept("forest"), time.monotonic()
    work, repeats = (allocated, [MEMORY]) if args.memory else (measure, list(map(str, range(args.repeats))))
    for point, contestant, repeat in [] if args.tables else plan(repeats, args.only):
        name = f"{point.name} {contestant} {repeat}"
        if name in kept.results and not args.again:
            continue
        if args.minutes and time.monotonic() - began > 60 * args.minutes:
            print("stopped; the next call goes on", flush=True)
            break
        kept.put(name, in_a_process(work, point, contestant, args.threads))
        print(name, json.dumps(kept.results[name]), flush=True)
    write("forest", parts(kept.results))


def plan(repeats: Sequence[str], only: str) -> Iterator[tuple[Point, str, str]]:
    """All measurements in their order."""
    for number, repeat in enumerate(repeats):
        turned = CONTESTANTS[number % 4 :] + CONTESTANTS[: number % 4]
        for point in POINTS:
            if only in point.name:
                yield from ((point, contestant, repeat) for contestant in turned if contestant in point.contestants)


def in_a_process(work: Callable[..., Body], *arguments: Any) -> Body:
    """Runs `work` in a process of its own, whose memory has seen nothing else but the imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["turnstile.trainer.learner", "turnstile.models.load"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(work, *arguments).result()


def measure(point: Point, contestant: str, threads: int) -> Body:
    """Seconds of one update by the clock and of the processor (all cores), the highest memory of the process in MB, and
    the matrix peak before in GFLOP/s."""
    if threads:
        torch.set_num_threads(threads)
    keep_freed_memory()  # as training does
    model = load(point.model)
    update, rows = updating(model, contestant, point.budget), group_of(point.group, point.prompt, RESPONSE)
    update(rows)  # the optimiser's moments, the kernels and the memory are there from now on
    seconds: list[float] = []
    peak, used = matrix_peak(), time.process_time()
    while sum(seconds) < LEAST_SECONDS:
        started = time.perf_counter()
        update(rows)
        seconds.append(time.perf_counter() - started)
    used = (time.process_time() - used) / len(seconds)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if platform.system() == "Linux" else 2**20)
    found = {"seconds": statistics.median(seconds), "processor": used, "peak_mb": memory, "gflops_peak": peak}
    return {name: round(value, 3) for name, value in found.items()}


def allocated(point: Point, contestant: str, threads: int) -> Body:
    """The most that the tensors of one update take at once, beyond weights and moments, in MB."""
    if threads:
        torch.set_num_threads(threads)
    update = updating(load(point.model), contestant, point.budget)
    update(group_of(2, 64, 16))
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            update(group_of(point.group, point.prompt, RESPONSE))
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: float(event["ts"]))
    held = itertools.accumulate(event["args"]["Bytes"] for event in changes)
    return {"allocated_mb": round(max(held) / 1e6, 1)}


def load(name: str) -> PreTrainedModel:
    if name != SMALL:
        return load_model(name, device="cpu", dtype="float32")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=704, num_hidden_layers=9, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    model: PreTrainedModel = LlamaForCausalLM(config).eval()
    return model


def group_of(group: int, prompt: int, response: int, vocabulary: int = 4000) -> list[Row]:
    """Random attempts that share a random prompt and nothing else."""
    draw, length = np.random.default_rng(0), prompt + response
    head, rows = draw.integers(3, vocabulary, prompt), []
    mask = np.arange(length) >= prompt
    for number in range(group):
        answer = draw.integers(3, vocabulary, response)
        answer[0] = 3 + number
        rows.append(
            Row(
                token_ids=np.concatenate([head, answer]).astype(np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, -8, 0).astype(np.float32),
                advantages=np.where(mask, draw.normal(), 0).astype(np.float32),
                turn_ids=np.where(mask, 0, -1).astype(np.int32),
                versions=np.zeros(length, np.int32),
                origin=("group", number),
            )
        )
    return rows


def updating(model: PreTrainedModel, contestant: str, budget: int) -> Callable[[Sequence[Row]], None]:
    """What makes one optimiser step over rows."""
    plan = LearnerConfig(lr=1e-5, schedule=constant, warmup=0, total=100, budget=budget, share=contestant == "shared")
    learner = Learner(model, list(model.parameters()), plan)
    if contestant in ("shared", "unshared"):
        objective = Objective(loss=reinforce, aggregation=token_weights)
        return lambda rows: ignore(learner.update(rows, objective))
    model.set_attn_implementation("sdpa")

    def plain(rows: Sequence[Row]) -> None:
        weights = token_weights(rows)
        whole = pack_prefix_trees(rows, weights, budget=budget, share=False)
        size = -(-len(rows) // len(whole)) if contestant == "batches" else 1
        for begin in range(0, len(rows), size):
            plain_loss(model, rows[begin : begin + size], weights[begin : begin + size]).backward()
        learner._step()

    return plain


def ignore(_: object) -> None:
    return None


def plain_loss(model: PreTrainedModel, rows: Sequence[Row], weights: Sequence[F32]) -> Tensor:
    """Sum of w * -A * log pi over the answers of rows of one length, from the model's own logits."""
    tokens = torch.from_numpy(np.stack([row.token_ids for row in rows])).long()
    count = int(rows[0].loss_mask.sum())
    factors = [row.advantages[-count:] * w[-count:] for row, w in zip(rows, weights, strict=True)]
    logits = model(tokens, use_cache=False, logits_to_keep=count + 1).logits[:, :-1]
    nats = cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, -count:].reshape(-1), reduction="none")
    return (nats * torch.from_numpy(np.concatenate(factors))).sum()


def matrix_peak(size: int = 1024) -> float:
    """GFLOP/s of multiplying square matrices, the best of a few."""
    one, best = torch.randn(size, size), 0.0
    for _ in range(8):
        started = time.perf_counter()
        one @ one
        best = max(best, 2 * size**3 / (time.perf_counter() - started) / 1e9)
    return best


def flops(model: PreTrainedModel, rows: Sequence[Row], *, share: bool) -> float:
    """Floating-point operations of an update, counted exactly: every matrix and every pair that sees each other.

    A pass backward takes twice what the pass forward takes; what kernels compute again is not counted.
    """
    config: Any = model.config
    head = model.get_output_embeddings().weight.numel()
    linear = sum(m.weight.numel() for m in model.get_decoder().modules() if isinstance(m, nn.Linear))
    width = config.num_attention_heads * (
        getattr(config, "head_dim", 0) or config.hidden_size // config.num_attention_heads
    )
    forward = 0.0
    for batch in pack_prefix_trees(rows, token_weights(rows), budget=10**9, share=share):
        pairs = int((batch.positions + 1).sum())
        forward += 2 * linear * batch.size + 2 * head * len(batch.target) + 4 * width * config.num_hidden_layers * pairs
    return 3 * forward


@functools.cache
def shape(name: str) -> PreTrainedModel:
    """A model's matrices without their numbers."""
    with torch.device("meta"):
        if name == SMALL:
            return load(name)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
                num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
            )
        )  # fmt: skip


class Found:
    """What was measured of a point, over the repeats that all its contestants have."""

    def __init__(self, point: Point, measurements: Mapping[str, Body]) -> None:
        self.point = point
        self.by: dict[str, dict[str, Body]] = {contestant: {} for contestant in point.contestants}
        self._allocated: dict[str, float] = {}
        for name, one in measurements.items():
            what, _, repeat = name.rpartition(" ")
            for contestant, found in self.by.items():
                if what == f"{point.name} {contestant}" and repeat == MEMORY:
                    self._allocated[contestant] = one["allocated_mb"]
                elif what == f"{point.name} {contestant}":
                    found[repeat] = one
        self.repeats = sorted(set.intersection(*(set(found) for found in self.by.values())), key=int)

    def median(self, contestant: str, what: str = "seconds") -> float:
        return statistics.median(float(self.by[contestant][r][what]) for r in self.repeats)

    def ratios(self, slow: str, fast: str, what: str = "seconds") -> list[float]:
        return [self.by[slow][r][what] / self.by[fast][r][what] for r in self.repeats]

    def ideal(self) -> float:
        """How many times the FLOPs unshared rows take of shared ones."""
        rows, model = group_of(self.point.group, self.point.prompt, RESPONSE), shape(self.point.model)
        return flops(model, rows, share=False) / flops(model, rows, share=True)

    def speed_up(self) -> float:
        return statistics.median(self.ratios("unshared", "shared"))

    def widest(self) -> str:
        """The plain loop that takes as many rows at once as `unshared`."""
        return "batches" if "batches" in self.by else "rows"

    def resident(self, contestant: str) -> float | None:
        """MB of the process."""
        return self.median(contestant, "peak_mb") if contestant in self.by else None

    def allocated(self, contestant: str) -> float | None:
        """MB that an update allocates at most, if it was counted."""
        return self._allocated.get(contestant)


def parts(results: Mapping[str, Body]) -> list[str]:
    found = [one for point in POINTS if (one := Found(point, results)).repeats]
    return [speed_table(found), plain_table(found), memory_table(found)]


COLUMNS = ("model", "group", "prompt")


def speed_table(found: Iterable[Found]) -> str:
    rows = []
    for one in found:
        work = flops(shape(one.point.model), group_of(one.point.group, one.point.prompt, RESPONSE), share=True)
        ideal = one.ideal()
        clock, processor = (one.ratios("unshared", "shared", what) for what in ("seconds", "processor"))
        runs = [one.by["shared"][repeat] for repeat in one.repeats]
        rates = [work / run["seconds"] / 1e9 / run["gflops_peak"] for run in runs]
        rows.append([
            *place(one.point), len(one.repeats), f"{one.median('unshared'):.2f}", f"{one.median('shared'):.2f}",
            f"{ideal:.2f}", spread(clock, 2), f"{statistics.median(clock) / ideal:.0%}",
            f"{statistics.median(processor) / ideal:.0%}", f"{statistics.median(rates):.0%}",
        ])  # fmt: skip
    head = ("repeats", "unshared, s", "shared, s", "ratio of FLOPs", "speed-up", "of the ratio", "by processor time",
            "of matrix peak")  # fmt: skip
    return table((*COLUMNS, *head), rows)


def plain_table(found: Iterable[Found]) -> str:
    rows = []
    for one in found:
        tokens = one.point.group * (one.point.prompt + RESPONSE)
        cells = [f"{tokens / one.median(c):,.0f}" if c in one.by else "=" for c in ("rows", "batches", "unshared")]
        cells += [
            spread(one.ratios(plain, "unshared", what), 0, "%") if plain in one.by else "="
            for plain in ("rows", "batches")
            for what in ("seconds", "processor")
        ]
        rows.append([*place(one.point), one.point.at_once, *cells])
    head = ("rows at once", "rows, tokens/s", "batches, tokens/s", "unshared, tokens/s", "unshared / rows",
            "by processor time", "unshared / batches", "by processor time")  # fmt: skip
    return table((*COLUMNS, *head), rows)


def memory_table(found: Iterable[Found]) -> str:
    columns = ("rows", "batches", "unshared", "shared")
    rows = []
    for one in found:
        cells = [
            "=" if column not in one.by else "-" if (found_mb := which(column)) is None else f"{found_mb:,.0f}"
            for which in (one.resident, one.allocated)
            for column in columns
        ]
        rows.append([*place(one.point), *cells])
    head = [f"{column}, MB{what}" for what in ("", " allocated") for column in columns]
    return table((*COLUMNS, *head), rows)


def place(point: Point) -> list[Any]:
    return [point.model, point.group, point.prompt]


if __name__ == "__main__":
    main()
