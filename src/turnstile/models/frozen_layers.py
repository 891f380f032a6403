"""Skip the frozen layers below the trainable ones if their output is already known.

If only the top layers or adapters on them are trainable, the input of the first trainable layer never changes for a
given token path. The engine captures these activations while it samples, and the trainer's forward pass begins there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from turnstile.models.attention import CausalLayout, Layout, forward_hidden


def count_frozen_layers(model: PreTrainedModel) -> int:
    """Return how many leading decoder layers can be skipped; 0 if none can.

    Neither these layers nor the input embeddings may have trainable parameters, and a later layer must have some. The
    model must also allow a forward pass that begins above them, which is tested by running one.
    """
    decoder: Any = model.get_decoder()
    layers = getattr(decoder, "layers", ())
    if any(p.requires_grad for p in model.get_input_embeddings().parameters()):
        return 0
    count = 0
    for layer in layers:
        if any(p.requires_grad for p in layer.parameters()):
            break
        count += 1
    return count if 0 < count < len(layers) and _can_begin_above(model, count) else 0


@contextmanager
def capture_activations(model: PreTrainedModel, layers: int) -> Iterator[list[Tensor]]:
    """Yield a list that collects the input [T, H] of layer `layers` in each forward pass inside.

    The list stays empty if `layers` is 0.
    """
    inputs: list[Tensor] = []
    if layers == 0:
        yield inputs
        return

    def keep(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden = arguments[0] if arguments else named["hidden_states"]
        inputs.append(hidden[0].detach())

    decoder: Any = model.get_decoder()
    hook = decoder.layers[layers].register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield inputs
    finally:
        hook.remove()


def forward_above(
    model: PreTrainedModel, layers: int, activations: Tensor, positions: Tensor, layout: Layout
) -> Tensor:
    """Return the last hidden states [T, H], computed from `activations` [T, H], the input of layer `layers`."""
    with _with_layers(model, slice(layers, None)) as decoder:
        out = decoder(inputs_embeds=activations[None], position_ids=positions[None], use_cache=False, layout=layout)
    hidden: Tensor = out.last_hidden_state[0]
    return hidden


@torch.no_grad()
def forward_below(model: PreTrainedModel, layers: int, tokens: Tensor, positions: Tensor, layout: Layout) -> Tensor:
    """Return the input [T, H] of layer `layers` for tokens i64[T] at positions i64[T]."""
    with _with_layers(model, slice(layers)) as decoder:
        inputs: list[Tensor] = []
        hook = decoder.layers[-1].register_forward_hook(lambda _, __, out: inputs.append(out))
        try:
            forward_hidden(model, tokens, positions, layout)
        finally:
            hook.remove()
    (out,) = inputs
    activations: Tensor = (out[0] if isinstance(out, tuple) else out)[0]
    return activations


@contextmanager
def _with_layers(model: PreTrainedModel, layers: slice) -> Iterator[Any]:
    """Reduce the decoder to a slice of its layers inside the context, and yield it."""
    decoder: Any = model.get_decoder()
    whole = decoder.layers
    decoder.layers = nn.ModuleList(list(whole)[layers])
    try:
        yield decoder
    finally:
        decoder.layers = whole


@torch.no_grad()
def _can_begin_above(model: PreTrainedModel, layers: int) -> bool:
    """Return whether running the layers in two parts gives what a full pass gives.

    It does not in some families, which scale the embeddings.
    """
    tokens = torch.arange(8, device=model.device)
    layout = CausalLayout()
    with capture_activations(model, layers) as inputs:
        whole = forward_hidden(model, tokens, tokens, layout)
    below = forward_below(model, layers, tokens, tokens, layout)
    above = forward_above(model, layers, below, tokens, layout)
    halves = ((inputs[0], below), (whole, above))
    return all(torch.allclose(one, two, rtol=1e-3, atol=1e-3 * float(one.abs().max())) for one, two in halves)
