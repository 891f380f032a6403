"""Activation checkpointing: of each decoder layer only what goes into it is kept for the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel


@contextmanager
def checkpointed(model: PreTrainedModel, *, wanted: bool = True) -> Iterator[None]:
    """Layers that run inside compute themselves again when their gradient is asked for, inside or later.

    transformers has a switch for this, which works in training mode alone; networks stay in evaluation mode here.
    """
    layers = decoder_layers(model) if wanted else []
    try:
        for layer in layers:
            again = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
            vars(layer)["forward"] = again
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of the decoder, whatever the family calls them."""
    count = model.config.get_text_config().num_hidden_layers
    stacks = [child for child in model.get_decoder().children() if isinstance(child, nn.ModuleList)]
    (layers,) = [stack for stack in stacks if len(stack) == count][:1] or [nn.ModuleList()]
    return list(layers)
