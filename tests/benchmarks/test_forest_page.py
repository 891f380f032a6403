"""What is measured of training on shared prefixes is what it is said to be."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import page
from benchmarks.speed import forest, gpu_speed
from networks import network


def test_work_by_hand() -> None:
    """Two rows of 3 + 2 tokens: 7 tokens in the tree and 10 in rows, 4 of them trained."""
    model = network(num_hidden_layers=1)
    rows = forest.group_of(2, 3, 2, 40)
    matrices = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48
    head, width = 4 * 32 * 40, 32
    pairs = (1 + 2 + 3) + 2 * (4 + 5)
    assert forest.flops(model, rows, share=True) == 3 * (2 * matrices * 7 + 2 * head + 4 * width * pairs)
    assert forest.flops(model, rows, share=False) == 3 * (2 * matrices * 10 + 2 * head + 4 * width * (pairs + 6))


def test_a_plain_loop_takes_the_same_step() -> None:
    rows = forest.group_of(3, 5, 4, 40)
    losses = []
    for contestant in forest.CONTESTANTS:
        model = network()
        model.set_attn_implementation("sdpa")
        before = float(forest.plain_loss(model, rows, forest.token_weights(rows)).detach())
        forest.updating(model, contestant, 20)(rows)
        model.set_attn_implementation("sdpa")
        losses.append((before, float(forest.plain_loss(model, rows, forest.token_weights(rows)).detach())))
    for before, after in losses:
        assert after < before
        assert (before, after) == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.slow
def test_what_an_update_allocates_is_counted() -> None:
    """It grows with the tokens, and a plain loop takes no less than the learner."""
    short, long = (forest.Point(model=forest.SMALL, group=2, prompt=prompt, budget=2000) for prompt in (100, 500))
    found = {
        (contestant, point.prompt): forest.allocated(point, contestant, 0)["allocated_mb"]
        for contestant, point in itertools.product(("shared", "unshared", "batches"), (short, long))
    }
    assert 1.8 < found["unshared", 500] / found["unshared", 100] < 2.4  # 1,400 tokens and 600
    assert found["shared", 500] < 0.75 * found["unshared", 500]  # 900 tokens
    assert found["unshared", 500] < 1.02 * found["batches", 500]


def test_the_one_for_accelerators_runs(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(page, "KEPT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["gpu_speed.py", "--device", "cpu", "--tiny", "--repeats", "1"])
    gpu_speed.main()
    name, _, told = capsys.readouterr().out.partition(" ")
    body = json.loads(told)
    assert body["training"]["ratio of FLOPs"] > 1.5
    assert body["decoding"]["engine"] > 0
    row = gpu_speed.parts({f"cpu float32 {name}": body})[0].splitlines()[2].split(" | ")
    assert row[1:4] == ["tiny", "float32", "8 x (48 + 32)"]
    assert not (tmp_path / "gpu_speed.json").exists()  # of a CPU nothing is kept
