"""Checkpoints: bit-exact restore, torn folders, the ledger's commits, and pruning."""

from __future__ import annotations

import random
import resource
import subprocess
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers import tiny_llama
from networks import random_rows
from turnstile.batching.weights import token as token_weights
from turnstile.errors import CheckpointError
from turnstile.losses.reinforce import reinforce
from turnstile.models.adapt import choose_trainable
from turnstile.trainer import checkpoint, rng
from turnstile.trainer.learner import Learner, LearnerConfig, Objective
from turnstile.trainer.optim import linear

OBJECTIVE = Objective(loss=reinforce, aggregation=token_weights)
PLAN = LearnerConfig(lr=1e-2, schedule=linear, warmup=1, total=6)


def learner(train: Literal["all", "top", "lora"] = "all", *, seed: int = 0) -> Learner:
    model = tiny_llama(40, hidden=16, seed=seed)
    layers = 1 if train == "top" else 0
    return Learner(model, choose_trainable(model, train, top_layers=layers, lora_rank=2), PLAN)


def numbers(state: Any) -> Any:
    """Return the whole state of a learner as plain Python values."""
    if isinstance(state, torch.Tensor):
        return state.tolist()
    if isinstance(state, dict):
        return {str(key): numbers(value) for key, value in state.items()}
    return [numbers(item) for item in state] if isinstance(state, list | tuple) else state


def everything(of: Learner) -> Any:
    return numbers([dict(of.model.state_dict()), of.state()])


def save(folder: Path, step: int, of: Learner, words: Any, **state: Any) -> Path:
    return checkpoint.save(folder, step, of, words, state).path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("train", ["all", "top", "lora"])
def test_restore_gives_back_every_bit(train: Literal["all", "top", "lora"], tmp_path: Path, words: Any) -> None:
    """A restored learner is bitwise identical to the saved one, and so is its next update."""
    original = learner(train)
    rows = random_rows(4, vocabulary=32)
    for _ in range(2):
        original.update(rows, OBJECTIVE)
    path = save(tmp_path, 2, original, words, credit={"a": [1.5]}, sampler={"epoch": 3})
    found, complaints = checkpoint.latest(tmp_path)
    assert found is not None
    assert (found.path, found.step, complaints) == (path, 2, [])
    assert (found.state["credit"], found.state["sampler"]) == ({"a": [1.5]}, {"epoch": 3})
    other = learner(train)
    other.update(random_rows(2, seed=5, vocabulary=32), OBJECTIVE)  # so that its state differs
    checkpoint.restore(found, other)
    assert everything(other) == everything(original)
    for each in (original, other):
        each.update(rows, OBJECTIVE)
    assert everything(other) == everything(original)


@pytest.mark.parametrize("train", ["all", "lora"])
def test_model_folder_loads_in_transformers(train: Literal["all", "lora"], tmp_path: Path, words: Any) -> None:
    trained = learner(train)
    trained.update(random_rows(4, vocabulary=32), OBJECTIVE)
    folder = save(tmp_path, 1, trained, words) / "model"
    plain = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.arange(3, 15)[None]
    with torch.no_grad():
        theirs, ours = plain(tokens).logits, trained.model(tokens).logits
        before = learner(train).model(tokens).logits
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)
    assert (ours - before).abs().max() > 1e-3
    assert AutoTokenizer.from_pretrained(folder).encode("higher") == words.encode("higher")


@pytest.mark.parametrize("damage", ["cut", "emptied", "deleted", "changed"])
def test_detects_a_torn_file(damage: str, tmp_path: Path, words: Any) -> None:
    whole = learner()
    save(tmp_path, 1, whole, words)
    newest = save(tmp_path, 2, whole, words)
    files = [file for file in newest.rglob("*") if file.is_file()]
    assert {"SHA256SUMS", "state.json", "optimizer.pt", "model.safetensors", "config.json"} <= {
        file.name for file in files
    }
    for file in files:
        data = file.read_bytes()
        if damage == "deleted":
            file.unlink()
        else:
            middle = len(data) // 2
            changed = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
            file.write_bytes({"cut": data[:-1], "emptied": b"", "changed": changed}[damage])
        with pytest.raises(CheckpointError, match="step-000002 is torn"):
            checkpoint.read(newest)
        found, complaints = checkpoint.latest(tmp_path)
        assert found is not None
        assert found.step == 1
        assert len(complaints) == 1
        assert complaints[0].startswith("checkpoint step-000002 is torn: ")
        assert complaints[0].endswith("; going back to the one before")
        file.write_bytes(data)
    assert checkpoint.latest(tmp_path) == (checkpoint.read(newest), [])


def test_latest_without_an_intact_checkpoint_is_none(tmp_path: Path, words: Any) -> None:
    assert checkpoint.latest(tmp_path / "none") == (None, [])
    path = save(tmp_path, 1, learner(), words)
    (path / "SHA256SUMS").write_bytes(b"\xff")
    found, complaints = checkpoint.latest(tmp_path)
    assert found is None
    assert "SHA256SUMS is missing or unreadable" in complaints[0]


def test_latest_skips_checkpoints_that_the_ledger_does_not_name(tmp_path: Path, words: Any) -> None:
    some = learner()
    first = checkpoint.save(tmp_path, 1, some, words, {})
    second = checkpoint.save(tmp_path, 2, some, words, {"credit": {}})
    for committed, step in (
        ({1: first.digest, 2: second.digest}, 2),
        ({1: first.digest}, 1),
        ({2: first.digest}, None),
    ):
        found, complaints = checkpoint.latest(tmp_path, committed)
        assert (found.step if found else None) == step
        assert all("is not in the ledger" in line for line in complaints)
        assert len(complaints) == 2 - (step or 0)


def test_sha256sum_checks_the_list(tmp_path: Path, words: Any) -> None:
    path = save(tmp_path, 1, learner(), words)
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=path, check=True)


def test_restores_rng_states(tmp_path: Path, words: Any) -> None:
    """The global generators of Python, NumPy and torch, which a custom reward may use."""

    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), float(np.random.normal()), float(torch.rand(()))]

    rng.seed(7)
    draw()
    save(tmp_path, 1, learner(), words)
    expected = [draw(), draw()]
    rng.seed(8)
    found, _ = checkpoint.latest(tmp_path)
    assert found is not None
    checkpoint.restore(found, learner())
    assert [draw(), draw()] == expected


def test_full_disk_keeps_earlier_checkpoints(tmp_path: Path, words: Any) -> None:
    some = learner()
    save(tmp_path, 1, some, words)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (0, 100, 5_000, 20_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            with pytest.raises(CheckpointError, match=r"step 2 could not be written .*earlier checkpoints are intact"):
                save(tmp_path, 2, some, words)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert names(tmp_path) == ["step-000001"]
    assert checkpoint.latest(tmp_path) == (checkpoint.read(tmp_path / "step-000001"), [])


def test_prune_keeps_the_given_steps(tmp_path: Path, words: Any) -> None:
    some = learner()
    for step in range(4):
        save(tmp_path, step, some, words)
    checkpoint.prune(tmp_path, {0, 3})
    assert names(tmp_path) == ["step-000000", "step-000003"]


def test_resumed_run_replaces_later_checkpoints(tmp_path: Path, words: Any) -> None:
    """Step 4 was torn, so the run resumed from 2; its new checkpoints take precedence over the torn one."""
    some = learner()
    for step in (2, 4):
        save(tmp_path, step, some, words)
    (tmp_path / "step-000004" / "optimizer.pt").unlink()
    save(tmp_path, 3, some, words)
    checkpoint.prune(tmp_path, {3})
    assert names(tmp_path) == ["step-000003"]
    found, complaints = checkpoint.latest(tmp_path)
    assert found is not None
    assert (found.step, complaints) == (3, [])


def test_save_removes_folders_of_killed_writers(tmp_path: Path, words: Any) -> None:
    (tmp_path / ".writing-abc" / "model").mkdir(parents=True)
    (tmp_path / ".writing-abc" / "model" / "model.safetensors").write_bytes(b"half")
    assert checkpoint.latest(tmp_path) == (None, [])
    save(tmp_path, 1, learner(), words)
    assert names(tmp_path) == ["step-000001"]


def test_failed_save_leaves_no_folder(tmp_path: Path, words: Any) -> None:
    save(tmp_path, 1, learner(), words)
    with pytest.raises(TypeError, match="not JSON serializable"):
        save(tmp_path, 2, learner(), words, credit=object())
    assert names(tmp_path) == ["step-000001"]


def test_refuses_another_architecture(tmp_path: Path, words: Any) -> None:
    path = save(tmp_path, 1, learner(), words)
    deeper = tiny_llama(40, hidden=16, layers=3)
    other = Learner(deeper, list(deeper.parameters()), PLAN)
    with pytest.raises(CheckpointError, match=r"weights missing, 0 unknown, .*model\.layers\.2.*check that model\.id"):
        checkpoint.restore(checkpoint.read(path), other)


def test_refuses_other_adapters(tmp_path: Path, words: Any) -> None:
    path = save(tmp_path, 1, learner("lora"), words)
    with pytest.raises(CheckpointError, match="holds other adapters than the recipe trains"):
        checkpoint.restore(checkpoint.read(path), learner())


def test_saving_a_step_again_replaces_it(tmp_path: Path, words: Any) -> None:
    some = learner()
    save(tmp_path, 1, some, words, note="old")
    some.update(random_rows(2, vocabulary=32), OBJECTIVE)
    path = save(tmp_path, 1, some, words, note="new")
    assert checkpoint.read(path).state["note"] == "new"


def test_refuses_a_checkpoint_without_the_auxiliary_model(tmp_path: Path) -> None:
    bare = checkpoint.Checkpoint(path=tmp_path / "step-000003", step=3, state={}, digest="")
    with pytest.raises(CheckpointError, match=r"step-000003 has no auxiliary model, which credit\.kind needs"):
        checkpoint.restore_auxiliary(bare, None)  # type: ignore[arg-type]
