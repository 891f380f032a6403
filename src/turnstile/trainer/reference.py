"""What losses compare the policy with: the one that RL began with, the one before a step, a teacher, its past."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from turnstile.batching.forest import pack_prefix_trees
from turnstile.errors import CheckpointError, ConfigError
from turnstile.models.attention import forward_forest, try_layouts, uses_layouts
from turnstile.models.logprobs import token_logprobs
from turnstile.records.gzip_log import flush
from turnstile.trainer.learner import Learner, scatter
from turnstile.types import Group, Row, Sampling, Score

_log = logging.getLogger(__name__)


class LogprobProvider(Protocol):
    """Gives the rows of a step one more array among their extras, before the step."""

    def on_step_start(self, groups: Sequence[Group], scores: Sequence[Sequence[Score]]) -> None:
        """Is shown the step before any of its rows. Most need nothing of it."""
        return

    def annotate(self, rows: Sequence[Row], sampling: Sampling) -> list[Row]: ...

    def on_step_end(self, step: int) -> None:
        """Is told of each step that is done. Most have nothing to do then."""
        return


class Proximal(LogprobProvider):
    """The policy as the trainer computes it before the step, which the sampler's word on it may differ from."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    def annotate(self, rows: Sequence[Row], sampling: Sampling) -> list[Row]:
        """The rows with `proximal_logprobs` f32[L] among their extras, 0 where masked."""
        return annotated(self._learner.model, self._learner.plan.budget, rows, sampling, "proximal_logprobs")


class Teacher(LogprobProvider):
    """Another network with the same vocabulary, for good."""

    def __init__(self, model: PreTrainedModel, learner: Learner) -> None:
        own, other = (m.get_output_embeddings().weight.shape[0] for m in (learner.model, model))
        if own != other:
            raise ConfigError(
                f"train.teacher knows {other} tokens, the model that learns {own}; take one of its family"
            )
        if why := try_layouts(model):
            _log.warning(
                "train.teacher: %s: rows go through it one by one, and what they share is computed for each", why
            )
        self._model = model
        self._budget = learner.plan.budget

    def annotate(self, rows: Sequence[Row], sampling: Sampling) -> list[Row]:
        """The rows with `teacher_logprobs` f32[L] among their extras, 0 where masked."""
        return annotated(self._model, self._budget, rows, sampling, "teacher_logprobs")


class Past(LogprobProvider):
    """The mean entropy of the tokens of all optimiser steps so far."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    def annotate(self, rows: Sequence[Row], sampling: Sampling) -> list[Row]:
        """The rows with `entropy_past` f32[L] among their extras, the same everywhere; NaN before the first step."""
        past = np.float32(self._learner.mean_entropy)
        return [replace(row, extras={**row.extras, "entropy_past": np.full(len(row.token_ids), past)}) for row in rows]


class Reference(LogprobProvider):
    """The policy that RL began with, which a KL penalty holds on to: a copy of what learns; the frozen rest is shared
    with the network that learns.

    With `every` above 0 it becomes the policy of now after so many steps, and the optimiser begins anew, as in ProRL
    (arXiv 2505.24864; there by hand, where progress stalls). Kept in `folder`, one file for each policy it was, so
    that a resumed run holds on to the same one: the last that is not later than its `step`. The last `keep` + 1 of
    them stay, which is enough for that many checkpoints, if there is one at least every `every` steps.
    """

    def __init__(self, learner: Learner, folder: Path, *, step: int = 0, every: int = 0, keep: int = 2) -> None:
        self._learner, self._folder, self._every, self._keep = learner, folder, every, keep
        for file in self._files():
            if _step_of(file) > step:  # of a future that this run has gone back behind
                file.unlink()
        if files := self._files():
            values = torch.load(files[-1], map_location="cpu", weights_only=True)
            self._values = [value.to(learner.model.device) for value in values]
        elif step:
            raise CheckpointError(f"{folder} has no reference-*.pt, which the policy of step {step} was held to")
        else:
            self._become(step)

    def on_step_end(self, step: int) -> None:
        """Becomes the policy of now if it is time."""
        if self._every and step % self._every == 0:
            self._become(step)
            self._learner.optimizer.state.clear()

    def _become(self, step: int) -> None:
        self._values = [parameter.detach().clone() for parameter in self._learner.parameters]
        file = self._folder / f"reference-{step:06d}.pt"
        scratch = file.with_suffix(".writing")
        torch.save(self._values, scratch)
        flush(scratch)
        scratch.rename(file)
        for old in self._files()[: -self._keep - 1]:
            old.unlink()

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("reference-*.pt"))

    def annotate(self, rows: Sequence[Row], sampling: Sampling) -> list[Row]:
        """The rows with `ref_logprobs` f32[L] among their extras, 0 where masked."""
        with holding(self._learner.parameters, self._values):
            return annotated(self._learner.model, self._learner.plan.budget, rows, sampling, "ref_logprobs")


@contextmanager
def holding(parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> Iterator[None]:
    """Other values in a network's parameters for a while."""
    current = [parameter.detach().clone() for parameter in parameters]
    _put(parameters, values)
    try:
        yield
    finally:
        _put(parameters, current)


def _put(parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


def _step_of(file: Path) -> int:
    return int(file.stem.removeprefix("reference-"))


def annotated(model: PreTrainedModel, budget: int, rows: Sequence[Row], sampling: Sampling, name: str) -> list[Row]:
    """The rows with the log-probabilities f32[L] that the network has now among their extras, 0 where masked."""
    logprobs = [np.zeros(len(row.token_ids), np.float32) for row in rows]
    no_weights = [np.zeros(len(row.token_ids), np.float32) for row in rows]
    with torch.no_grad():
        for batch in pack_prefix_trees(rows, no_weights, budget=budget, device=model.device, share=uses_layouts(model)):
            hidden = forward_forest(model, batch)
            new, _ = token_logprobs(model, hidden[batch.source], batch.target, batch.temperature, sampling)
            scatter(logprobs, rows, batch, new)
    return [replace(row, extras={**row.extras, name: values}) for row, values in zip(rows, logprobs, strict=True)]
