"""The pass that samples: hidden states and logits without gradients, as quickly as this machine has them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from turnstile.engines.local.cpu.decoder import CpuDecoder
from turnstile.engines.local.cpu.packed_weights import PackedLinears
from turnstile.models.attention import CausalLayout, Layout, forward_hidden
from turnstile.models.frozen_layers import captured
from turnstile.models.head import probes, project

PROBES = 32
"""Tokens, from all over the vocabulary, by which a fused pass is tried."""


class Inference:
    """A model as it is sampled from.

    With `packed` a CPU computes float32 on reordered copies of the weights, which take as much memory again, and
    decoders built like Llama run with fewer and larger operations (`engines/local/cpu/decoder.py`). Others run as they
    are.
    """

    def __init__(self, model: PreTrainedModel, *, packed: bool = True) -> None:
        self._model = model
        self._packed = packed
        self._fused: CpuDecoder | None = None
        self._linears = PackedLinears(nn.ModuleList())
        self._stale = True  # weights have learnt, or layers were replaced

    def forget(self) -> None:
        """The weights that learn have changed, in whatever way. Heeded at the next use, as one may be going on."""
        self._stale = True

    @torch.no_grad()
    def hidden(self, tokens: Tensor, positions: Tensor, layout: Layout, keep: int = 0) -> list[Tensor]:
        """The last hidden states [T, H] of tokens i64[T] at positions i64[T]; with `keep` also what goes into that
        layer, [T, H]."""
        self._follow()
        if self._fused is not None:
            return self._fused.hidden(tokens, positions, layout, keep)
        with self._linears.used(), captured(self._model, keep) as kept:
            return [forward_hidden(self._model, tokens, positions, layout), *kept]

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of last hidden states [N, H]."""
        self._follow()
        with self._linears.used():
            return project(self._model, hidden)

    def _follow(self) -> None:
        """Sees what the model is made of now."""
        if not self._stale:
            return
        self._stale = False
        if not self._packed:
            return
        if self._fused is not None and self._fused.is_of(self._model):
            self._fused.forget()
        else:
            self._fused = _fused(self._model)
            head = self._model.get_output_embeddings()
            self._linears = PackedLinears(self._model if self._fused is None else nn.ModuleList([head]))
        self._linears.forget()


def _fused(model: PreTrainedModel) -> CpuDecoder | None:
    """The fused pass of a model, if it gives what the model gives: found out by trying.

    Most tokens must agree to rounding, and all of them roughly: those that were hardly ever trained on differ by far
    more than others do, and by them alone a whole model would be held to be another.
    """
    fused = CpuDecoder.of(model)
    if fused is None:
        return None
    tokens = probes(model, PROBES)
    positions = torch.arange(PROBES, device=model.device)
    plain = forward_hidden(model, tokens, positions, CausalLayout())
    (found,) = fused.hidden(tokens, positions, CausalLayout())
    off, size = (torch.linalg.vector_norm(x, dim=-1) for x in (found - plain, plain))
    alike = int((off <= 1e-4 * size).sum()) >= 0.75 * PROBES and bool((off <= 1e-2 * size).all())
    return fused if alike else None
