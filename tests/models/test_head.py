"""The vocabulary projection against stock models', and its gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from networks import network
from turnstile.errors import ConfigError
from turnstile.models.head import ROWS_AT_ONCE, ChunkedHead, check_projection, project

SCALED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("granite", {"logits_scaling": 3.0}),
    ("cohere", {"logit_scale": 0.5, "pad_token_id": 0}),
    ("gemma2", {"final_logit_softcapping": 0.5, "head_dim": 8}),
]


@pytest.mark.parametrize(("family", "knobs"), SCALED)
def test_projection_matches_the_family(family: str, knobs: dict[str, Any]) -> None:
    """The last steps of a stock model: scaling (Granite, Cohere), soft capping (Gemma 2)."""
    model = network(family, dtype=torch.float64, **knobs)
    tokens = torch.arange(3, 12)[None]
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits[0]
        hidden = model.get_decoder()(tokens, use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(project(model, hidden), expected, rtol=0, atol=1e-12)
        assert (project(model, hidden) - model.get_output_embeddings()(hidden)).abs().max() > 0.1 or not knobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "knobs"), SCALED)
def test_accepts_a_matching_projection(family: str, knobs: dict[str, Any], dtype: torch.dtype) -> None:
    check_projection(network(family, dtype=dtype, **knobs))


def test_rejects_a_different_projection() -> None:
    """HyperCLOVAX multiplies by what Granite divides by."""
    model = network("hyperclovax", logits_scaling=0.25)
    with pytest.raises(ConfigError, match="model family 'hyperclovax' computes its logits in an unsupported way; use"):
        check_projection(model)


def test_projection_is_at_least_float32() -> None:
    model = network(dtype=torch.bfloat16)
    with torch.no_grad():
        assert project(model, torch.randn(2, 32).bfloat16()).dtype == torch.float32


@pytest.mark.parametrize(("family", "knobs"), [*SCALED, ("phi", {})])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [40, 2 * ROWS_AT_ONCE + 1])
def test_logits_of_half_precision_models_are_not_rounded(
    family: str, knobs: dict[str, Any], dtype: torch.dtype, vocabulary: int
) -> None:
    """The factors are rounded; their products and sums are in single precision."""
    model = network(family, dtype=dtype, vocab_size=vocabulary, **knobs)
    exact = copy.deepcopy(model).double()
    hidden = (4 * states(6)).detach().to(dtype)
    for found in (project(model, hidden), ChunkedHead(model).logits(hidden)):
        torch.testing.assert_close(found.double(), project(exact, hidden.double()), rtol=1e-5, atol=1e-5)
    rounded = model.get_output_embeddings()(hidden)
    assert (rounded.double() - exact.get_output_embeddings()(hidden.double())).abs().max() > 1e-3


@pytest.mark.parametrize(("family", "knobs"), [*SCALED, ("phi", {})])
def test_gradients_of_half_precision_models(family: str, knobs: dict[str, Any]) -> None:
    model = network(family, dtype=torch.bfloat16, **knobs)
    exact = copy.deepcopy(model).double()
    hidden = states(6).detach().bfloat16().requires_grad_()
    slopes = []
    for each, own in ((model, hidden), (exact, hidden.detach().double().requires_grad_())):
        inputs = [own, *each.get_output_embeddings().parameters()]
        slopes.append(torch.autograd.grad(chunked(each, own).sum(), inputs))
        torch.testing.assert_close(slopes[-1], torch.autograd.grad(whole(each, own).sum(), inputs), rtol=2e-2, atol=0.1)
    for found, wanted in zip(*slopes, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2e-2 * float(wanted.abs().max()))


class Made(TorchDispatchMode):
    """Counts the operations that allocate a matrix of a shape, except views."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self._shapes, self.count = (shape, shape[::-1]), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        held = {one.untyped_storage().data_ptr() for one in args if isinstance(one, Tensor)}
        if isinstance(out, Tensor) and out.shape in self._shapes and out.untyped_storage().data_ptr() not in held:
            self.count += 1
        return out


def chunked(model: Any, hidden: Tensor) -> Tensor:
    """Return a function of every token's logits, three tokens at once."""
    head = ChunkedHead(model)
    logits = [head.logits(part) for part in hidden.split(3)]
    one, other = head.join([(each.logsumexp(dim=-1), each.amax(dim=-1)) for each in logits])
    return one * other


def whole(model: Any, hidden: Tensor) -> Tensor:
    logits = project(model, hidden)
    return logits.logsumexp(dim=-1) * logits.amax(dim=-1)


def states(n: int) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, 32, dtype=torch.float64, generator=generator).requires_grad_()


@pytest.mark.parametrize(("family", "knobs"), [*SCALED, ("phi", {})])  # Phi's head has biases
@pytest.mark.parametrize("asked", [["hidden"], ["weight"], ["hidden", "weight"]])
def test_chunks_match_the_whole(family: str, knobs: dict[str, Any], asked: list[str]) -> None:
    """Also on a second backward pass, after one that did not need the weight's gradient."""
    model, hidden = network(family, dtype=torch.float64, **knobs), states(10)
    tensors = {"hidden": hidden, "weight": model.get_output_embeddings().weight}
    found, wanted = chunked(model, hidden), whole(model, hidden)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    for inputs in (asked, ["weight"]):
        asked_for = [tensors[name] for name in inputs]
        torch.testing.assert_close(
            torch.autograd.grad(found.square().sum(), asked_for, retain_graph=True),
            torch.autograd.grad(wanted.square().sum(), asked_for, retain_graph=True),
            rtol=0, atol=1e-11,
        )  # fmt: skip


class Doubled(torch.nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def doubling(model: Any, how: str) -> Any:
    """Return the model with a head that doubles its output."""
    head = model.get_output_embeddings()
    if how == "class":
        head.__class__ = Doubled
    elif how == "hook":
        head.register_forward_hook(lambda _, __, out: 2 * out)
    else:
        head.forward = lambda x: 2 * torch.nn.functional.linear(x, head.weight)
    return model


@pytest.mark.parametrize("how", ["class", "hook", "forward"])
def test_other_heads_are_used_as_they_are(how: str) -> None:
    model, hidden = doubling(network(dtype=torch.float64), how), states(10)
    found, wanted = chunked(model, hidden), whole(model, hidden)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    inputs = [hidden, model.get_output_embeddings().weight]
    slopes = [torch.autograd.grad(values.sum(), inputs) for values in (found, wanted)]
    torch.testing.assert_close(*slopes, rtol=0, atol=1e-11)


def test_passes_add_to_an_existing_gradient() -> None:
    model = network(dtype=torch.float64)
    weight = model.get_output_embeddings().weight
    chunked(model, states(10)).sum().backward()
    first = weight.grad.clone()
    chunked(model, states(10)).sum().backward()
    torch.testing.assert_close(weight.grad, 2 * first, rtol=0, atol=1e-12)


def test_weight_gradient_is_allocated_once() -> None:
    model = network(dtype=torch.float64)
    values = chunked(model, states(20))
    with Made(model.get_output_embeddings().weight.shape) as made:
        values.sum().backward()
    assert made.count == 1
    assert model.get_output_embeddings().weight.grad is not None


@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_weights_get_no_gradient(frozen: bool) -> None:
    model, hidden = network(dtype=torch.float64).requires_grad_(not frozen), states(10)
    with torch.set_grad_enabled(frozen):
        found = chunked(model, hidden)
    torch.testing.assert_close(found, whole(model, hidden), rtol=0, atol=1e-12)
    assert found.requires_grad == frozen
    if frozen:
        with Made(model.get_output_embeddings().weight.shape) as made:
            found.sum().backward()
        assert made.count == 0
