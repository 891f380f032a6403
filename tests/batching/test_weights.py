"""Token weights by hand; packing does not change the gradient that they give."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from turnstile.batching.forest import pack_prefix_trees
from turnstile.batching.weights import constant, token, trajectory, turn
from turnstile.errors import ConfigError
from turnstile.lookup import KINDS, resolve
from turnstile.losses.ppo import ppo
from turnstile.types import F32, Row


def row(turn_ids: Sequence[int], origin: tuple[str, int], masked: Sequence[int] = (), ids: Sequence[int] = ()) -> Row:
    """Return a row whose tokens belong to these turns; -1 is context, and the positions in `masked` are not trained."""
    turns = np.array(turn_ids, dtype=np.int32)
    length = len(turns)
    mask = (turns >= 0) & ~np.isin(np.arange(length), list(masked))
    rng = np.random.default_rng(length)
    return Row(
        token_ids=np.array(ids or range(length), dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -rng.random(length), 0).astype(np.float32),
        advantages=np.where(mask, rng.normal(size=length), 0).astype(np.float32),
        turn_ids=turns,
        versions=np.zeros(length, dtype=np.int32),
        origin=origin,
    )


# trajectory ("g", 0): turns of 1 and 2 tokens in one row, then turn 2 of 1 token in a row of its own (rewritten)
# trajectory ("g", 1): one turn of 4 tokens
ROWS = [
    row([-1, -1, 0, -1, 1, 1], ("g", 0)),
    row([-1, 2, -1], ("g", 0)),
    row([-1, 0, 0, 0, 0], ("g", 1)),
]


def lists(weights: Sequence[F32]) -> list[list[float]]:
    assert all(values.dtype == np.float32 for values in weights)
    return [[round(float(value), 6) for value in values] for values in weights]


def test_token() -> None:
    eighth = 0.125
    assert lists(token(ROWS)) == [[0, 0, eighth, 0, eighth, eighth], [0, eighth, 0], [0, *[eighth] * 4]]


def test_turn() -> None:
    assert lists(turn(ROWS)) == [[0, 0, 0.25, 0, 0.125, 0.125], [0, 0.25, 0], [0, *[0.0625] * 4]]


def test_trajectory_counts_all_its_rows_together() -> None:
    assert lists(trajectory(ROWS)) == [[0, 0, 0.125, 0, 0.125, 0.125], [0, 0.125, 0], [0, *[0.125] * 4]]
    more = [*ROWS, row([-1, 0, 0], ("h", 0))]
    assert lists(trajectory(more))[3] == [0, round(1 / 6, 6), round(1 / 6, 6)]


def test_constant_divides_by_a_fixed_number() -> None:
    assert lists(constant(ROWS, divisor=100.0)) == [[0, 0, 0.01, 0, 0.01, 0.01], [0, 0.01, 0], [0, *[0.01] * 4]]
    with pytest.raises(ConfigError, match="divisor must be above 0"):
        constant(ROWS, divisor=0.0)


KNOBS = {"constant": {"divisor": 7.0}}


@pytest.mark.parametrize("kind", sorted(KINDS["loss_aggregation"]))
def test_masked_tokens_weigh_nothing_and_the_rest_sums_to_one(kind: str) -> None:
    rows = [*ROWS, row([-1, 0, 0, 1], ("h", 0), masked=[2, 3]), row([-1, 0], ("h", 1), masked=[1])]
    weights = resolve("loss_aggregation", kind)(rows, **KNOBS.get(kind, {}))
    for values, r in zip(weights, rows, strict=True):
        assert (values[~r.loss_mask] == 0).all()
        assert (values[r.loss_mask] > 0).all()
    trained = sum(int(r.loss_mask.sum()) for r in rows)
    expected = trained / 7.0 if kind == "constant" else 1.0
    assert sum(float(values.sum()) for values in weights) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", sorted(KINDS["loss_aggregation"]))
def test_rows_without_trained_tokens_have_no_weight(kind: str) -> None:
    knobs = KNOBS.get(kind, {})
    assert resolve("loss_aggregation", kind)([], **knobs) == []
    assert lists(resolve("loss_aggregation", kind)([row([-1, 0], ("g", 0), masked=[1])], **knobs)) == [[0, 0]]


@pytest.mark.parametrize("kind", sorted(KINDS["loss_aggregation"]))
def test_masked_tokens_and_the_order_of_rows_change_no_weight(kind: str) -> None:
    knobs = KNOBS.get(kind, {})
    longer = [row([-1, -1, -1, -1, 0, -1, -1, 1, 1, -1], ("g", 0)), *ROWS[1:]]
    plain = resolve("loss_aggregation", kind)(ROWS, **knobs)
    padded = resolve("loss_aggregation", kind)(longer, **knobs)
    assert plain[0][ROWS[0].loss_mask].tolist() == padded[0][longer[0].loss_mask].tolist()
    backwards = resolve("loss_aggregation", kind)(ROWS[::-1], **knobs)[::-1]
    assert lists(plain) == lists(backwards)


@pytest.mark.parametrize("kind", sorted(KINDS["loss_aggregation"]))
@pytest.mark.parametrize(("budget", "share"), [(8, True), (14, True), (1000, True), (1000, False), (8, False)])
def test_packing_sharing_and_splitting_change_no_gradient(kind: str, budget: int, share: bool) -> None:
    rows = [
        row([-1, -1, 0, -1, 1, 1], ("g", 0), ids=[5, 6, 1, 2, 3, 4]),
        row([-1, -1, 0, 0, -1, 1, 1], ("g", 1), ids=[5, 6, 1, 2, 2, 4, 4]),
        row([-1, -1, -1, 2], ("g", 1), ids=[5, 6, 7, 0]),
        row([-1, -1, 0, 0, 0], ("h", 0), ids=[5, 6, 1, 2, 0]),
        row([-1, 0], ("h", 1), ids=[7, 5]),
    ]
    weights = resolve("loss_aggregation", kind)(rows, **KNOBS.get(kind, {}))

    def gradient(pieces: Sequence[tuple[list[Row], list[F32]]], budget: int, share: bool) -> torch.Tensor:
        table = torch.zeros(8, 8, dtype=torch.float64, requires_grad=True)  # a bigram model
        for some, their in pieces:
            for batch in pack_prefix_trees(some, their, budget=budget, share=share):
                logprobs = table[batch.tokens[batch.source]].log_softmax(-1)
                picked = logprobs.gather(1, batch.target[:, None])[:, 0]
                (ppo(picked, batch, clip_high=9.0, clip_low=1.0)[0] * batch.weights).sum().backward()
        assert table.grad is not None
        return table.grad

    apart = gradient([([r], [w]) for r, w in zip(rows, weights, strict=True)], 1000, False)
    together = gradient([(rows, weights)], budget, share)
    assert apart.norm() > 1e-3
    assert (together - apart).norm() <= 1e-9 * apart.norm()
