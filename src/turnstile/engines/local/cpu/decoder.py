"""A decoder built like Llama, run with fewer, larger operations for sampling on a CPU.

The arithmetic is the model's own, but divided into fewer operations, since each costs time even if it computes little.
Queries, keys and values come from one projection. Norms, activation, gating and residuals are computed inside the
kernels of the projections, on packed weights that are multiplied by those of the norms
(`engines/local/cpu/packed_weights.py`). The two elements of a rotary pair are adjacent in queries and keys, so that
rotation is one complex product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel

from turnstile.engines.local.cpu.packed_weights import PackedWeight, Stamp, can_be_packed, stamp_of
from turnstile.models.adapt import eps_of, is_linear
from turnstile.models.attention import Layout

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


class CpuDecoder:
    """The fused decoder of a model.

    It notices weights that change in place; `invalidate` must report all other changes.
    """

    def __init__(self, model: PreTrainedModel, layers: list[_Layer]) -> None:
        self._decoder: Any = model.get_decoder()
        self._layers = layers
        self._parameters: list[nn.Parameter] = []
        self._stamp: Stamp | None = None

    @classmethod
    def try_from(cls, model: PreTrainedModel) -> CpuDecoder | None:
        """Return the fused decoder of a model, or None if it is not built like Llama with SiLU, in float32 on a CPU."""
        decoder: Any = model.get_decoder()
        required = ("embed_tokens", "layers", "norm", "rotary_emb")
        if not all(hasattr(decoder, name) for name in required) or eps_of(decoder.norm) is None:
            return None
        if getattr(model.config.get_text_config(), "hidden_act", None) not in ("silu", "swish"):
            return None
        built = [_Layer.try_from(layer) for layer in decoder.layers]
        layers = [layer for layer in built if layer is not None]
        if len(layers) < len(built) or _rotary_width(decoder) != len(layers[0].pairs):
            return None
        return cls(model, layers)

    def matches(self, model: PreTrainedModel) -> bool:
        """Return whether the model still has the layers that this decoder was built from."""
        modules = [_LayerModules.try_from(layer) for layer in cast(Any, model.get_decoder()).layers]
        return modules == [layer.modules for layer in self._layers]

    def invalidate(self) -> None:
        """Mark the packed copies of trainable weights as stale."""
        for weight in self._weights():
            weight.invalidate()
        self._parameters, self._stamp = [], None

    def hidden(self, tokens: Tensor, positions: Tensor, layout: Layout, keep: int = 0) -> list[Tensor]:
        """Return hidden states as `engines.local.inference.Inference.hidden` does."""
        self._refresh()
        hidden = self._decoder.embed_tokens(tokens)
        cosine, sine = (
            x[0, :, None].chunk(2, dim=-1)[0] for x in self._decoder.rotary_emb(hidden[None], positions[None])
        )
        rotation = torch.complex(cosine, sine)  # [T, 1, D / 2]
        kept = []
        for index, layer in enumerate(self._layers):
            if keep and index == keep:
                kept.append(hidden)
            hidden = layer.forward(index, hidden, rotation, layout)
        return [_apply_norm(hidden, self._decoder.norm), *kept]

    def _refresh(self) -> None:
        """Repack weights that have changed in place, after one check of the versions of all of them."""
        self._parameters = self._parameters or [one for weight in self._weights() for one in weight.parameters()]
        stamp = stamp_of(self._parameters)
        if stamp != self._stamp:
            for weight in self._weights():
                weight.refresh()
            self._stamp = stamp

    def _weights(self) -> Iterator[PackedWeight]:
        for layer in self._layers:
            yield from (layer.qkv, layer.out, layer.gate_up, layer.down)


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """One layer, with its modules and their packed weights."""

    modules: _LayerModules
    qkv: PackedWeight
    out: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    pairs: Tensor  # i64[D], the order of a head's numbers that makes rotary pairs adjacent
    kv_heads: int
    scale: float

    @classmethod
    def try_from(cls, layer: nn.Module) -> _Layer | None:
        modules = _LayerModules.try_from(layer)
        if modules is None:
            return None
        q, k, v, out = modules.attention
        gate, up, down = modules.mlp
        before, after = modules.norms
        attention = cast(Any, layer).self_attn
        width, kv_heads = int(attention.head_dim), int(attention.config.num_key_value_heads)
        pairs = torch.arange(width).view(2, -1).T.flatten()
        heads = torch.arange(sum(cast(Any, linear).out_features for linear in (q, k, v))).view(-1, width)
        heads[:-kv_heads] = heads[:-kv_heads, pairs]
        return cls(
            modules=modules,
            qkv=PackedWeight(q, k, v, norm=before, order=heads.flatten()),
            out=PackedWeight(out),
            gate_up=PackedWeight(gate, up, norm=after, gated=True),
            down=PackedWeight(down),
            pairs=pairs,
            kv_heads=kv_heads,
            scale=float(attention.scaling),
        )

    def forward(self, index: int, hidden: Tensor, rotation: Tensor, layout: Layout) -> Tensor:
        """Return the hidden states [T, H] after this layer; `rotation` is c64[T, 1, D / 2]."""
        width = len(self.pairs)
        heads = self.qkv(hidden).view(len(hidden), -1, width)
        if self.modules.head_norms:
            self._norm_heads(heads)
        torch.view_as_complex(heads[:, : -self.kv_heads].unflatten(-1, (-1, 2))).mul_(rotation)
        query, key, value = heads.transpose(0, 1)[None].tensor_split((-2 * self.kv_heads, -self.kv_heads), dim=1)
        seen = layout.attend(index, query, key, value, self.scale)
        hidden = self.out(seen[0].transpose(0, 1).reshape(len(hidden), -1), hidden)
        return self.down(self.gate_up(hidden), hidden)

    def _norm_heads(self, heads: Tensor) -> None:
        """Normalise the queries and keys of `heads` [T, Hq + 2 Hkv, D] in place, as Qwen3 does."""
        query, key, _ = heads.tensor_split((-2 * self.kv_heads, -self.kv_heads), dim=1)
        for part, norm in zip((query, key), self.modules.head_norms, strict=True):
            part.copy_(rms_norm(part, self.pairs.shape, cast(Tensor, norm.weight)[self.pairs], eps_of(norm)))


@dataclass(frozen=True, slots=True)
class _LayerModules:
    """The modules of a layer. Two objects are equal if they hold the same modules."""

    attention: tuple[nn.Module, ...]  # the query, key, value and output projections
    head_norms: tuple[nn.Module, ...]  # of queries and keys (Qwen3), or empty
    mlp: tuple[nn.Module, ...]  # gate, up and down
    norms: tuple[nn.Module, nn.Module]  # before attention, and before the MLP

    @classmethod
    def try_from(cls, layer: nn.Module) -> _LayerModules | None:
        children = dict(layer.named_children())
        if set(children) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
            return None
        attention, mlp = dict(children["self_attn"].named_children()), dict(children["mlp"].named_children())
        head_norms = {name: attention.pop(name) for name in ("q_norm", "k_norm") if name in attention}
        if set(attention) != set(ATTENTION) or set(mlp) != {*MLP, "act_fn"} or len(head_norms) == 1:
            return None
        modules = cls(
            attention=tuple(attention[name] for name in ATTENTION),
            head_norms=tuple(head_norms.values()),
            mlp=tuple(mlp[name] for name in MLP),
            norms=(children["input_layernorm"], children["post_attention_layernorm"]),
        )
        fits = all(is_linear(linear) and can_be_packed(linear) for linear in (*modules.attention, *modules.mlp))
        norms = (*modules.norms, *modules.head_norms)
        norms_fit = all(eps_of(norm) is not None and can_be_packed(norm) for norm in norms)
        return modules if fits and norms_fit else None


def _rotary_width(decoder: Any) -> int:
    """Return how many elements of a head are rotated."""
    cosine, _ = decoder.rotary_emb(torch.zeros(1, 1, 1), torch.zeros(1, 1, dtype=torch.int64))
    return int(cosine.shape[-1])


def _apply_norm(x: Tensor, norm: nn.Module) -> Tensor:
    weight = cast(Tensor, norm.weight)
    return rms_norm(x, weight.shape, weight, eps_of(norm))
