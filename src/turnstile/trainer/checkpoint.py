"""Checkpoints that are whole or not there: a folder written aside, flushed, and renamed into place.

`checkpoints/step-000012/` holds the network as a plain Hugging Face folder (`model/`), the optimiser
(`optimizer.pt`), what learns beside it, if anything does (`learned.pt`), and everything else as JSON (`state.json`).
`state.json` names the size of every other file, so a torn folder is found out when it is read.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from turnstile.errors import CheckpointError
from turnstile.models.adapt import adapter_state, merged_state
from turnstile.trainer.critic import Learned
from turnstile.trainer.learner import Learner

LEARNED = "learned.pt"
_NAME = re.compile(r"step-(\d{6})")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint on disk, found whole."""

    path: Path
    step: int
    state: Mapping[str, Any]

    @property
    def model(self) -> Path:
        return self.path / "model"


def save(
    folder: Path,
    step: int,
    learner: Learner,
    tokenizer: PreTrainedTokenizerBase,
    state: Mapping[str, Any],
    keep: int,
    *,
    learned: Mapping[str, Any] | None = None,
) -> Path:
    """Writes the checkpoint of `step` and keeps the last `keep`. `learned`: what a part that learns beside the policy
    keeps, tensors and all.

    Later ones are removed too: they are torn, or this run would not have gone back behind them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".writing-*"):  # by a process that was killed
        shutil.rmtree(left)
    target = folder / f"step-{step:06d}"
    scratch = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder))
    try:
        save_model(learner.model, tokenizer, scratch / "model")
        torch.save({**learner.state(), "adapter": adapter_state(learner.model)}, scratch / "optimizer.pt")
        if learned is not None:
            torch.save(dict(learned), scratch / LEARNED)
        sizes = {str(p.relative_to(scratch)): p.stat().st_size for p in sorted(scratch.rglob("*")) if p.is_file()}
        body = {"step": step, "files": sizes, **state}
        (scratch / "state.json").write_text(json.dumps(body, indent=1), encoding="utf-8")
        for file in scratch.rglob("*"):
            _flush(file)
        _flush(scratch)
        if target.exists():
            shutil.rmtree(target)
        scratch.rename(target)
        _flush(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    standing = sorted(path for path in folder.glob("step-*") if path.name <= target.name)[-keep:]
    for path in folder.glob("step-*"):
        if path not in standing:
            shutil.rmtree(path)
    return target


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """The network, adapters merged in, and its tokenizer as a plain Hugging Face folder."""
    model.save_pretrained(folder, state_dict=merged_state(model))
    tokenizer.save_pretrained(folder)


def latest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint, and a line for each newer one that is torn."""
    complaints: list[str] = []
    found = sorted((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), reverse=True)
    for path in found:
        try:
            return read(path), complaints
        except CheckpointError as error:
            complaints.append(f"{error}; going back to the one before")
    return None, complaints


def read(path: Path) -> Checkpoint:
    """Raises CheckpointError when a file is missing or not as long as it was written."""
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        sizes = dict(state["files"])
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(f"checkpoint {path.name} is torn: state.json is missing or unreadable") from None
    for name, size in sizes.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            raise CheckpointError(f"checkpoint {path.name} is torn: {name} is missing or cut short")
    return Checkpoint(path, int(state["step"]), state)


def restore(checkpoint: Checkpoint, learner: Learner) -> None:
    """Puts weights and optimiser back in place, bit by bit.

    With adapters, the layers below them are the frozen ones of the model the run started from. Raises
    CheckpointError when the checkpoint is of another architecture or of other trained parameters.
    """
    state = torch.load(checkpoint.path / "optimizer.pt", map_location=learner.model.device, weights_only=True)
    adapter = adapter_state(learner.model)
    if adapter.keys() != state["adapter"].keys():
        raise CheckpointError(f"checkpoint {checkpoint.path.name} and the recipe do not train the same adapters")
    if adapter:
        for name, parameter in adapter.items():
            parameter.copy_(state["adapter"][name])
    else:
        load_weights(learner.model, checkpoint.model)
    learner.restore(state)


def restore_learned(checkpoint: Checkpoint, part: Learned) -> None:
    """Puts a part that learns beside the policy back in place, bit by bit. Raises CheckpointError when the checkpoint
    holds none."""
    file = checkpoint.path / LEARNED
    if not file.is_file():
        raise CheckpointError(f"checkpoint {checkpoint.path.name} holds nothing of the part that credit.kind learns")
    part.restore(torch.load(file, map_location="cpu", weights_only=True))


def load_weights(model: PreTrainedModel, folder: Path) -> None:
    """The weights of a Hugging Face folder into a network that is already there.

    Raises CheckpointError when they belong to another architecture.
    """
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights.update(load_file(file, device=str(model.device)))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    missing = [name for name in missing if name not in tied]
    if missing or unexpected:
        wrong = (missing + unexpected)[0]
        raise CheckpointError(
            f"{folder} does not fit the model: {len(missing)} weights missing, {len(unexpected)} unknown, "
            f"for example {wrong}; is model.id another?"
        )
    model.tie_weights()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
