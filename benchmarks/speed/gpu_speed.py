"""Training and decoding on an accelerator: how much of the matrix peak, and what sharing gains there.

    python -m benchmarks.speed.gpu_speed                       0.5B and 1.5B parameters with random weights, on CUDA
    python -m benchmarks.speed.gpu_speed --device cpu --tiny   does it run? Its figures mean nothing, and are not kept
    python -m benchmarks.speed.gpu_speed --tables              only writes the table of what is kept

For each size: model FLOPs utilisation of an update over one group (forward, backward, AdamW), which counts every unique
token once, against the matrix peak measured in the same run; the same rows unshared; tokens a second of sampling in the
engine, and of transformers' continuous batching over the same prompts. What is measured on an accelerator is kept, size
by size, in docs/results/performance/gpu_speed.json.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from benchmarks.page import Body, Kept, table, write
from benchmarks.speed.decode import work
from benchmarks.speed.forest import flops, group_of
from turnstile.batching.weights import token as token_weights
from turnstile.engines.local.transformers import TransformersEngine
from turnstile.losses.reinforce import reinforce
from turnstile.models.load import pick_device
from turnstile.trainer.learner import Learner, LearnerConfig, Objective
from turnstile.trainer.optim import constant
from turnstile.types import Sampling

SIZES: dict[str, dict[str, int]] = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "vocab_size": 151_936},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "vocab_size": 151_936},
}  # fmt: skip
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512}  # fmt: skip

BUDGETS = {"0.5B": 40_960, "1.5B": 20_480}
"""Unique tokens computed at once: what a forward pass leaves for the way back is some 50 GB with either."""
PROMPTS, LENGTH = 32, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--response", type=int, default=4096)
    parser.add_argument("--budget", type=int, default=0, help="unique tokens computed at once (0: what 80 GB hold)")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--decode", type=int, default=128, help="tokens sampled for each of 32 prompts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, and few tokens")
    parser.add_argument("--tables", action="store_true", help="only write the table of what is kept")
    args = parser.parse_args()
    kept = Kept("gpu_speed")
    if args.tables:
        write("gpu_speed", parts(kept.results))
        return
    if args.tiny:
        args.prompt, args.response, args.decode, args.sizes, args.dtype = 48, 32, 4, ["tiny"], "float32"
    device, dtype = pick_device(args.device), getattr(torch, args.dtype)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    peak = matrix_peak(device, dtype, 256 if args.tiny else 8192)
    about = {
        "device": name, "dtype": args.dtype, "torch": torch.__version__, "group": args.group, "prompt": args.prompt,
        "response": args.response, "peak": peak, "bandwidth": bandwidth(device, args.tiny),
    }  # fmt: skip
    for size in args.sizes:
        model = made(TINY if args.tiny else SIZES[size], device, dtype)
        budget = args.budget or BUDGETS.get(size, 1024)
        body = {
            **about,
            "max_tokens_per_microbatch": budget,
            "checkpointing": args.checkpointing,
            "training": training(model, args, budget, peak),
        }
        body["decoding"] = decoding(model, args) | work(model, PROMPTS, LENGTH + args.decode // 2)
        if device.type != "cpu":
            kept.put(" ".join([name, args.dtype, shape_of(body), size]), body)
            write("gpu_speed", parts(kept.results))
        print(size, json.dumps(body), flush=True)
        del model
        gc.collect()


def shape_of(body: Body) -> str:
    """The group of an update, in short."""
    shape = f"{body['group']} x ({body['prompt']} + {body['response']})"
    return f"{shape}, checkpointing" if body["checkpointing"] else shape


def parts(results: Mapping[str, Body]) -> list[str]:
    rows = []
    for name, body in results.items():
        shared, unshared = body["training"]["shared"], body["training"]["unshared"]
        decoding, size = body["decoding"], name.split()[-1]
        gained, ratio = body["training"]["speed-up"], body["training"]["ratio of FLOPs"]
        rows.append([
            body["device"], size, body["dtype"], shape_of(body),
            f"{body['peak'] / 1e12:.0f}", f"{shared['utilisation']:.0%}", f"{unshared['utilisation']:.0%}",
            f"{gained:.2f} of {ratio:.2f}", shared.get("peak memory, GiB", "-"),
            f"{decoding['engine']:,.0f}", f"{decoding.get('continuous batching', float('nan')):,.0f}",
            f"{decoding['mb']:.0f}", f"{decoding['engine'] * decoding['mb'] * 1e6 / body['bandwidth']:.0%}",
        ])  # fmt: skip
    head = ("device", "model", "", "group", "matrix peak, TFLOP/s", "of it, shared", "of it, unshared",
            "speed-up of the ratio of FLOPs", "GiB", "decoding, tokens/s", "continuous batching", "MB a token",
            "of bandwidth")  # fmt: skip
    return [table(head, rows)]


def made(shape: dict[str, Any], device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A Qwen2 with random weights."""
    torch.manual_seed(0)
    config = Qwen2Config(**shape, max_position_embeddings=32_768, tie_word_embeddings=True, dtype=dtype)
    model: Any = Qwen2ForCausalLM(config)
    network: PreTrainedModel = model.to(device, dtype).eval()
    return network


def timed(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds, the median; the first time, which compiles, is not counted."""
    seconds = []
    for number in range(repeats + 1):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number:
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def matrix_peak(device: torch.device, dtype: torch.dtype, size: int) -> float:
    one = torch.randn(size, size, device=device, dtype=dtype)
    return 10 * 2 * size**3 / timed(lambda: [one @ one for _ in range(10)], device, 3)


def bandwidth(device: torch.device, tiny: bool) -> float:
    """Bytes a second of reading memory."""
    much = torch.ones(2**20 if tiny else 2**30, device=device)
    return much.nbytes / timed(much.sum, device, 3)


def training(model: PreTrainedModel, args: argparse.Namespace, budget: int, peak: float) -> dict[str, Any]:
    """An update with and without sharing."""
    rows = group_of(args.group, args.prompt, args.response, model.config.vocab_size)
    objective = Objective(loss=reinforce, aggregation=token_weights)
    found: dict[str, Any] = {}
    for name, share in (("shared", True), ("unshared", False)):
        if model.device.type == "cuda":  # nothing of what ran before is to count
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(model.device)
        plan = LearnerConfig(
            lr=1e-6, schedule=constant, warmup=0, total=100, budget=budget, share=share,
            checkpointing=args.checkpointing,
        )  # fmt: skip
        learner = Learner(model, list(model.parameters()), plan)
        seconds = timed(functools.partial(learner.update, rows, objective), model.device, args.repeats)
        rate = flops(model, rows, share=share) / seconds
        found[name] = {"seconds": round(seconds, 3), "utilisation": round(rate / peak, 3)}
        if model.device.type == "cuda":
            found[name]["peak memory, GiB"] = round(torch.cuda.max_memory_allocated(model.device) / 2**30, 2)
        del learner
    found["speed-up"] = round(found["unshared"]["seconds"] / found["shared"]["seconds"], 2)
    found["ratio of FLOPs"] = round(flops(model, rows, share=False) / flops(model, rows, share=True), 2)
    return found


def decoding(model: PreTrainedModel, args: argparse.Namespace) -> dict[str, float]:
    """Tokens a second for prompts of one length, prompts included in the time."""
    draw = np.random.default_rng(1)
    prompts = [draw.integers(3, model.config.vocab_size, LENGTH).astype(np.int32) for _ in range(PROMPTS)]
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))  # no text is made
    engine = TransformersEngine(
        model, words, speculative_tokens=0
    )  # the same prompts come again: it would know the answers

    async def sample() -> None:
        async def one(number: int) -> None:
            session = engine.open(f"prompt {number}")
            await engine.generate(prompts[number], Sampling(max_tokens=args.decode, seed=number), session)
            engine.close(session)

        await asyncio.gather(*map(one, range(len(prompts))))

    tokens = len(prompts) * args.decode
    found = {"engine": tokens / timed(lambda: asyncio.run(sample()), model.device, args.repeats)}
    if model.device.type == "cuda":  # transformers pages its keys and values there alone
        model.set_attn_implementation("sdpa")
        how = GenerationConfig(max_new_tokens=args.decode, do_sample=True, eos_token_id=-1, pad_token_id=0)
        inputs = [prompt.tolist() for prompt in prompts]

        def batched() -> object:
            return model.generate_batch(inputs, generation_config=how)  # type: ignore[operator]

        found["continuous batching"] = tokens / timed(batched, model.device, args.repeats)
    return {name: round(rate, 1) for name, rate in found.items()}


if __name__ == "__main__":
    main()
