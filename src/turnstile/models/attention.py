"""Attention over prefix trees, through the public attention interface of transformers.

A decoder of transformers runs on one flat run of tokens `[1, T]`; who may see whom is the business of a
*layout* that is handed to `forward` and reaches every attention layer. The trainer's layout is a forest of
rows (`ForestLayout`); the engine's is its pool of keys and values (`engines/pool.py`). No model is patched.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from turnstile.batching.batch import Batch
from turnstile.errors import ConfigError

NAME = "turnstile"


class Layout(Protocol):
    """Who sees whom, for one forward pass over T tokens."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """query [1, Hq, T, D], key and value [1, Hkv, T, D] (rotated already) -> [1, Hq, T, D]."""
        ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    layout: Layout | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if layout is None:  # a plain call of the model: one unpadded batch
        if attention_mask is not None:
            raise ValueError("this model attends through layouts; it takes no attention mask")
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    else:
        out = layout.attend(int(module.layer_idx), query, key, value, scaling)  # type: ignore[arg-type]
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, _attention)


def use_layouts(model: PreTrainedModel) -> None:
    """Makes `model` attend through layouts.

    Raises ConfigError for families whose layers are not plain causal attention over positions.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if kinds != {"full_attention"} or window or hasattr(config, "mamba_d_state") or getattr(config, "alibi", False):
        raise ConfigError(
            f"model family {config.model_type!r} has layers that are not plain causal attention "
            f"({', '.join(sorted(kinds))}{f', window {window}' if window else ''}); "
            "take one with full attention (Llama, SmolLM2, Qwen2.5, Qwen3, Mistral v0.3, Phi-3, ...)"
        )
    model.set_attn_implementation(NAME)


def forward_hidden(model: PreTrainedModel, tokens: Tensor, positions: Tensor, layout: Layout) -> Tensor:
    """The last hidden states [T, H] of tokens i64[T] at positions i64[T]."""
    decoder = model.get_decoder()
    out = decoder(input_ids=tokens[None], position_ids=positions[None], use_cache=False, layout=layout)
    hidden: Tensor = out.last_hidden_state[0]
    return hidden


class ForestLayout:
    """Each token sees its ancestors in its own tree: k <= q < subtree_end[k].

    One dense bias per tree with branches; a tree of one row needs none. Trees never see each other, so the
    work is the sum of their squares.
    """

    def __init__(self, batch: Batch, dtype: torch.dtype) -> None:
        self._trees: list[tuple[int, int, Tensor | None]] = []
        for begin, end in batch.trees:
            ends = batch.subtree_end[begin:end] - begin
            index = torch.arange(end - begin, device=ends.device)
            bias = None
            if not bool((ends == end - begin).all()):
                seen = (index[None, :] <= index[:, None]) & (index[:, None] < ends[None, :])
                bias = torch.zeros(seen.shape, dtype=dtype, device=ends.device).masked_fill_(~seen, float("-inf"))
            self._trees.append((begin, end, bias))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        parts = [
            scaled_dot_product_attention(
                query[:, :, begin:end],
                key[:, :, begin:end],
                value[:, :, begin:end],
                attn_mask=bias,
                is_causal=bias is None,
                scale=scale,
                enable_gqa=True,
            )
            for begin, end, bias in self._trees
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
