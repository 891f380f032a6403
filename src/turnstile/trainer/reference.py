"""Arrays with which losses compare the policy, namely other policies' log-probabilities and the past entropy."""

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
    """Computes one more array for the extras of each row, before the update."""

    def on_step_start(self, groups: Sequence[Group], scores: Sequence[Sequence[Score]]) -> None:
        """Receive the groups and scores of a step, before `provide` is called. Most providers ignore them."""
        return

    def provide(self, rows: Sequence[Row], sampling: Sampling) -> list[Row]:
        """Return the rows with the provider's array f32[L] among their extras."""
        ...

    def on_step_end(self, step: int) -> None:
        """Receive the number of the completed step. Most providers ignore it."""
        return


class ProximalPolicy(LogprobProvider):
    """The policy before the step, as computed by the trainer. The sampler's log-probabilities may differ slightly."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    def provide(self, rows: Sequence[Row], sampling: Sampling) -> list[Row]:
        """Return the rows with `proximal_logprobs` f32[L] among their extras, 0 where masked."""
        return with_logprobs(self._learner.model, self._learner.config.budget, rows, sampling, "proximal_logprobs")


class TeacherPolicy(LogprobProvider):
    """A fixed network with the same vocabulary as the policy."""

    def __init__(self, model: PreTrainedModel, learner: Learner) -> None:
        policy, teacher = (m.get_output_embeddings().weight.shape[0] for m in (learner.model, model))
        if policy != teacher:
            raise ConfigError(
                f"train.teacher has a vocabulary of {teacher} tokens and the policy one of {policy}; "
                "choose a teacher of the policy's model family"
            )
        if why := try_layouts(model):
            _log.warning(
                "train.teacher: %s: rows are computed one by one, and shared prefixes are computed for each row", why
            )
        self._model = model
        self._budget = learner.config.budget

    def provide(self, rows: Sequence[Row], sampling: Sampling) -> list[Row]:
        """Return the rows with `teacher_logprobs` f32[L] among their extras, 0 where masked."""
        return with_logprobs(self._model, self._budget, rows, sampling, "teacher_logprobs")


class PastEntropy(LogprobProvider):
    """The mean entropy of the trained tokens over all earlier optimiser steps."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    def provide(self, rows: Sequence[Row], sampling: Sampling) -> list[Row]:
        """Return the rows with `entropy_past` f32[L] among their extras, a constant; NaN before the first step."""
        past = np.float32(self._learner.mean_entropy)
        return [replace(row, extras={**row.extras, "entropy_past": np.full(len(row.token_ids), past)}) for row in rows]


class ReferencePolicy(LogprobProvider):
    """The policy at the start of RL, from which a KL penalty measures. Holds a copy of the trained parameters.

    The frozen parameters are shared with the policy. If `every` is above 0, the reference is reset to the current
    policy after every `every` steps and the optimiser's state is cleared, as in ProRL (arXiv 2505.24864, where it is
    done by hand when progress stalls). Each reference is stored as one file in `folder`. A resumed run uses the latest
    reference that is not later than its `step`. The last `keep` + 1 files are kept, which is enough for `keep`
    checkpoints if one is saved at least every `every` steps. Raises CheckpointError if a resumed run's file is missing.
    """

    def __init__(self, learner: Learner, folder: Path, *, step: int = 0, every: int = 0, keep: int = 2) -> None:
        self._learner, self._folder, self._every, self._keep = learner, folder, every, keep
        for file in self._files():
            if _step_of(file) > step:  # from a step after the checkpoint that this run resumes from
                file.unlink()
        if files := self._files():
            values = torch.load(files[-1], map_location="cpu", weights_only=True)
            self._values = [value.to(learner.model.device) for value in values]
        elif step:
            raise CheckpointError(
                f"{folder} has no reference-*.pt, the reference policy of step {step}; restore the file or start anew"
            )
        else:
            self._snapshot(step)

    def on_step_end(self, step: int) -> None:
        """Reset the reference to the current policy, if a reset is due."""
        if self._every and step % self._every == 0:
            self._snapshot(step)
            self._learner.optimizer.state.clear()

    def _snapshot(self, step: int) -> None:
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

    def provide(self, rows: Sequence[Row], sampling: Sampling) -> list[Row]:
        """Return the rows with `ref_logprobs` f32[L] among their extras, 0 where masked."""
        with swapped_parameters(self._learner.parameters, self._values):
            return with_logprobs(self._learner.model, self._learner.config.budget, rows, sampling, "ref_logprobs")


@contextmanager
def swapped_parameters(parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> Iterator[None]:
    """Replace the values of a network's parameters for the duration of a `with` block."""
    current = [parameter.detach().clone() for parameter in parameters]
    _copy_into(parameters, values)
    try:
        yield
    finally:
        _copy_into(parameters, current)


def _copy_into(parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


def _step_of(file: Path) -> int:
    return int(file.stem.removeprefix("reference-"))


def with_logprobs(model: PreTrainedModel, budget: int, rows: Sequence[Row], sampling: Sampling, name: str) -> list[Row]:
    """Return the rows with the model's log-probabilities f32[L] as the extra `name`, 0 where masked."""
    logprobs = [np.zeros(len(row.token_ids), np.float32) for row in rows]
    no_weights = [np.zeros(len(row.token_ids), np.float32) for row in rows]
    with torch.no_grad():
        for batch in pack_prefix_trees(rows, no_weights, budget=budget, device=model.device, share=uses_layouts(model)):
            hidden = forward_forest(model, batch)
            new, _ = token_logprobs(model, hidden[batch.source], batch.target, batch.temperature, sampling)
            scatter(logprobs, rows, batch, new)
    return [replace(row, extras={**row.extras, name: values}) for row, values in zip(rows, logprobs, strict=True)]
