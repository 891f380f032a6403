"""Attention over prefix trees, through the public attention interface of transformers.

A decoder of transformers runs on one flat run of tokens `[1, T]`; who may see whom is the business of a
*layout* that is handed to `forward` and reaches every attention layer. The trainer's layout is a forest of
rows (`ForestLayout`); the engine's are its rows of keys and values (`engines/layout.py`). No model is patched.
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
    if attention_mask is not None:
        raise ValueError("this model attends through layouts; it takes no attention mask")
    layout = layout or CausalLayout()  # a plain call of the model: one unpadded batch
    out = layout.attend(int(module.layer_idx), query, key, value, scaling)  # type: ignore[arg-type]
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, _attention)


def use_layouts(model: PreTrainedModel) -> None:
    """Makes `model` attend through layouts.

    Raises ConfigError for families whose layers are not plain causal attention over positions, and for those
    that transformers does not lead through its attention interface.
    """
    config = model.config.get_text_config()
    if config._attn_implementation == NAME:
        return
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    special = [name for name in SPECIAL if getattr(config, name, None)]
    if kinds != {"full_attention"} or window or special:
        found = [*sorted(kinds), *special, *([f"window {window}"] if window else [])]
        raise ConfigError(
            f"model family {config.model_type!r} has layers that are not plain causal attention "
            f"({', '.join(found)}); {INSTEAD}"
        )
    model.set_attn_implementation(NAME)
    if _layers_reached(model) != set(range(config.num_hidden_layers)):
        raise ConfigError(
            f"model family {config.model_type!r} does not let transformers change how its layers attend; {INSTEAD}"
        )


SPECIAL = ("mamba_d_state", "alibi", "attn_logit_softcapping")
"""Entries of a configuration that stand for something other than plain attention."""

INSTEAD = "take one with full attention (Llama, SmolLM2, Qwen2.5, Qwen3, Mistral v0.3, Phi-3, ...)"


def _layers_reached(model: PreTrainedModel) -> set[int]:
    """The layers that ask the layout: a family that ignores it would let every row see every other."""

    reached: set[int] = set()

    class Probe:
        def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
            reached.add(layer)
            return query.new_zeros(*query.shape[:-1], value.shape[-1])

    one = torch.zeros(1, dtype=torch.int64, device=model.device)
    with torch.no_grad():
        forward_hidden(model, one, one, Probe())
    return reached


def forward_hidden(model: PreTrainedModel, tokens: Tensor, positions: Tensor, layout: Layout) -> Tensor:
    """The last hidden states [T, H] of tokens i64[T] at positions i64[T]."""
    decoder = model.get_decoder()
    out = decoder(input_ids=tokens[None], position_ids=positions[None], use_cache=False, layout=layout)
    hidden: Tensor = out.last_hidden_state[0]
    return hidden


class CausalLayout:
    """Each token sees itself and those before it: one plain sequence."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)


class ForestLayout:
    """Each token sees its ancestors in its own tree: k <= q < subtree_end[k].

    The layout is depth-first, so a tree is a few runs of tokens that follow each other; all tokens of a run
    have the same ancestors before the run. Each run attends to those and, causally, to itself: the work is
    that of the rows taken one by one, less what they share.
    """

    def __init__(self, batch: Batch) -> None:
        ends = batch.subtree_end
        index = torch.arange(batch.size, device=ends.device)
        starts = [0, *(torch.nonzero(ends[:-1] == index[1:])[:, 0] + 1).tolist()] if batch.size else []
        self._runs = [self._run(ends, begin, end) for begin, end in zip(starts, [*starts[1:], batch.size], strict=True)]

    @staticmethod
    def _run(ends: Tensor, begin: int, end: int) -> tuple[int, int, Tensor | None, Tensor | None]:
        """(begin, end, slots it sees i64[m + n], who sees which bool[n, m + n]) of a run of n tokens."""
        ancestors = torch.nonzero(ends[:begin] > begin)[:, 0]
        if len(ancestors) == 0:
            return begin, end, None, None
        slots = torch.cat([ancestors, torch.arange(begin, end, device=ends.device)])
        seen = torch.ones(end - begin, len(slots), dtype=torch.bool, device=ends.device).tril(len(ancestors))
        return begin, end, slots, seen

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        parts = []
        for begin, end, slots, seen in self._runs:
            run = slice(begin, end)
            k = key[:, :, run] if slots is None else key[:, :, slots]
            v = value[:, :, run] if slots is None else value[:, :, slots]
            parts.append(
                scaled_dot_product_attention(
                    query[:, :, run], k, v, attn_mask=seen, is_causal=seen is None, scale=scale, enable_gqa=True
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
