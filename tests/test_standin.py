"""The device that is not there refuses what a CUDA device refuses, and counts what a CUDA device waits for."""

from __future__ import annotations

import threading

import pytest
import torch

from standin import DEVICE, reads
from turnstile.engines.local.sampling import draw
from turnstile.types import Sampling


def test_its_tensors_are_no_arrays() -> None:
    with pytest.raises((RuntimeError, TypeError), match="numpy"):
        torch.ones(3, device=DEVICE).numpy()
    assert torch.ones(3, device=DEVICE).cpu().numpy().tolist() == [1, 1, 1]


def test_operands_lie_on_one_device_but_for_numbers_copies_and_indices() -> None:
    here, there = torch.arange(3.0), torch.arange(3.0, device=DEVICE)
    for mixed in (lambda: there + here, lambda: torch.cat([there, here]), lambda: there.add_(here)):
        with pytest.raises(RuntimeError, match=r"Expected all tensors to be on the same device: aten\."):
            mixed()
    assert (there + torch.tensor(1.0)).tolist() == [1, 2, 3]
    assert there[torch.tensor([2, 0])].tolist() == [2, 0]
    assert there.copy_(here + 1).tolist() == [1, 2, 3]
    assert here.copy_(there).tolist() == [1, 2, 3]


def test_kernels_of_a_cpu_do_not_take_them() -> None:
    query = torch.randn(1, 1, 4, 8).to(DEVICE)
    with pytest.raises(NotImplementedError, match="flash_attention_for_cpu"):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, query, query)


def test_gradients_and_steps_are_those_of_the_cpu() -> None:
    found = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        layer = torch.nn.Linear(4, 3).to(device)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        for _ in range(2):
            layer(torch.ones(2, 4, device=device)).square().sum().backward()
            optimizer.step()
        found.append([parameter.tolist() for parameter in layer.parameters()])
    assert found[0] == found[1]


def test_what_waits_for_the_device_is_counted_in_all_threads() -> None:
    numbers = torch.arange(4.0, device=DEVICE)
    with reads() as counted:
        numbers.sum()  # nothing is read
        assert not counted
        float(numbers[0])
        numbers.cpu()
        numbers[numbers > 1]
        thread = threading.Thread(target=numbers.tolist)
        thread.start()
        thread.join()
        assert counted == {"elsewhere": 4}
        draw(numbers[None], torch.tensor([0], device=DEVICE), Sampling(), [0.5])
    assert {place.partition(":")[0] for place in counted} == {"elsewhere", "engines/local/sampling.py"}
