"""Attention over prefix trees, through the public attention interface of transformers.

A decoder of transformers runs on one flat run of tokens `[1, T]`; who may see whom is the business of a
*layout* that is handed to `forward` and reaches every attention layer. The trainer's layout is a forest of
rows (`ForestLayout`); the engine's are its rows of keys and values (`engines/local/layout.py`). No model is patched.
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
    Node,
    Run,
    block_mask,
    by_flex,
    by_nodes,
    by_runs,
    can_flex,
    can_go_by_nodes,
    nodes_of,
    runs_of,
)

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
    **more: Any,
) -> tuple[Tensor, None]:
    if attention_mask is not None:
        raise ValueError("this model attends through layouts; it takes no attention mask")
    special = [name for name in SPECIAL_ARGUMENTS if more.get(name) is not None]
    if special:
        raise _NotPlainError(", ".join(special))
    layout = layout or CausalLayout()  # a plain call of the model: one unpadded batch
    out = layout.attend(int(module.layer_idx), query, key, value, scaling)  # type: ignore[arg-type]
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, _attention)


def use_layouts(model: PreTrainedModel) -> None:
    """Makes `model` attend through layouts.

    Raises ConfigError for families whose layers are not plain causal attention over positions, and for those
    that transformers does not lead through its attention interface.
    """
    why = try_layouts(model)
    if why:
        raise ConfigError(f"{why}; {INSTEAD}")


def uses_layouts(model: PreTrainedModel) -> bool:
    """Return whether a model attends through layouts."""
    return bool(model.config.get_text_config()._attn_implementation == NAME)


def try_layouts(model: PreTrainedModel) -> str:
    """Makes `model` attend through layouts where its family allows that; elsewhere says why it does not, and leaves
    the model as it was."""
    if uses_layouts(model):
        return ""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    special = [name for name in SPECIAL if getattr(config, name, None)]
    if kind := _rotation(config):
        return f"model family {config.model_type!r} here rotates all of a pass by its longest row (rope_type {kind!r})"
    if kinds != {"full_attention"} or window or special:
        found = [*sorted(kinds), *special, *([f"window {window}"] if window else [])]
        return f"model family {config.model_type!r} has layers that are not plain causal attention ({', '.join(found)})"
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


SPECIAL = ("mamba_d_state", "alibi", "attn_logit_softcapping")
"""Entries of a configuration that stand for something other than plain attention."""

SPECIAL_ARGUMENTS = ("sliding_window", "softcap", "s_aux", "sinks", "position_bias")
"""Arguments with which transformers asks for something other than plain attention."""


BY_THE_LONGEST = ("dynamic", "longrope")
"""Ways to rotate in which a token's numbers depend on how far others of the same pass are."""


def _rotation(config: Any) -> str:
    """Which of them a model has, of all its layers or of a kind of them."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [str(one.get("rope_type", "")) for one in (rope, *rope.values()) if isinstance(one, dict)]
    return next((kind for kind in kinds if any(name in kind for name in BY_THE_LONGEST)), "")


class _NotPlainError(ValueError):
    """A layer asked for attention that no layout computes."""


INSTEAD = "take one with full attention (Llama, SmolLM2, Qwen2.5, Qwen3, Mistral v0.3, Phi-4, ...)"


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


def forward_forest(model: PreTrainedModel, batch: Batch) -> Tensor:
    """The last hidden states [T, H] of a forest: through a layout, or, where the model does not attend through them,
    tree by tree as transformers does. Trees must then be single rows (`pack_prefix_trees` with `share=False`)."""
    if uses_layouts(model):
        return forward_hidden(model, batch.tokens, batch.positions, ForestLayout(batch))
    decoder = model.get_decoder()
    parts = []
    for begin, end in batch.trees:
        if int(batch.positions[end - 1]) != end - begin - 1:
            raise ValueError("rows that share tokens cannot go through a model that does not attend through layouts")
        parts.append(decoder(input_ids=batch.tokens[None, begin:end], use_cache=False).last_hidden_state[0])
    return torch.cat(parts)


class CausalLayout:
    """Each token sees itself and those before it: one plain sequence."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)


class ForestLayout:
    """Each token sees its ancestors in its own tree: k <= q < subtree_end[k]."""

    def __init__(self, batch: Batch) -> None:
        self._ends = batch.subtree_end

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        if can_go_by_nodes(query, value):
            return by_nodes(query, key, value, self._nodes, scale)
        if can_flex(query, value):
            return by_flex(query, key, value, self._mask, scale)
        return by_runs(query, key, value, self._runs, scale)

    # made when the first layer asks, for all that follow
    @functools.cached_property
    def _nodes(self) -> list[Node]:
        return nodes_of(self._ends)

    @functools.cached_property
    def _runs(self) -> list[Run]:
        return runs_of(self._ends)

    @functools.cached_property
    def _mask(self) -> BlockMask:
        return block_mask(self._ends)
