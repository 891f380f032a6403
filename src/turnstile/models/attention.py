"""Attention over prefix trees, through the public attention interface of transformers.

A decoder of transformers runs on one flat run of tokens `[1, T]`. A *layout*, passed to `forward` and on to every
attention layer, decides which tokens see which. The trainer's layout is a forest of rows (`ForestLayout`); the engine's
are its cache rows (`engines/local/layout.py`). No model is patched.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from turnstile.batching.batch import Batch
from turnstile.errors import ConfigError
from turnstile.models.forest_attention import (
    LeafRun,
    Node,
    attend_by_flex,
    attend_by_nodes,
    attend_by_runs,
    block_mask,
    can_attend_by_flex,
    can_attend_by_nodes,
    nodes_of,
    runs_of,
)

NAME = "turnstile"


class Layout(Protocol):
    """Protocol of objects that decide which tokens see which in one forward pass over T tokens."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Return the output [1, Hq, T, D] of query [1, Hq, T, D], key and value [1, Hkv, T, D], all already rotated."""
        ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    layout: Layout | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    if attention_mask is not None:
        raise ValueError("this model attends through layouts and does not take an attention mask")
    non_plain = [name for name in NON_PLAIN_ARGUMENTS if extra.get(name) is not None]
    if non_plain:
        raise _NotPlainError(", ".join(non_plain))
    layout = layout or CausalLayout()  # a plain call of the model: one unpadded sequence
    out = layout.attend(int(module.layer_idx), query, key, value, scaling)  # type: ignore[arg-type]
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, _attention)


def use_layouts(model: PreTrainedModel) -> None:
    """Make `model` attend through layouts.

    Raises ConfigError if the model family's layers are not plain causal attention over positions, or do not use the
    attention interface of transformers.
    """
    why = try_layouts(model)
    if why:
        raise ConfigError(f"{why}; {ALTERNATIVES}")


def uses_layouts(model: PreTrainedModel) -> bool:
    """Return whether a model attends through layouts."""
    return bool(model.config.get_text_config()._attn_implementation == NAME)


def try_layouts(model: PreTrainedModel) -> str:
    """Make `model` attend through layouts and return "", or leave it unchanged and return why it cannot."""
    if uses_layouts(model):
        return ""
    config = model.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    non_plain = [name for name in NON_PLAIN_SETTINGS if getattr(config, name, None)]
    if kind := _length_dependent_rope(config):
        return f"model family {config.model_type!r} rotates by the longest row of a pass (rope_type {kind!r})"
    if layer_types != {"full_attention"} or window or non_plain:
        reasons = [*sorted(layer_types), *non_plain, *([f"window {window}"] if window else [])]
        return (
            f"model family {config.model_type!r} has layers that are not plain causal attention ({', '.join(reasons)})"
        )
    before = config._attn_implementation
    try:
        model.set_attn_implementation(NAME)
        reached = _layers_reached(model)
    except _NotPlainError as error:
        model.set_attn_implementation(before)
        return f"model family {config.model_type!r} has layers that are not plain causal attention ({error})"
    if reached != set(range(config.num_hidden_layers)):
        model.set_attn_implementation(before)
        return f"model family {config.model_type!r} does not let transformers change how its layers attend"
    return ""


NON_PLAIN_SETTINGS = ("mamba_d_state", "alibi", "attn_logit_softcapping")
"""Configuration entries that indicate something other than plain attention."""

NON_PLAIN_ARGUMENTS = ("sliding_window", "softcap", "s_aux", "sinks", "position_bias")
"""Arguments with which transformers requests something other than plain attention."""


LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Rotary embeddings in which a token's angles depend on the longest sequence of the pass."""


def _length_dependent_rope(config: Any) -> str:
    """Return the length-dependent rotary type that some or all layers of a model use; "" if none does."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [str(one.get("rope_type", "")) for one in (rope, *rope.values()) if isinstance(one, dict)]
    return next((kind for kind in kinds if any(name in kind for name in LENGTH_DEPENDENT_ROPE)), "")


class _NotPlainError(ValueError):
    """A layer requested attention that no layout computes."""


ALTERNATIVES = "take one with full attention (Llama, SmolLM2, Qwen2.5, Qwen3, Mistral v0.3, Phi-4, ...)"


def _layers_reached(model: PreTrainedModel) -> set[int]:
    """Return the indices of the layers that attend through the layout.

    In a family that ignores the layout, every row would see every other.
    """
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
    """Return the last hidden states [T, H] of tokens i64[T] at positions i64[T], which attend through `layout`."""
    decoder = model.get_decoder()
    out = decoder(input_ids=tokens[None], position_ids=positions[None], use_cache=False, layout=layout)
    hidden: Tensor = out.last_hidden_state[0]
    return hidden


def forward_forest(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Return the last hidden states [T, H] of a forest.

    A model that does not attend through layouts runs tree by tree, so each tree must be a single row
    (`pack_prefix_trees` with `share=False`). Raises ValueError otherwise.
    """
    if uses_layouts(model):
        return forward_hidden(model, batch.tokens, batch.positions, ForestLayout(batch))
    decoder = model.get_decoder()
    parts = []
    for begin, end in batch.trees:
        if int(batch.positions[end - 1]) != end - begin - 1:
            raise ValueError(
                "a model that does not attend through layouts cannot take rows that share tokens; pack with share=False"
            )
        parts.append(decoder(input_ids=batch.tokens[None, begin:end], use_cache=False).last_hidden_state[0])
    return torch.cat(parts)


class CausalLayout:
    """Layout of one plain sequence, in which each token sees itself and the tokens before it."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Return the output of causal attention."""
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)


class ForestLayout:
    """Layout of prefix trees, in which each token sees itself and its ancestors: k <= q < subtree_end[k]."""

    def __init__(self, batch: Batch) -> None:
        self._ends = batch.subtree_end

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Return the output, computed in the fastest way that supports these tensors."""
        if can_attend_by_nodes(query, value):
            return attend_by_nodes(query, key, value, self._nodes, scale)
        if can_attend_by_flex(query, value):
            return attend_by_flex(query, key, value, self._mask, scale)
        return attend_by_runs(query, key, value, self._runs, scale)

    # the first layer computes these for all layers
    @functools.cached_property
    def _nodes(self) -> list[Node]:
        return nodes_of(self._ends)

    @functools.cached_property
    def _runs(self) -> list[LeafRun]:
        return runs_of(self._ends)

    @functools.cached_property
    def _mask(self) -> BlockMask:
        return block_mask(self._ends)
