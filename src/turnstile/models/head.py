"""The vocabulary projection: from last hidden states to logits, the same way in the sampler and the trainer.

The logits of a batch never exist at once: they are made in chunks, and only where a token is wanted.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from transformers import PreTrainedModel

from turnstile.errors import ConfigError

CHUNK_ELEMENTS = {"cpu": 2**24, "cuda": 2**26}
"""Logits computed at once, in elements, by the kind of device: 64 MiB in float32, and 256 MiB, as a GPU is not busy
with a hundred tokens. Other devices take as many as a CPU."""


def logits_at_once(model: PreTrainedModel) -> int:
    """How many tokens' logits are computed together."""
    vocabulary = int(model.get_output_embeddings().weight.shape[0])
    return max(1, CHUNK_ELEMENTS.get(model.device.type, CHUNK_ELEMENTS["cpu"]) // vocabulary)


def project(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Logits [N, V] of last hidden states [N, H], in at least float32, with the family's own scaling."""
    head = model.get_output_embeddings()
    if hidden.dtype.itemsize < torch.float32.itemsize and _is_linear(head):
        wide: Tensor = _Wide.apply(hidden, head.weight, head.bias)  # type: ignore[no-untyped-call]
        return _scaled(model, wide)
    return _scaled(model, head(hidden))


def _scaled(model: PreTrainedModel, logits: Tensor) -> Tensor:
    """What the model makes of what comes out of its matrix."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None)
    if scale is not None:  # Cohere
        logits = logits * scale
    divisor = getattr(config, "logits_scaling", None)
    if divisor is not None:  # Granite
        logits = logits / divisor
    cap = getattr(config, "final_logit_softcapping", None)
    if cap is not None:  # Gemma 2
        logits = torch.tanh(logits / cap) * cap
    return logits


SLICE = 4096
"""Rows of a matrix in less than float32 that are multiplied in float32 at once, where no kernel does it by itself."""


def wide(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """hidden [N, H] times weight [V, H], and a bias [V], -> [N, V] in at least float32.

    A product of bfloat16 that is bfloat16 itself is off by up to 0.06 at a logit of 16, and so are log-probabilities,
    though it was summed up in float32: it is not rounded here.
    """
    if hidden.dtype.itemsize >= torch.float32.itemsize:
        return linear(hidden, weight, bias)
    if hidden.is_cuda:
        out = torch.mm(hidden, weight.T, out_dtype=torch.float32)
    else:
        rows = hidden.float()
        out = torch.empty(len(hidden), len(weight), dtype=torch.float32, device=hidden.device)
        for begin in range(0, len(weight), SLICE):
            part = slice(begin, begin + SLICE)
            torch.mm(rows, weight[part].T.float(), out=out[:, part])
    return out if bias is None else out.add_(bias)


PROBES = 8
"""Tokens by which a projection is tried."""

ALIKE = 0.05
"""How far projections may be from the model's logits, of their size: what bfloat16 rounds is well below."""


def probes(model: PreTrainedModel, count: int) -> Tensor:
    """Tokens i64[count] from all over the vocabulary, to try a model by."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    return torch.arange(count, device=model.device) * vocabulary // count


@torch.no_grad()
def check_projection(model: PreTrainedModel) -> None:
    """Raises ConfigError where `project` does not give the logits that the model gives: what families do to theirs is
    in no interface, and a scale that is missed would sample and train another distribution without a sign of it."""
    tokens = probes(model, PROBES)[None]
    hidden = model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state[0]
    found, real = project(model, hidden), model(input_ids=tokens, use_cache=False).logits[0]
    if torch.linalg.vector_norm(found - real) > ALIKE * torch.linalg.vector_norm(real):
        raise ConfigError(
            f"model family {model.config.model_type!r} makes its logits in a way of its own; take one of another family"
        )


class ChunkedHead:
    """The projection of one pass forward and back, chunk by chunk.

    What each chunk adds to the gradient of the matrix is added up where it is made. Autograd by itself makes [V, H] for
    each of them before it adds two: the largest matrix of the model, three times at once. Heads that are more than a
    matrix are left to it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        head = model.get_output_embeddings()
        self._model = model
        self._slope: list[Tensor] = []
        self._weight: Tensor | None = None
        if torch.is_grad_enabled() and head.weight.requires_grad and _is_a_matrix(head):
            self._weight = _Gathered.apply(head.weight, self._slope)  # type: ignore[no-untyped-call]

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, H] of a chunk -> logits [n, V], as `project`."""
        if self._weight is None:
            return project(self._model, hidden)
        return _scaled(self._model, _Part.apply(hidden, self._weight, self._slope))  # type: ignore[no-untyped-call]

    def joined(self, values: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """What was made of the logits of every chunk, [n] and [n] -> [N] and [N]. All that is wanted of the logits has
        to come through here, as it is where a pass back begins."""
        one, other = _Joined.apply(self._slope, *itertools.chain(*values))  # type: ignore[no-untyped-call]
        return one, other


def _is_linear(head: nn.Module) -> bool:
    """Whether a head is a linear layer, and nothing else is done with what goes in or comes out."""
    led = "forward" in vars(head) or head._forward_hooks or head._forward_pre_hooks
    return type(head) is nn.Linear and not led


def _is_a_matrix(head: nn.Module) -> bool:
    """Whether a head is a linear layer without a bias."""
    return _is_linear(head) and head.bias is None


class _Wide(torch.autograd.Function):
    """(hidden [N, H], weight [V, H], bias [V] or None) -> logits [N, V], as `wide`. The pass back is in their type."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return wide(hidden, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        low, wanted = slope.to(weight.dtype), ctx.needs_input_grad
        return (
            low @ weight if wanted[0] else None,
            low.T @ hidden if wanted[1] else None,
            slope.sum(dim=0).to(weight.dtype) if wanted[2] else None,
        )


class _Gathered(torch.autograd.Function):
    """A weight [V, H] whose gradient is what all `_Part`s have put into `slope`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, slope: list[Tensor]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.slope = slope
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None) -> tuple[Tensor | None, ...]:
        return ctx.slope.pop(), None


class _Part(torch.autograd.Function):
    """(hidden [n, H], weight [V, H] of a `_Gathered`, its slope) -> logits [n, V]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, slope: list[Tensor]) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.slope = slope
        return wide(hidden, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        slope = slope.to(weight.dtype)
        if ctx.slope:
            ctx.slope[0].addmm_(slope.T, hidden)
        else:
            ctx.slope.append(slope.T @ hidden)
        return slope @ weight, None, None


class _Joined(torch.autograd.Function):
    """(slope of a `_Gathered`, two values [n] of each chunk in turns) -> [N], [N].

    A pass back begins here: what an earlier one has put together without wanting it, or before it failed, goes.
    """

    @staticmethod
    def forward(ctx: Any, slope: list[Tensor], *values: Tensor) -> tuple[Tensor, Tensor]:
        ctx.slope, ctx.sizes = slope, [len(value) for value in values[::2]]
        one, other = torch.cat(values[::2]), torch.cat(values[1::2])
        learns = [any(ctx.needs_input_grad[1 + i :: 2]) for i in range(2)]
        ctx.mark_non_differentiable(*(out for out, own in zip((one, other), learns, strict=True) if not own))
        return one, other

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, one: Tensor, other: Tensor) -> tuple[Tensor | None, ...]:
        ctx.slope.clear()
        return None, *itertools.chain(*zip(one.split(ctx.sizes), other.split(ctx.sizes), strict=True))
