"""Packed weights compute what the plain ones do, and follow their changes."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from networks import network
from turnstile.engines.local.cpu.packed_weights import PackedLinears, PackedWeight

ROWS = torch.randn(1, 5, 24, generator=torch.Generator().manual_seed(0))


class Calls(nn.Module):
    """Two layers, and a third with a `forward` of its own."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first = nn.Linear(24, 32)
            self.second = nn.Linear(32, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


@pytest.fixture
def model() -> Calls:
    return Calls()


def plain(model: Calls, x: Tensor) -> Tensor:
    return x @ model.first.weight.T @ model.second.weight.T + model.first.bias @ model.second.weight.T


def ran(packed: PackedLinears, model: Calls, x: Tensor = ROWS) -> Tensor:
    with torch.no_grad(), packed.active():
        return model(x)


def test_matches_plain_layers(model: Calls) -> None:
    packed = PackedLinears(model)
    for rows in (1, 5, 40):
        x = torch.randn(1, rows, 24)
        torch.testing.assert_close(ran(packed, model, x), plain(model, x), rtol=1e-5, atol=1e-5)


def test_runs_on_the_copies(model: Calls) -> None:
    """Otherwise the other tests would prove nothing: an unnoticed change of the weights does not show."""
    packed = PackedLinears(model)
    before = ran(packed, model)
    model.first.weight.data.mul_(2)  # past the counter that changes in place raise
    assert torch.equal(ran(packed, model), before)
    packed.invalidate()
    torch.testing.assert_close(ran(packed, model), plain(model, ROWS), rtol=1e-5, atol=1e-5)


def test_frozen_copies_are_kept(model: Calls) -> None:
    model.first.requires_grad_(False)
    packed = PackedLinears(model)
    before = ran(packed, model)
    model.first.weight.data.mul_(2)
    packed.invalidate()
    assert torch.equal(ran(packed, model), before)


def test_follows_changes_in_place(model: Calls) -> None:
    packed = PackedLinears(model)
    ran(packed, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(ROWS).sum().backward()
    optimizer.step()
    torch.testing.assert_close(ran(packed, model), plain(model, ROWS), rtol=1e-5, atol=1e-5)


def test_other_threads_run_on_the_weights(model: Calls) -> None:
    """The trainer may have changed them while another thread still samples with the old ones."""
    packed = PackedLinears(model)
    is_sampling, changed = threading.Event(), threading.Event()

    def sample() -> None:
        with torch.no_grad(), packed.active():
            is_sampling.set()
            assert changed.wait(60)

    sampling = threading.Thread(target=sample)
    sampling.start()
    assert is_sampling.wait(60)
    try:
        with torch.no_grad():
            model.first.weight.mul_(2)
            torch.testing.assert_close(model(ROWS), plain(model, ROWS), rtol=1e-5, atol=1e-5)
    finally:
        changed.set()
        sampling.join()


def test_follows_replaced_storage(model: Calls) -> None:
    packed = PackedLinears(model.requires_grad_(False))
    ran(packed, model)
    model.first.weight.data = model.first.weight.data * 2
    torch.testing.assert_close(ran(packed, model), plain(model, ROWS), rtol=1e-5, atol=1e-5)


def test_gradients_match_plain_layers(model: Calls) -> None:
    packed = PackedLinears(model)
    with packed.active():
        model(ROWS).sum().backward()
    found = model.first.weight.grad
    assert found is not None
    model.zero_grad()
    model(ROWS).sum().backward()
    assert torch.equal(found, model.first.weight.grad)


def test_restores_the_model(model: Calls) -> None:
    own = model.second.forward
    model.second.forward = lambda x: own(x) + 1  # type: ignore[method-assign]
    packed = PackedLinears(model)
    torch.testing.assert_close(ran(packed, model), plain(model, ROWS) + 1, rtol=1e-5, atol=1e-5)
    assert "forward" not in vars(model.first)
    assert "forward" in vars(model.second)
    with pytest.raises((RuntimeError, ValueError)):
        ran(packed, model, torch.randn(1, 2, 3))
    assert "forward" not in vars(model.first)


def test_other_dtypes_are_left_alone() -> None:
    model = network(dtype=torch.float64)
    packed = PackedLinears(model)
    assert not packed._packed
    assert len(PackedLinears(network())._packed) == 2 * 7 + 1


def test_without_kernels_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnstile.engines.local.cpu.compiled.is_available", lambda: False)
    assert not PackedLinears(network())._packed


def test_layers_with_and_without_bias() -> None:
    layers = [nn.Linear(24, 6, bias=bias) for bias in (True, False, True)]
    order = torch.randperm(18)
    packed = PackedWeight(*layers, order=order)
    packed.refresh()
    with torch.no_grad():
        wanted = torch.cat([layer(ROWS) for layer in layers], dim=-1)[..., order]
        torch.testing.assert_close(packed(ROWS), wanted, rtol=1e-5, atol=1e-5)


def test_failed_packing_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the weights are the ones that were packed before the failure."""
    layer = nn.Linear(24, 6)
    packed, own = PackedWeight(layer), layer.weight.data
    packed.refresh()

    def full(layer: nn.Module) -> Tensor:
        raise MemoryError

    layer.weight.data = own.clone()
    with monkeypatch.context() as patch:
        patch.setattr("turnstile.engines.local.cpu.packed_weights.weight_of", full)
        with pytest.raises(MemoryError):
            packed.refresh()
    layer.weight.data = own
    packed.refresh()
    with torch.no_grad():
        torch.testing.assert_close(packed(ROWS), layer(ROWS), rtol=1e-5, atol=1e-5)
