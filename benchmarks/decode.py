"""Tokens a second of sampling: the engine beside `model.generate` and a forward pass written by hand, in one run.

    python benchmarks/decode.py --model smollm2-135m --batch 1 8 32

All decode the same number of tokens after prompts of one length, in turns, several times; what is shown is the median
of the decoding alone (the time for many tokens less the time for one) and the range. The hand-written pass is of the
Llama family, with its projections fused and a cache of fixed size: what the same weights can do on this machine when
nothing has to be shared, stopped or left.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu
from transformers import PreTrainedModel

from turnstile.engines.transformers import TransformersEngine
from turnstile.models.load import load_model, load_tokenizer
from turnstile.types import Sampling

Decode = Callable[[Tensor, int], None]
"""Decodes that many tokens after prompts i64[B, n]."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=32, help="tokens decoded after it")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="default: torch's own choice")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    model = load_model(args.model)
    contestants = {
        "generate": generating(copy.deepcopy(model)),
        "by hand": by_hand(model),
        "engine": through_engine(model, args.model, packed=True),
        "engine, weights as they are": through_engine(model, args.model, packed=False),
    }
    report: dict[str, Any] = {"model": args.model, "threads": torch.get_num_threads(), "torch": torch.__version__}
    for batch in args.batch:
        draw = torch.Generator().manual_seed(batch)
        prompts = torch.randint(100, 10_000, (batch, args.prompt), generator=draw)
        rates = measure(contestants, prompts, args.tokens, args.repeats)
        medians = {name: statistics.median(found) for name, found in rates.items()}
        report[f"batch {batch}"] = {
            name: {
                "tokens a second": round(medians[name], 1),
                "range": [round(min(found), 1), round(max(found), 1)],
                "times generate": round(medians[name] / medians["generate"], 2),
                "of by hand": round(medians[name] / medians["by hand"], 2),
            }
            for name, found in rates.items()
        }
    print(json.dumps(report, indent=2))


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


def through_engine(model: PreTrainedModel, name: str, *, packed: bool) -> Decode:
    """Turnstile's engine, every prompt a session of a group of its own, so that nothing is shared."""
    engine = TransformersEngine(model, load_tokenizer(name), packed=packed, max_batch=256)

    def decode(prompts: Tensor, count: int) -> None:
        async def one(number: int) -> None:
            session = engine.open(f"prompt {number}")
            sampling = Sampling(max_tokens=count, seed=number)
            found = await engine.generate(prompts[number].numpy().astype(np.int32), sampling, session)
            assert len(found.token_ids) == count
            engine.close(session)

        async def all_of_them() -> None:
            await asyncio.gather(*map(one, range(len(prompts))))

        asyncio.run(all_of_them())

    return decode


@torch.no_grad()
def by_hand(model: PreTrainedModel) -> Decode:
    """A forward pass over the weights of a Llama, with one cache of fixed size for the whole batch."""
    config: Any = model.config
    decoder: Any = model.get_decoder()
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    layers = [
        (
            torch.cat([layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight]),
            layer.self_attn.o_proj.weight,
            torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]),
            layer.mlp.down_proj.weight,
            layer.input_layernorm.weight,
            layer.post_attention_layernorm.weight,
        )
        for layer in decoder.layers
    ]
    head = model.get_output_embeddings().weight

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
            mixed = linear(rms_norm(hidden, hidden.shape[-1:], before, config.rms_norm_eps), qkv)
            mixed = mixed.view(batch, length, heads + 2 * kv_heads, width).transpose(1, 2)
            query, key, value = mixed.split([heads, kv_heads, kv_heads], dim=1)
            kept[0, :, :, begin:end], kept[1, :, :, begin:end] = rotated(key, cosine, sine), value
            seen = scaled_dot_product_attention(
                rotated(query, cosine, sine), kept[0, :, :, :end], kept[1, :, :, :end], is_causal=length > 1,
                enable_gqa=True,
            )  # fmt: skip
            hidden = hidden + linear(seen.transpose(1, 2).reshape(batch, length, heads * width), out)
            gate, up = linear(rms_norm(hidden, hidden.shape[-1:], after, config.rms_norm_eps), gate_up).chunk(2, -1)
            hidden = hidden + linear(silu(gate) * up, down)
        return linear(rms_norm(hidden[:, -1], hidden.shape[-1:], decoder.norm.weight, config.rms_norm_eps), head)

    @torch.no_grad()
    def decode(prompts: Tensor, count: int) -> None:
        batch, length = prompts.shape
        cache = torch.empty(len(layers), 2, batch, kv_heads, length + count, width)
        tokens, begin = prompts, 0
        for _ in range(count):
            logits = forward(tokens, cache, begin)
            begin += tokens.shape[1]
            tokens = torch.multinomial(logits.softmax(dim=-1), 1)

    return decode


if __name__ == "__main__":
    main()
