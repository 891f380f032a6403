"""What goes into the first layer that learns, for the rows of a step: from the rollout, or computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from turnstile.batching.forest import plant
from turnstile.models.attention import ForestLayout
from turnstile.models.checkpointing import decoder_layers
from turnstile.models.trunk import forward_below
from turnstile.types import Row

Trunk = Callable[[Row], Tensor]
"""A row -> what the rollout left of its first tokens' trunk, [L', H]."""


class Trunks:
    """The trunks of one step's rows, below `frozen` layers that never learn."""

    def __init__(self, model: PreTrainedModel, frozen: int, budget: int, known: Trunk | None, *, keep: bool) -> None:
        """With `keep` what is computed is kept, for rows that come more than once."""
        self.frozen = frozen
        self.computed = 0  # tokens that went through the frozen layers here
        self._model, self._budget, self._known, self._keep = model, budget, known, keep
        self._kept: dict[int, tuple[Row, Tensor]] = {}  # by the row's identity, which the row itself holds on to

    def of(self, rows: Sequence[Row]) -> list[Tensor] | None:
        """Each row's trunk [L', H], as far as its trained tokens depend on it. None where there is none yet and none
        would be kept: then the frozen layers may as well run with the others."""
        found = [self._found(row) for row in rows]
        lacking = [row for row, trunk in zip(rows, found, strict=True) if trunk is None]
        if len(lacking) == len(rows) and not self._keep:
            return None
        computed = iter(self._compute(lacking))
        return [next(computed) if trunk is None else trunk for trunk in found]

    def _found(self, row: Row) -> Tensor | None:
        if id(row) in self._kept:
            return self._kept[id(row)][1]
        trunk = None if self._known is None else self._known(row)
        return trunk if trunk is not None and len(trunk) >= int(np.flatnonzero(row.loss_mask)[-1]) else None

    @torch.no_grad()
    def _compute(self, rows: Sequence[Row]) -> list[Tensor]:
        """The rows' trunks [L, H]; what rows share is computed once."""
        trunks: dict[int, Tensor] = {}
        weights = [row.loss_mask.astype(np.float32) for row in rows]
        for batch in plant(rows, weights, budget=self._budget, device=self._model.device) if rows else ():
            below = forward_below(self._model, self.frozen, batch.tokens, batch.positions, ForestLayout(batch))
            trunks |= {r: below[torch.from_numpy(slots)] for r, slots in batch.slots.items()}
            self.computed += batch.size
        if self._keep:
            self._kept |= {id(row): (row, trunks[r]) for r, row in enumerate(rows)}
        return [trunks[r] for r in range(len(rows))]


def share_saved(model: PreTrainedModel, frozen: int, known: int, unique: int, trained: int) -> float:
    """Which share of an update's operations in matrices fell away, as the trunk of `known` of its `unique` tokens was
    there already and the vocabulary's matrix sees the `trained` ones.

    Each weight takes 2 operations a token on the way there, 2 more on the way back, and 2 if it learns.
    """
    layers, head = decoder_layers(model), model.get_output_embeddings().weight
    matrices = [[p for p in layer.parameters() if p.ndim > 1] for layer in layers]
    below = 2 * sum(p.numel() for layer in matrices[:frozen] for p in layer)
    above = sum((4 + 2 * p.requires_grad) * p.numel() for layer in matrices[frozen:] for p in layer)
    last: int = (4 + 2 * head.requires_grad) * head.numel()
    return below * known / ((below + above) * unique + last * trained)
