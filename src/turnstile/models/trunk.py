"""The frozen layers below those that learn: their output need not be computed again where it is known.

When only the top layers train, what a token is at the first of them never changes. The engine sees it pass
while it samples and keeps it; the trainer begins there.
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
    decoder: Any = model.get_decoder()
    whole = decoder.layers
    decoder.layers = nn.ModuleList(list(whole)[layers:])
    try:
        out = decoder(inputs_embeds=trunk[None], position_ids=positions[None], use_cache=False, layout=layout)
    finally:
        decoder.layers = whole
    hidden: Tensor = out.last_hidden_state[0]
    return hidden


@torch.no_grad()
def _begins_above(model: PreTrainedModel, layers: int) -> bool:
    """Whether beginning above gives what the whole pass gives: some families scale what they take for embeddings."""
    tokens = torch.arange(8, device=model.device)
    layout = CausalLayout()
    with captured(model, layers) as seen:
        whole = forward_hidden(model, tokens, tokens, layout)
    above = forward_above(model, layers, seen[0], tokens, layout)
    return bool(torch.allclose(whole, above, rtol=1e-3, atol=1e-3 * float(whole.abs().max())))
