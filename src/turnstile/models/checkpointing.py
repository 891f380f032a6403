"""Activation checkpointing, which keeps only the input of each decoder layer for the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel


@contextmanager
def checkpoint_layers(model: PreTrainedModel, *, enabled: bool = True) -> Iterator[None]:
    """Make decoder layers that run in this context recompute their activations in the backward pass.

    The backward pass itself may run inside or later. transformers' own switch works in training mode only, but models
    stay in evaluation mode here.
    """
    layers = decoder_layers(model) if enabled else []
    try:
        for layer in layers:
            recomputed = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
            vars(layer)["forward"] = recomputed
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers, whatever the model family calls them; [] if they are not found."""
    count = model.config.get_text_config().num_hidden_layers
    stacks = [child for child in model.get_decoder().children() if isinstance(child, nn.ModuleList)]
    (layers,) = [stack for stack in stacks if len(stack) == count][:1] or [nn.ModuleList()]
    return list(layers)
