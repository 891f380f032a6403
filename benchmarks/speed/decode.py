"""Tokens a second of sampling: the engine beside `model.generate` and a forward pass written by hand, in one run.

    python -m benchmarks.speed.decode                   all cases
    python -m benchmarks.speed.decode --cases 32x64x1   batch x prompt tokens x attempts that share a prompt
    python -m benchmarks.speed.decode --tables          only writes the tables of what is kept

All decode the same number of tokens after prompts of one length, in turns, several times; what counts is the median
of the decoding alone: the time for many tokens less the time for one, with tokens enough that what the prompts' time
varies by is small beside it. The hand-written pass is of the Llama family, with its projections fused and a cache of
fixed size: what the same weights can do on this machine when nothing has to be shared, stopped or left.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu
from transformers import PreTrainedModel

from benchmarks.page import Body, Kept, spread, table, write
from turnstile.engines.local.cpu.compiled import is_available
from turnstile.engines.local.cpu.packed_weights import PackedWeight
from turnstile.engines.local.kv_cache import cache_shape_of
from turnstile.engines.local.transformers import TransformersEngine
from turnstile.models.load import load_model, load_tokenizer
from turnstile.types import Sampling

Decode = Callable[[Tensor, int], None]
"""Decodes that many tokens after prompts i64[B, n]."""
CASES = ("1x64x1", "8x64x1", "32x64x1", "32x300x8")
BESIDE = ("generate", "by hand")
"""What the others are compared with."""


class DecodeAfter(Protocol):
    """A `Decode` whose prompts come after as many tokens as `after` says. Nothing is computed for those, as their keys
    and values are ones: late passes can be timed without the long prompt before them."""

    def __call__(self, prompts: Tensor, count: int, after: int = 0) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--only", nargs="+", help="contestants, besides generate and by hand")
    parser.add_argument("--tokens", type=int, default=64, help="tokens decoded after each prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="default: torch's own choice")
    parser.add_argument("--tables", action="store_true")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    kept = Kept("decode")
    for case in () if args.tables else args.cases:
        batch, prompt, sharing = map(int, case.split("x"))
        model = load_model(args.model).requires_grad_(False)
        contestants: dict[str, Decode] = {
            "generate": generating(copy.deepcopy(model)),
            "by hand": by_hand(model, packed=False),
            "by hand, packed": by_hand(model, packed=True),
            "engine": through_engine(model, args.model, sharing),
            "engine, packed = false": through_engine(model, args.model, sharing, pack_weights=False),
            "engine, deterministic": through_engine(model, args.model, sharing, deterministic=True, max_batch=batch),
        }
        if args.only:
            contestants = {name: run for name, run in contestants.items() if name in (*BESIDE, *args.only)}
        draw = torch.Generator().manual_seed(batch)
        prompts = torch.randint(100, 10_000, (batch // sharing, prompt), generator=draw).repeat_interleave(sharing, 0)
        rates = measure(contestants, prompts, args.tokens, args.repeats)
        about = {"threads": torch.get_num_threads(), "torch": torch.__version__, "numba": is_available()}
        about |= {"load": os.getloadavg()[0]}
        limits = {"peak": peak(), "bandwidth": bandwidth(), **work(model, batch, prompt + args.tokens // 2)}
        kept.put(f"{args.model} {case}", {**about, "tokens": args.tokens, "rates": rates, **limits})
        write("decode", parts(kept.results))
    if args.tables:
        write("decode", parts(kept.results))


def peak() -> float:
    """GFLOP/s of multiplying square matrices of 1024, the best of ten."""
    one = torch.randn(1024, 1024)
    seconds = []
    for _ in range(10):
        started = time.perf_counter()
        one @ one
        seconds.append(time.perf_counter() - started)
    return 2 * 1024**3 / min(seconds) / 1e9


def bandwidth() -> float:
    """GB/s of reading memory, the best of five."""
    much = torch.ones(150_000_000)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        much.sum()
        seconds.append(time.perf_counter() - started)
    return much.nbytes / min(seconds) / 1e9


def work(model: PreTrainedModel, batch: int, length: int) -> dict[str, float]:
    """What a decoded token takes: GFLOPs in the matrices, and MB read, its share of the weights and the keys and values
    of its own sequence."""
    shape = cache_shape_of(model)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    kept = 2 * shape.layers * shape.kv_heads * shape.head_dim * length
    return {"gflop": 2 * numbers / 1e9, "mb": shape.dtype.itemsize * (numbers / batch + kept) / 1e6}


def parts(results: Mapping[str, Body]) -> list[str]:
    rows = []
    order = {case: place for place, case in enumerate(CASES)}
    for name, body in sorted(results.items(), key=lambda item: (order.get(item[0].split()[1], 99), item[0])):
        batch, prompt, sharing = name.split()[1].split("x")
        what = f"{batch}, prompts of {prompt}" + (f", groups of {sharing}" if sharing != "1" else "")
        for side, found in body["rates"].items():
            ratios = [
                spread([one / other for one, other in zip(found, body["rates"][beside], strict=True)], 2)
                for beside in BESIDE
            ]
            rate = statistics.median(found)
            limits = [
                f"{rate * body['gflop'] / body['peak']:.0%}",
                f"{rate * body['mb'] / 1e3 / body['bandwidth']:.0%}",
            ]
            rows.append([what, side, spread(found, 0), *ratios, f"{body['mb']:.0f}", *limits])
    head = ("batch", "", "tokens a second", "times generate", "times by hand")
    return [table((*head, "MB a token", "of matrix peak", "of bandwidth"), rows)]


def measure(contestants: Mapping[str, Decode], prompts: Tensor, tokens: int, repeats: int) -> dict[str, list[float]]:
    """Tokens a second of each, once a repeat; in turns, so that what else the machine does falls on all."""
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(repeats + 1):
        for name, decode in contestants.items():
            seconds = [timed(decode, prompts, count) for count in (1, tokens + 1)]
            if number:  # the first round warms up
                rates[name].append(tokens * len(prompts) / (seconds[1] - seconds[0]))
    return rates


def timed(decode: Decode, prompts: Tensor, count: int) -> float:
    started = time.perf_counter()
    decode(prompts, count)
    return time.perf_counter() - started


def generating(model: PreTrainedModel) -> Decode:
    """transformers' own `generate`, sampling at temperature 1."""

    def decode(prompts: Tensor, count: int) -> None:
        found = model.generate(  # type: ignore[operator]
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, max_new_tokens=count,
            min_new_tokens=count, pad_token_id=0,
        )  # fmt: skip
        assert found.shape[1] == prompts.shape[1] + count

    return decode


def through_engine(model: PreTrainedModel, name: str, sharing: int, **knobs: Any) -> Decode:
    """Turnstile's engine; each group of `sharing` prompts is one. Without guesses: the same prompts come again and
    again, and it would know the answers."""
    engine = TransformersEngine(model, load_tokenizer(name), **{"max_batch": 256, "speculative_tokens": 0, **knobs})

    def decode(prompts: Tensor, count: int) -> None:
        async def one(number: int) -> None:
            session = engine.open(f"group {number // sharing}")
            sampling = Sampling(max_tokens=count, seed=number)
            found = await engine.generate(prompts[number].numpy().astype(np.int32), sampling, session)
            assert len(found.token_ids) == count
            engine.close(session)

        async def all_of_them() -> None:
            await asyncio.gather(*map(one, range(len(prompts))))

        asyncio.run(all_of_them())

    return decode


def plain(weights: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    whole = torch.cat(list(weights))
    return lambda x: linear(x, whole)


def reordered(weights: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    layer = torch.nn.Linear(weights[0].shape[1], 1, bias=False)
    layer.weight = torch.nn.Parameter(torch.cat(list(weights)), requires_grad=False)
    packed = PackedWeight(layer)
    packed.refresh()
    return packed


@torch.no_grad()
def by_hand(model: PreTrainedModel, *, packed: bool) -> DecodeAfter:
    """A forward pass over the weights of a Llama, with one cache of fixed size for the whole batch."""
    by = reordered if packed else plain
    config: Any = model.config
    decoder: Any = model.get_decoder()
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    layers = [
        (
            by([layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight]),
            by([layer.self_attn.o_proj.weight]),
            by([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]),
            by([layer.mlp.down_proj.weight]),
            layer.input_layernorm.weight,
            layer.post_attention_layernorm.weight,
        )
        for layer in decoder.layers
    ]
    head = by([model.get_output_embeddings().weight])

    def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        one, other = x.chunk(2, dim=-1)
        return x * cosine + torch.cat([-other, one], dim=-1) * sine

    def forward(tokens: Tensor, cache: Tensor, begin: int) -> Tensor:
        """Logits [B, V] after tokens [B, n], which follow `begin` others in `cache` [layers, 2, B, Hkv, room, D]."""
        batch, length = tokens.shape
        hidden = embedding(tokens, decoder.embed_tokens.weight)
        cosine, sine = decoder.rotary_emb(hidden, torch.arange(begin, begin + length)[None])
        end = begin + length
        for kept, (qkv, out, gate_up, down, before, after) in zip(cache, layers, strict=True):
            mixed = qkv(rms_norm(hidden, hidden.shape[-1:], before, config.rms_norm_eps))
            mixed = mixed.view(batch, length, heads + 2 * kv_heads, width).transpose(1, 2)
            query, key, value = mixed.split([heads, kv_heads, kv_heads], dim=1)
            kept[0, :, :, begin:end], kept[1, :, :, begin:end] = rotated(key, cosine, sine), value
            seen = scaled_dot_product_attention(
                rotated(query, cosine, sine), kept[0, :, :, :end], kept[1, :, :, :end], is_causal=length > 1,
                enable_gqa=True,
            )  # fmt: skip
            hidden = hidden + out(seen.transpose(1, 2).reshape(batch, length, heads * width))
            gate, up = gate_up(rms_norm(hidden, hidden.shape[-1:], after, config.rms_norm_eps)).chunk(2, -1)
            hidden = hidden + down(silu(gate) * up)
        return head(rms_norm(hidden[:, -1], hidden.shape[-1:], decoder.norm.weight, config.rms_norm_eps))

    @torch.no_grad()
    def decode(prompts: Tensor, count: int, after: int = 0) -> None:
        batch, length = prompts.shape
        cache = torch.empty(len(layers), 2, batch, kv_heads, after + length + count, width)
        cache[..., :after, :] = 1.0  # memory that was never written would be read for nothing
        tokens, begin = prompts, after
        for _ in range(count):
            logits = forward(tokens, cache, begin)
            begin += tokens.shape[1]
            tokens = torch.multinomial(logits.softmax(dim=-1), 1)

    return decode


if __name__ == "__main__":
    main()
