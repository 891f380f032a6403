"""The frozen layers below those that learn: their output need not be computed again where it is known.

Where only the top layers learn, or adapters on them, what a token is at the first of them never changes. The engine
sees it pass while it samples and keeps it; the trainer begins there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from turnstile.models.attention import CausalLayout, Layout, forward_hidden


def frozen_layers(model: PreTrainedModel) -> int:
    """How many of the first decoder layers can be skipped: nothing in or before them learns, and the family
    lets a forward pass begin above them (found out by trying). 0 where all learn."""
    decoder: Any = model.get_decoder()
    layers = getattr(decoder, "layers", ())
    if any(p.requires_grad for p in model.get_input_embeddings().parameters()):
        return 0
    count = 0
    for layer in layers:
        if any(p.requires_grad for p in layer.parameters()):
            break
        count += 1
    return count if 0 < count < len(layers) and _begins_above(model, count) else 0


@contextmanager
def captured(model: PreTrainedModel, layers: int) -> Iterator[list[Tensor]]:
    """Collects what goes into layer `layers` [T, H] of the forward passes inside; nothing for 0 layers."""
    seen: list[Tensor] = []
    if layers == 0:
        yield seen
        return

    def keep(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden = arguments[0] if arguments else named["hidden_states"]
        seen.append(hidden[0].detach())

    decoder: Any = model.get_decoder()
    hook = decoder.layers[layers].register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


def forward_above(model: PreTrainedModel, layers: int, trunk: Tensor, positions: Tensor, layout: Layout) -> Tensor:
    """The last hidden states [T, H] from `trunk` [T, H], what goes into layer `layers`."""
    with _only(model, slice(layers, None)) as decoder:
        out = decoder(inputs_embeds=trunk[None], position_ids=positions[None], use_cache=False, layout=layout)
    hidden: Tensor = out.last_hidden_state[0]
    return hidden


@torch.no_grad()
def forward_below(model: PreTrainedModel, layers: int, tokens: Tensor, positions: Tensor, layout: Layout) -> Tensor:
    """The trunk [T, H] of tokens i64[T] at positions i64[T]: what goes into layer `layers`."""
    with _only(model, slice(layers)) as decoder:
        seen: list[Tensor] = []
        hook = decoder.layers[-1].register_forward_hook(lambda _, __, out: seen.append(out))
        try:
            forward_hidden(model, tokens, positions, layout)
        finally:
            hook.remove()
    (out,) = seen
    trunk: Tensor = (out[0] if isinstance(out, tuple) else out)[0]
    return trunk


@contextmanager
def _only(model: PreTrainedModel, layers: slice) -> Iterator[Any]:
    """The decoder, as if it had these layers alone."""
    decoder: Any = model.get_decoder()
    whole = decoder.layers
    decoder.layers = nn.ModuleList(list(whole)[layers])
    try:
        yield decoder
    finally:
        decoder.layers = whole


@torch.no_grad()
def _begins_above(model: PreTrainedModel, layers: int) -> bool:
    """Whether the two halves give what the whole pass gives: some families scale what they take for embeddings."""
    tokens = torch.arange(8, device=model.device)
    layout = CausalLayout()
    with captured(model, layers) as seen:
        whole = forward_hidden(model, tokens, tokens, layout)
    below = forward_below(model, layers, tokens, tokens, layout)
    above = forward_above(model, layers, below, tokens, layout)
    halves = ((seen[0], below), (whole, above))
    return all(torch.allclose(one, two, rtol=1e-3, atol=1e-3 * float(one.abs().max())) for one, two in halves)
