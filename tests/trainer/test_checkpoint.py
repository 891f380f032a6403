"""Checkpoints: back bit by bit, whole or not there, and how many stay."""

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
from turnstile.trainer import checkpoint
from turnstile.trainer import rng as chance
from turnstile.trainer.learner import Learner, Objective, Plan
from turnstile.trainer.optim import linear

OBJECTIVE = Objective(loss=reinforce, weigh=token_weights)
PLAN = Plan(lr=1e-2, schedule=linear, warmup=1, total=6)


def learner(train: Literal["all", "top", "lora"] = "all", *, seed: int = 0) -> Learner:
    model = tiny_llama(40, hidden=16, seed=seed)
    layers = 1 if train == "top" else 0
    return Learner(model, choose_trainable(model, train, top_layers=layers, lora_rank=2), PLAN)


def numbers(state: Any) -> Any:
    """Everything a learner holds, as plain Python."""
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
def test_round_trip(train: Literal["all", "top", "lora"], tmp_path: Path, words: Any) -> None:
    """What is restored is what was saved, to the last bit, and goes on as the original does."""
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
    other.update(random_rows(2, seed=5, vocabulary=32), OBJECTIVE)  # it has been elsewhere
    checkpoint.restore(found, other)
    assert everything(other) == everything(original)
    for each in (original, other):
        each.update(rows, OBJECTIVE)
    assert everything(other) == everything(original)


@pytest.mark.parametrize("train", ["all", "lora"])
def test_the_model_part_is_a_plain_folder(train: Literal["all", "lora"], tmp_path: Path, words: Any) -> None:
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
def test_a_torn_checkpoint_is_found_out_whichever_file_it_is(damage: str, tmp_path: Path, words: Any) -> None:
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


def test_nothing_whole_is_nothing(tmp_path: Path, words: Any) -> None:
    assert checkpoint.latest(tmp_path / "none") == (None, [])
    path = save(tmp_path, 1, learner(), words)
    (path / "SHA256SUMS").write_bytes(b"\xff")
    found, complaints = checkpoint.latest(tmp_path)
    assert found is None
    assert "SHA256SUMS is missing or unreadable" in complaints[0]


def test_what_the_ledger_does_not_name_does_not_count(tmp_path: Path, words: Any) -> None:
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


def test_sha256sum_reads_the_list(tmp_path: Path, words: Any) -> None:
    path = save(tmp_path, 1, learner(), words)
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=path, check=True)


def test_random_numbers_go_on(tmp_path: Path, words: Any) -> None:
    """Python's, numpy's and torch's own, which somebody's reward may draw from."""

    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), float(np.random.normal()), float(torch.rand(()))]

    chance.seed(7)
    draw()
    save(tmp_path, 1, learner(), words)
    expected = [draw(), draw()]
    chance.seed(8)
    found, _ = checkpoint.latest(tmp_path)
    assert found is not None
    checkpoint.restore(found, learner())
    assert [draw(), draw()] == expected


def test_a_full_disk_leaves_what_was_saved_before(tmp_path: Path, words: Any) -> None:
    some = learner()
    save(tmp_path, 1, some, words)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (0, 100, 5_000, 20_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            with pytest.raises(CheckpointError, match=r"checkpoint of step 2 could not be written .*stands"):
                save(tmp_path, 2, some, words)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert names(tmp_path) == ["step-000001"]
    assert checkpoint.latest(tmp_path) == (checkpoint.read(tmp_path / "step-000001"), [])


def test_how_many_stay(tmp_path: Path, words: Any) -> None:
    some = learner()
    for step in range(4):
        save(tmp_path, step, some, words)
    checkpoint.keep(tmp_path, {0, 3})
    assert names(tmp_path) == ["step-000000", "step-000003"]


def test_a_run_that_went_back_replaces_what_came_later(tmp_path: Path, words: Any) -> None:
    """Step 4 was torn, so the run went back to 2; what it saves then must not lose against the torn one."""
    some = learner()
    for step in (2, 4):
        save(tmp_path, step, some, words)
    (tmp_path / "step-000004" / "optimizer.pt").unlink()
    save(tmp_path, 3, some, words)
    checkpoint.keep(tmp_path, {3})
    assert names(tmp_path) == ["step-000003"]
    found, complaints = checkpoint.latest(tmp_path)
    assert found is not None
    assert (found.step, complaints) == (3, [])


def test_what_a_killed_writer_left_goes_away(tmp_path: Path, words: Any) -> None:
    (tmp_path / ".writing-abc" / "model").mkdir(parents=True)
    (tmp_path / ".writing-abc" / "model" / "model.safetensors").write_bytes(b"half")
    assert checkpoint.latest(tmp_path) == (None, [])
    save(tmp_path, 1, learner(), words)
    assert names(tmp_path) == ["step-000001"]


def test_a_failure_while_writing_leaves_nothing(tmp_path: Path, words: Any) -> None:
    save(tmp_path, 1, learner(), words)
    with pytest.raises(TypeError, match="not JSON serializable"):
        save(tmp_path, 2, learner(), words, credit=object())
    assert names(tmp_path) == ["step-000001"]


def test_refuses_another_architecture(tmp_path: Path, words: Any) -> None:
    path = save(tmp_path, 1, learner(), words)
    deeper = tiny_llama(40, hidden=16, layers=3)
    other = Learner(deeper, list(deeper.parameters()), PLAN)
    with pytest.raises(CheckpointError, match=r"weights missing, 0 unknown, .*model\.layers\.2.*is model\.id another"):
        checkpoint.restore(checkpoint.read(path), other)


def test_refuses_other_adapters(tmp_path: Path, words: Any) -> None:
    path = save(tmp_path, 1, learner("lora"), words)
    with pytest.raises(CheckpointError, match="do not train the same adapters"):
        checkpoint.restore(checkpoint.read(path), learner())


def test_saving_a_step_again_replaces_it(tmp_path: Path, words: Any) -> None:
    some = learner()
    save(tmp_path, 1, some, words, note="old")
    some.update(random_rows(2, vocabulary=32), OBJECTIVE)
    path = save(tmp_path, 1, some, words, note="new")
    assert checkpoint.read(path).state["note"] == "new"


def test_a_checkpoint_without_what_is_to_be_learned_is_said(tmp_path: Path) -> None:
    bare = checkpoint.Checkpoint(path=tmp_path / "step-000003", step=3, state={}, digest="")
    with pytest.raises(CheckpointError, match=r"step-000003 holds nothing of the part that credit\.kind learns"):
        checkpoint.restore_learned(bare, None)  # type: ignore[arg-type]
