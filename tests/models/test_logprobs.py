"""Log-probabilities from hidden states, against plain softmax."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from networks import VOCABULARY, network
from turnstile.models import head as module
from turnstile.models.logprobs import CHUNKS_KEPT, token_logprobs, truncate
from turnstile.types import Sampling

LOGITS = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()


def kept(**knobs: Any) -> list[int]:
    cut = truncate(LOGITS, Sampling(**knobs))
    assert torch.equal(cut[cut.isfinite()], LOGITS[cut.isfinite()])
    return cut.isfinite().nonzero()[:, 1].tolist()


@pytest.mark.parametrize(
    ("knobs", "left"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 0.6}, [0, 1]),  # the token that crosses the line is in
        ({"top_p": 0.01}, [0]),
        ({"top_p": 0.8}, [0, 1, 2]),
        ({"min_p": 0.4}, [0, 1]),
        ({"min_p": 0.25}, [0, 1, 2]),
        ({"min_p": 1.0}, [0]),
        ({"top_k": 2, "top_p": 0.66}, [0]),  # of what top_k left, the first holds 2/3
        ({"top_p": 0.8, "min_p": 0.45}, [0, 1]),
    ],
)
def test_truncation_by_hand(knobs: dict[str, Any], left: list[int]) -> None:
    assert kept(**knobs) == left


def test_the_sampled_token_stays() -> None:
    cut = truncate(LOGITS.repeat(2, 1), Sampling(top_k=1), keep=torch.tensor([3, 0]))
    assert cut.isfinite().tolist() == [[True, False, False, True], [True, False, False, False]]


def by_hand(model: Any, hidden: Tensor, target: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    logp = (model.get_output_embeddings()(hidden) / temperature[:, None]).log_softmax(dim=-1)
    return logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(dim=-1)


def sample(n: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    hidden = torch.randn(n, 32, dtype=torch.float64, generator=generator)
    target = torch.randint(VOCABULARY, (n,), generator=generator)
    return hidden.requires_grad_(), target, 0.5 + torch.rand(n, generator=generator)


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("chunk", [2**24, 3 * VOCABULARY, 7 * VOCABULARY])
def test_values_and_gradients_by_hand(chunk: int, entropy_gradient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one chunk, in many that are recomputed in the backward pass, and in few that are not."""
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", {"cpu": chunk})
    model = network(dtype=torch.float64)
    head = model.get_output_embeddings().weight
    hidden, target, temperature = sample(20)
    found = token_logprobs(model, hidden, target, temperature, Sampling(), entropy_gradient=entropy_gradient)
    wanted = by_hand(model, hidden, target, temperature)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    assert [one.requires_grad for one in found] == [True, entropy_gradient]
    slope = torch.linspace(-1, 1, 20, dtype=torch.float64)
    losses = ((slope * logprobs * (entropy if entropy_gradient else 1)).sum() for logprobs, entropy in (found, wanted))
    slopes = [torch.autograd.grad(loss, [hidden, head]) for loss in losses]
    torch.testing.assert_close(*slopes, rtol=0, atol=1e-12)


def test_keeps_few_chunks_for_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", {"cpu": 5 * VOCABULARY})
    model = network(dtype=torch.float64)
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.shape == (5, VOCABULARY):
            kept.append(tensor.numel())
        return tensor

    hidden, target, temperature = sample(200)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs, _ = token_logprobs(model, hidden, target, temperature, Sampling())
        assert sum(kept) == CHUNKS_KEPT * 5 * VOCABULARY
    expected, _ = by_hand(model, hidden, target, temperature)
    slope = torch.linspace(-1, 1, 200, dtype=torch.float64)
    found, wanted = (torch.autograd.grad((values * slope).sum(), hidden) for values in (logprobs, expected))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_truncated_tokens_have_no_probability() -> None:
    """With top_k = 3, by hand: softmax over the three likeliest tokens, and over four if the token is the fourth."""
    model = network(dtype=torch.float64)
    hidden, target, temperature = sample(30)
    logprobs, entropy = token_logprobs(model, hidden, target, temperature, Sampling(top_k=3, temperature=9.9))
    found = logprobs.tolist()
    logits = model.get_output_embeddings()(hidden) / temperature[:, None]
    for i, row in enumerate(logits.tolist()):
        y = int(target[i])
        allowed = {*sorted(range(VOCABULARY), key=lambda token: -row[token])[:3], y}
        total = sum(math.exp(row[token]) for token in allowed)
        shares = [math.exp(row[token]) / total for token in allowed]
        assert math.isclose(found[i], row[y] - math.log(total), abs_tol=1e-12)
        assert math.isclose(float(entropy[i]), -sum(p * math.log(p) for p in shares), abs_tol=1e-12)
    assert torch.isfinite(torch.autograd.grad(logprobs.sum(), hidden)[0]).all()


def test_entropy_gradient_is_optional() -> None:
    model = network(dtype=torch.float64)
    hidden, target, temperature = sample(12)
    _, entropy = token_logprobs(model, hidden, target, temperature, Sampling(), entropy_gradient=True)
    _, expected = by_hand(model, hidden, target, temperature)
    found = torch.autograd.grad(entropy.square().sum(), hidden)[0]
    torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), hidden)[0], rtol=0, atol=1e-12)
    _, cut = token_logprobs(model, hidden, target, temperature, Sampling(top_k=3), entropy_gradient=True)
    assert torch.isfinite(torch.autograd.grad(cut.sum(), hidden)[0]).all()
