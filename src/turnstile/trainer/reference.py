"""The policy that a KL penalty holds on to: the trained parameters as they were before the first RL step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from turnstile.batching.forest import plant
from turnstile.models.attention import forward_forest
from turnstile.models.logprobs import token_logprobs
from turnstile.trainer.learner import Learner, scatter
from turnstile.types import Row, Sampling


class Reference:
    """A copy of what learns; the frozen rest is shared with the network that learns.

    Kept in `file`, so that a resumed run holds on to the same policy: it is written by the first call with a
    run's folder and read by the later ones.
    """

    def __init__(self, learner: Learner, file: Path) -> None:
        self._learner = learner
        if file.is_file():
            self._values = torch.load(file, map_location=learner.model.device, weights_only=True)
        else:
            self._values = [parameter.detach().clone() for parameter in learner.parameters]
            scratch = file.with_suffix(".writing")
            torch.save(self._values, scratch)
            scratch.rename(file)

    def annotate(self, rows: Sequence[Row], sampling: Sampling) -> list[Row]:
        """The rows with `ref_logprobs` f32[L] among their extras, 0 where masked."""
        logprobs = [np.zeros(len(row.token_ids), np.float32) for row in rows]
        model = self._learner.model
        with self._in_place(), torch.no_grad():
            no_weights = [np.zeros(len(row.token_ids), np.float32) for row in rows]
            plan, share = self._learner.plan, self._learner.shares
            for batch in plant(rows, no_weights, budget=plan.budget, device=model.device, share=share):
                hidden = forward_forest(model, batch)
                new, _ = token_logprobs(model, hidden[batch.source], batch.target, batch.temperature, sampling)
                scatter(logprobs, rows, batch, new)
        return [
            replace(row, extras={**row.extras, "ref_logprobs": values})
            for row, values in zip(rows, logprobs, strict=True)
        ]

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """The reference's values in the network for a while."""
        current = [parameter.detach().clone() for parameter in self._learner.parameters]
        self._put(self._values)
        try:
            yield
        finally:
            self._put(current)

    def _put(self, values: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self._learner.parameters, values, strict=True):
                parameter.copy_(value)
