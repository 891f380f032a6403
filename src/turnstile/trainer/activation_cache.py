"""What goes into the first layer that learns, for the rows of a step: from the rollout, or computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from turnstile.batching.forest import pack_prefix_trees
from turnstile.models.attention import ForestLayout
from turnstile.models.checkpointing import decoder_layers
from turnstile.models.frozen_layers import forward_below
from turnstile.types import Row

RolloutActivations = Callable[[Row], Tensor]
"""A row -> what the rollout left of its first tokens' trunk, [L', H]."""


class ActivationCache:
    """The trunks of one step's rows, below `frozen` layers that never learn."""

    def __init__(
        self, model: PreTrainedModel, frozen: int, budget: int, left: RolloutActivations | None, *, keep: bool
    ) -> None:
        """With `keep` what is computed is kept, for rows that come more than once."""
        self._model, self._frozen, self._budget, self._left, self._keep = model, frozen, budget, left, keep
        self._kept: dict[int, tuple[Row, Tensor, Tensor]] = {}
        """By the row's identity: the row, which is held with it, the trunk [T, H] of its forest, its slots i64[L]."""

    def of(self, rows: Sequence[Row]) -> tuple[list[Tensor] | None, int]:
        """Each row's trunk [L', H], as far as its trained tokens depend on it, and the tokens that went through the
        frozen layers for it. None where there is none yet and none would be kept: then the frozen layers may as well
        run with the others."""
        found = [self._found(row) for row in rows]
        lacking = [row for row, trunk in zip(rows, found, strict=True) if trunk is None]
        if len(lacking) == len(rows) and not self._keep:
            return None, 0
        trunks, count = self._compute(lacking)
        computed = iter(trunks)
        return [next(computed) if trunk is None else trunk for trunk in found], count

    def _found(self, row: Row) -> Tensor | None:
        if id(row) in self._kept:
            _, trunk, slots = self._kept[id(row)]
            return trunk[slots]
        left = None if self._left is None else self._left(row)
        return left if left is not None and len(left) >= int(np.flatnonzero(row.loss_mask)[-1]) else None

    @torch.no_grad()
    def _compute(self, rows: Sequence[Row]) -> tuple[list[Tensor], int]:
        """The rows' trunks [L, H], and the tokens of their forests; what rows share is computed and kept once."""
        found: dict[int, tuple[Row, Tensor, Tensor]] = {}
        weights, count = [row.loss_mask.astype(np.float32) for row in rows], 0
        for batch in pack_prefix_trees(rows, weights, budget=self._budget, device=self._model.device) if rows else ():
            trunk = forward_below(self._model, self._frozen, batch.tokens, batch.positions, ForestLayout(batch))
            found |= {r: (rows[r], trunk, torch.from_numpy(slots)) for r, slots in batch.slots.items()}
            count += batch.size
        if self._keep:
            self._kept |= {id(row): found[r] for r, row in enumerate(rows)}
        return [trunk[slots] for _, trunk, slots in (found[r] for r in range(len(rows)))], count


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
