"""A cache of the first trained layer's inputs for the rows of a step, taken from the rollout or computed once."""

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
"""A row -> the frozen-layer activations [L', H] that the rollout engine kept for its first L' tokens."""


class ActivationCache:
    """The outputs of the `frozen` lowest layers, which are never trained, for the rows of one step."""

    def __init__(
        self, model: PreTrainedModel, frozen: int, budget: int, from_rollout: RolloutActivations | None, *, keep: bool
    ) -> None:
        """Create an empty cache. With `keep`, computed activations are kept for rows that the step uses again."""
        self._model, self._frozen, self._budget, self._keep = model, frozen, budget, keep
        self._from_rollout = from_rollout
        self._cache: dict[int, tuple[Row, Tensor, Tensor]] = {}
        """id(row) -> the row (kept alive so that its id is not reused), its forest's activations [T, H], and its slots
        i64[L]."""

    def get(self, rows: Sequence[Row]) -> tuple[list[Tensor] | None, int]:
        """Return the activations [L', H] of each row, and the number of tokens computed for them.

        L' covers all tokens on which the row's trained tokens depend. Returns (None, 0) if nothing is cached and
        nothing would be kept, because it is then as cheap to compute the frozen layers together with the others.
        """
        cached = [self._lookup(row) for row in rows]
        missing = [row for row, hidden in zip(rows, cached, strict=True) if hidden is None]
        if len(missing) == len(rows) and not self._keep:
            return None, 0
        new, count = self._compute(missing)
        computed = iter(new)
        return [next(computed) if hidden is None else hidden for hidden in cached], count

    def _lookup(self, row: Row) -> Tensor | None:
        if id(row) in self._cache:
            _, hidden, slots = self._cache[id(row)]
            return hidden[slots]
        known = None if self._from_rollout is None else self._from_rollout(row)
        return known if known is not None and len(known) >= int(np.flatnonzero(row.loss_mask)[-1]) else None

    @torch.no_grad()
    def _compute(self, rows: Sequence[Row]) -> tuple[list[Tensor], int]:
        """Return the rows' activations [L, H] and the number of tokens computed. Shared prefixes are computed once."""
        computed: dict[int, tuple[Row, Tensor, Tensor]] = {}
        weights, count = [row.loss_mask.astype(np.float32) for row in rows], 0
        for batch in pack_prefix_trees(rows, weights, budget=self._budget, device=self._model.device) if rows else ():
            hidden = forward_below(self._model, self._frozen, batch.tokens, batch.positions, ForestLayout(batch))
            computed |= {r: (rows[r], hidden, torch.from_numpy(slots)) for r, slots in batch.slots.items()}
            count += batch.size
        if self._keep:
            self._cache |= {id(row): computed[r] for r, row in enumerate(rows)}
        return [hidden[slots] for _, hidden, slots in (computed[r] for r in range(len(rows)))], count


def saved_flops_share(model: PreTrainedModel, frozen: int, known: int, unique: int, trained: int) -> float:
    """Return the share of an update's matmul FLOPs that cached activations saved.

    `known` of the update's `unique` tokens were cached; `trained` tokens pass through the output head. Each weight
    costs 2 FLOPs per token in the forward pass, and above the frozen layers 2 more in the backward pass, plus 2 if it
    is trained.
    """
    layers, head = decoder_layers(model), model.get_output_embeddings().weight
    matrices = [[p for p in layer.parameters() if p.ndim > 1] for layer in layers]
    below = 2 * sum(p.numel() for layer in matrices[:frozen] for p in layer)
    above = sum((4 + 2 * p.requires_grad) * p.numel() for layer in matrices[frozen:] for p in layer)
    last: int = (4 + 2 * head.requires_grad) * head.numel()
    return below * known / ((below + above) * unique + last * trained)
