from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import guess_run
from turnstile.runs.dry_run import _device_memory, dry_run


@pytest.mark.slow
def test_the_process_that_plays_ahead_is_counted(tmp_path: Path) -> None:
    """It holds a model of its own, in a Python of its own."""
    found = dry_run(guess_run.recipe(tmp_path, sections={"rollout": {"max_staleness": 1}}))
    own = found["peak memory of the process that plays, MB"]
    assert 100 < own < found["peak memory, MB"]
    assert found["at best, where the two processes share no processor"] <= found["minutes of RL"]


def test_the_memory_that_a_group_took_of_a_gpu_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=24 * 2**30))
    assert _device_memory(torch.device("cuda:1")) == {"peak memory of the GPU, MB": "3072 of 24576"}
    assert _device_memory(torch.device("cpu")) == {}
