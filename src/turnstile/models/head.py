"""The vocabulary projection from last hidden states to logits, the same in the sampler and the trainer.

The logits of a batch never exist all at once: they are computed in chunks, and only for tokens that need them.
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
"""Number of logits computed at once, by device type.

That is 64 MiB in float32 on a CPU and on other devices, and 256 MiB on a GPU, which a hundred tokens do not keep busy.
"""


def logits_at_once(model: PreTrainedModel) -> int:
    """Return the number of tokens whose logits are computed at once."""
    vocabulary = int(model.get_output_embeddings().weight.shape[0])
    return max(1, CHUNK_ELEMENTS.get(model.device.type, CHUNK_ELEMENTS["cpu"]) // vocabulary)


def project(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Return the logits [N, V] of last hidden states [N, H], in at least float32 and with the family's own scaling."""
    head = model.get_output_embeddings()
    if hidden.dtype.itemsize < torch.float32.itemsize and _is_linear(head):
        logits: Tensor = _LinearFloat32.apply(hidden, head.weight, head.bias)  # type: ignore[no-untyped-call]
        return _scale_logits(model, logits)
    return _scale_logits(model, head(hidden))


def _scale_logits(model: PreTrainedModel, logits: Tensor) -> Tensor:
    """Return logits in at least float32, with the model family's own scaling and capping applied."""
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


ROWS_AT_ONCE = 4096
"""Rows of a low-precision matrix that are converted to float32 at once if torch cannot return float32 products."""


def linear_float32(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return hidden [N, H] times the transpose of weight [V, H], plus bias [V], as [N, V] in at least float32.

    A bfloat16 product is summed in float32 but then rounded, so logits of 16, and their log-probabilities, are off by
    up to 0.06. Here the sum is not rounded.
    """
    if hidden.dtype.itemsize >= torch.float32.itemsize:
        return linear(hidden, weight, bias)
    if hidden.is_cuda:
        out = torch.mm(hidden, weight.T, out_dtype=torch.float32)
    else:
        rows = hidden.float()
        out = torch.empty(len(hidden), len(weight), dtype=torch.float32, device=hidden.device)
        for begin in range(0, len(weight), ROWS_AT_ONCE):
            part = slice(begin, begin + ROWS_AT_ONCE)
            torch.mm(rows, weight[part].T.float(), out=out[:, part])
    return out if bias is None else out.add_(bias)


PROBE_TOKENS = 8
"""Number of tokens on which a projection is tested."""

TOLERANCE = 0.05
"""Largest accepted relative deviation of projections from the model's logits; rounding in bfloat16 causes far less."""


def probe_tokens(model: PreTrainedModel, count: int) -> Tensor:
    """Return tokens i64[count] spread over the vocabulary, for testing a model."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    return torch.arange(count, device=model.device) * vocabulary // count


@torch.no_grad()
def check_projection(model: PreTrainedModel) -> None:
    """Raise ConfigError if `project` does not return the model's logits.

    No interface describes what a model family does to its logits. If a scale were missed, the wrong distribution would
    be sampled and trained without any error.
    """
    tokens = probe_tokens(model, PROBE_TOKENS)[None]
    hidden = model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state[0]
    projected, expected = project(model, hidden), model(input_ids=tokens, use_cache=False).logits[0]
    if torch.linalg.vector_norm(projected - expected) > TOLERANCE * torch.linalg.vector_norm(expected):
        raise ConfigError(
            f"model family {model.config.model_type!r} computes its logits in an unsupported way; use another family"
        )


class ChunkedHead:
    """The vocabulary projection of one forward and backward pass, computed chunk by chunk.

    All chunks add to one gradient of the matrix in place. Autograd alone would make a [V, H] tensor for each chunk
    before adding it to the sum, so that three tensors of the size of the model's largest matrix would exist at once.
    Heads that are more than a matrix are left to autograd.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        head = model.get_output_embeddings()
        self._model = model
        self._weight_grad: list[Tensor] = []
        self._weight: Tensor | None = None
        if torch.is_grad_enabled() and head.weight.requires_grad and _is_a_matrix(head):
            self._weight = _SharedGradient.apply(head.weight, self._weight_grad)  # type: ignore[no-untyped-call]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [n, V] of a chunk's hidden states [n, H], as `project` does."""
        if self._weight is None:
            return project(self._model, hidden)
        return _scale_logits(self._model, _ChunkLogits.apply(hidden, self._weight, self._weight_grad))  # type: ignore[no-untyped-call]

    def join(self, values: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Concatenate the two values [n] of each chunk into two tensors [N].

        Everything computed from the logits must pass through here, since the head's backward pass begins here.
        """
        one, other = _JoinChunks.apply(self._weight_grad, *itertools.chain(*values))  # type: ignore[no-untyped-call]
        return one, other


def _is_linear(head: nn.Module) -> bool:
    """Return whether a head is a linear layer without hooks or a replaced forward."""
    is_replaced = "forward" in vars(head) or head._forward_hooks or head._forward_pre_hooks
    return type(head) is nn.Linear and not is_replaced


def _is_a_matrix(head: nn.Module) -> bool:
    """Return whether a head is linear as in `_is_linear` and has no bias."""
    return _is_linear(head) and head.bias is None


class _LinearFloat32(torch.autograd.Function):
    """`linear_float32` with a gradient, from hidden [N, H], weight [V, H] and bias [V] or None to logits [N, V].

    The backward pass is computed in the dtype of the weight.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return linear_float32(hidden, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        low, needed = grad.to(weight.dtype), ctx.needs_input_grad
        return (
            low @ weight if needed[0] else None,
            low.T @ hidden if needed[1] else None,
            grad.sum(dim=0).to(weight.dtype) if needed[2] else None,
        )


class _SharedGradient(torch.autograd.Function):
    """A weight [V, H] whose gradient is the sum that all `_ChunkLogits` accumulate in `weight_grad`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, weight_grad: list[Tensor]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.weight_grad = weight_grad
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None) -> tuple[Tensor | None, ...]:
        return ctx.weight_grad.pop(), None


class _ChunkLogits(torch.autograd.Function):
    """Project a chunk's hidden states [n, H] with the weight [V, H] of a `_SharedGradient` to logits [n, V].

    The backward pass adds the weight's gradient to `weight_grad`.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, weight_grad: list[Tensor]) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.weight_grad = weight_grad
        return linear_float32(hidden, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        grad = grad.to(weight.dtype)
        if ctx.weight_grad:
            ctx.weight_grad[0].addmm_(grad.T, hidden)
        else:
            ctx.weight_grad.append(grad.T @ hidden)
        return grad @ weight, None, None


class _JoinChunks(torch.autograd.Function):
    """Concatenate the values [n] of all chunks, two from each in turn, into two tensors [N].

    The backward pass begins here, so it first clears `weight_grad`, where an earlier pass that failed may have left a
    sum.
    """

    @staticmethod
    def forward(ctx: Any, weight_grad: list[Tensor], *values: Tensor) -> tuple[Tensor, Tensor]:
        ctx.weight_grad, ctx.sizes = weight_grad, [len(value) for value in values[::2]]
        one, other = torch.cat(values[::2]), torch.cat(values[1::2])
        has_gradient = [any(ctx.needs_input_grad[1 + i :: 2]) for i in range(2)]
        ctx.mark_non_differentiable(*(out for out, own in zip((one, other), has_gradient, strict=True) if not own))
        return one, other

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, one: Tensor, other: Tensor) -> tuple[Tensor | None, ...]:
        ctx.weight_grad.clear()
        return None, *itertools.chain(*zip(one.split(ctx.sizes), other.split(ctx.sizes), strict=True))
