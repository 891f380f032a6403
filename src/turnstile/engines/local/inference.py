"""The forward pass for sampling: hidden states and logits without gradients, as fast as the machine allows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from turnstile.engines.local.cpu.decoder import CpuDecoder
from turnstile.engines.local.cpu.packed_weights import PackedLinears
from turnstile.models.attention import CausalLayout, Layout, forward_hidden
from turnstile.models.frozen_layers import capture_activations
from turnstile.models.head import probe_tokens, project

PROBE_TOKENS = 32
"""Number of tokens, spread over the vocabulary, on which a fused decoder is tested."""


class Inference:
    """Runs a model for sampling.

    With `packed`, a float32 model on a CPU runs on reordered copies of its weights, which take as much memory again,
    and decoders built like Llama run with fewer, larger operations (`engines/local/cpu/decoder.py`). All other models
    run as they are.
    """

    def __init__(self, model: PreTrainedModel, *, packed: bool = True) -> None:
        self._model = model
        self._packed = packed
        self._decoder: CpuDecoder | None = None
        self._linears = PackedLinears(nn.ModuleList())
        self._stale = True  # weights have changed, or layers were replaced

    def invalidate(self) -> None:
        """Mark the copies of trainable weights as stale. The next pass renews them; a pass may be running meanwhile."""
        self._stale = True

    @torch.no_grad()
    def hidden(self, tokens: Tensor, positions: Tensor, layout: Layout, keep: int = 0) -> list[Tensor]:
        """Return a list of the last hidden states [T, H] of tokens i64[T] at positions i64[T].

        With `keep`, the list also contains the input [T, H] of layer `keep`.
        """
        self._refresh()
        if self._decoder is not None:
            return self._decoder.hidden(tokens, positions, layout, keep)
        with self._linears.active(), capture_activations(self._model, keep) as activations:
            return [forward_hidden(self._model, tokens, positions, layout), *activations]

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, V] of last hidden states [N, H]."""
        self._refresh()
        with self._linears.active():
            return project(self._model, hidden)

    def _refresh(self) -> None:
        """Renew the decoder and the packed layers if they are stale."""
        if not self._stale:
            return
        self._stale = False
        if not self._packed:
            return
        if self._decoder is not None and self._decoder.matches(self._model):
            self._decoder.invalidate()
        else:
            self._decoder = _try_decoder(self._model)
            head = self._model.get_output_embeddings()
            self._linears = PackedLinears(self._model if self._decoder is None else nn.ModuleList([head]))
        self._linears.invalidate()


def _try_decoder(model: PreTrainedModel) -> CpuDecoder | None:
    """Return the fused decoder of a model if its outputs match the model's on probe tokens, else None.

    Three quarters of the tokens must agree up to rounding, and all of them roughly. Embeddings that were hardly trained
    amplify rounding errors far more than others, and must not disqualify a correct decoder.
    """
    decoder = CpuDecoder.try_from(model)
    if decoder is None:
        return None
    tokens = probe_tokens(model, PROBE_TOKENS)
    positions = torch.arange(PROBE_TOKENS, device=model.device)
    plain = forward_hidden(model, tokens, positions, CausalLayout())
    (output,) = decoder.hidden(tokens, positions, CausalLayout())
    errors, norms = (torch.linalg.vector_norm(x, dim=-1) for x in (output - plain, plain))
    agrees = int((errors <= 1e-4 * norms).sum()) >= 0.75 * PROBE_TOKENS and bool((errors <= 1e-2 * norms).all())
    return decoder if agrees else None
