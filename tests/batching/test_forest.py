"""Forests: their layout, and log-probabilities and gradients equal to those of plain rows in a stock model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from networks import FAMILIES, distance, gradient, network, plain_logprobs, random_rows, row_of, stock, trained
from turnstile.batching.batch import Batch
from turnstile.batching.forest import pack_prefix_trees
from turnstile.batching.weights import token as token_weights
from turnstile.losses.reinforce import reinforce
from turnstile.models.adapt import choose_trainable
from turnstile.models.attention import forward_forest, use_layouts
from turnstile.models.logprobs import token_logprobs
from turnstile.types import Row, Sampling


def forest_logprobs(model: PreTrainedModel, batch: Batch) -> Tensor:
    hidden = forward_forest(model, batch)
    return token_logprobs(model, hidden[batch.source], batch.target, batch.temperature, Sampling())[0]


def by_row(rows: Sequence[Row], forests: Sequence[Batch], values: Sequence[Tensor]) -> list[Tensor]:
    """Return per-token values of several forests, sorted back to the rows."""
    found = [torch.empty(0)] * len(rows)
    for batch, each in zip(forests, values, strict=True):
        for r in batch.row.unique().tolist():
            found[r] = each[batch.row == r]
    return found


def all_trained(tokens: Sequence[int]) -> Row:
    return row_of(tokens, [False] + [True] * (len(tokens) - 1), rng=np.random.default_rng(len(tokens)))


def prefixes(rows: Sequence[Row]) -> set[tuple[int, ...]]:
    return {tuple(row.token_ids[: n + 1].tolist()) for row in rows for n in range(len(row.token_ids))}


def test_layout_by_hand() -> None:
    """abcd, abce and af form one tree, and a row that begins with g another; rows are given out of order."""
    a, b, c, d, e, f, g = range(10, 17)
    rows = [all_trained(tokens) for tokens in ([g, a], [a, b, c, e], [a, f], [a, b, c, d])]
    weights = [np.arange(len(row.token_ids), dtype=np.float32) + 10 * i for i, row in enumerate(rows)]
    (batch,) = pack_prefix_trees(rows, weights, budget=100)
    assert batch.tokens.tolist() == [a, b, c, d, e, f, g, a]
    assert batch.positions.tolist() == [0, 1, 2, 3, 3, 1, 0, 1]
    assert batch.subtree_end.tolist() == [6, 5, 5, 4, 5, 6, 8, 8]
    assert batch.trees == ((0, 6), (6, 8))
    assert batch.row.tolist() == [0, 1, 1, 1, 2, 3, 3, 3]
    assert batch.source.tolist() == [6, 0, 1, 2, 0, 0, 1, 2]
    assert batch.target.tolist() == [a, b, c, e, f, b, c, d]
    assert batch.weights.tolist() == [1, 11, 12, 13, 21, 31, 32, 33]
    assert (batch.size, batch.row_tokens) == (8, 12)


def test_arrays_follow_their_rows() -> None:
    rows = random_rows(6, seed=3)
    weights = token_weights(rows)
    forests = pack_prefix_trees(rows, weights, budget=24)
    assert len(forests) > 1
    names = ("logprobs", "advantages", "turn_ids", "versions", "token_ids")
    fields = ("logprobs", "advantages", "turn", "versions", "target")
    for name, field in zip(names, fields, strict=True):
        found = by_row(rows, forests, [getattr(batch, field) for batch in forests])
        for row, values in zip(rows, found, strict=True):
            assert values.tolist() == getattr(row, name)[row.loss_mask].tolist()
    for name in ("ref_logprobs",):
        found = by_row(rows, forests, [batch.extras[name] for batch in forests])
        assert all(v.tolist() == row.extras[name][row.loss_mask].tolist() for row, v in zip(rows, found, strict=True))
    found = by_row(rows, forests, [batch.weights for batch in forests])
    assert all(v.tolist() == w[row.loss_mask].tolist() for row, w, v in zip(rows, weights, found, strict=True))
    assert all(batch.temperature.tolist() == [0.75] * len(batch.target) for batch in forests)


def test_rows_of_one_trajectory_are_one_trajectory() -> None:
    rows = [all_trained([5, 6, 7]), all_trained([5, 8])]
    other = replace(rows[0], origin=("g", 1))
    (batch,) = pack_prefix_trees([*rows, other], token_weights([*rows, other]), budget=100)
    assert batch.trajectory.tolist() == [0, 0, 0, 1, 1]
    assert batch.row.tolist() == [0, 0, 1, 2, 2]
    assert batch.size == 4


def test_extras_that_not_all_rows_have_are_dropped() -> None:
    rows = [all_trained([5, 6, 7]), replace(all_trained([5, 8]), extras={})]
    (batch,) = pack_prefix_trees(rows, token_weights(rows), budget=100)
    assert dict(batch.extras) == {}


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=9),
    budget=st.integers(1, 40),
    share=st.booleans(),
)
def test_layout_of_any_rows(tokens: list[list[int]], budget: int, share: bool) -> None:
    """The slots that a slot sees are, in order, the row's own prefix, with depths as positions."""
    rows = [all_trained(each) for each in tokens]
    forests = pack_prefix_trees(rows, token_weights(rows), budget=budget, share=share)
    seen: list[tuple[int, int]] = []
    for batch in forests:
        ends = batch.subtree_end
        index = torch.arange(batch.size)
        for tree, (begin, end) in enumerate(batch.trees):
            assert begin == (batch.trees[tree - 1][1] if tree else 0)
            assert ((ends[begin:end] > index[begin:end]) & (ends[begin:end] <= end)).all()
        assert batch.trees[-1][1] == batch.size
        place = dict.fromkeys(batch.row.tolist(), 0)
        assert batch.row.tolist() == sorted(batch.row.tolist())
        for source, target, r in zip(batch.source.tolist(), batch.target.tolist(), batch.row.tolist(), strict=True):
            place[r] += 1
            history = index[(index <= source) & (source < ends)]
            assert batch.tokens[history].tolist() == tokens[r][: place[r]]
            assert batch.positions[history].tolist() == list(range(place[r]))
            assert target == tokens[r][place[r]]
            seen.append((r, place[r]))
    assert sorted(seen) == [(r, i) for r, each in enumerate(tokens) for i in range(1, len(each))]
    assert sum(batch.row_tokens for batch in forests) == sum(map(len, tokens))


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=7), min_size=1, max_size=9),
    budget=st.integers(1, 40),
)
def test_every_prefix_is_stored_once_within_the_budget(tokens: list[list[int]], budget: int) -> None:
    rows = [all_trained(each) for each in tokens]
    for batch in pack_prefix_trees(rows, token_weights(rows), budget=budget):
        members = [rows[r] for r in batch.row.unique().tolist()]
        assert batch.size == len(prefixes(members))
        assert batch.size <= budget or len(members) == 1
    (whole,) = pack_prefix_trees(rows, token_weights(rows), budget=10_000)
    assert whole.size == len(prefixes(rows))
    (apart,) = pack_prefix_trees(rows, token_weights(rows), budget=10_000, share=False)
    assert apart.size == sum(map(len, tokens))


def test_trees_are_split_where_the_least_is_repeated() -> None:
    """Filling the first forest would split the second tree after its long shared prefix."""
    short = [all_trained([1, 2, 3]), all_trained([1, 4, 5])]
    long = [all_trained([9, *range(10, 18), end]) for end in (20, 21, 22)]
    forests = pack_prefix_trees([*short, *long], token_weights([*short, *long]), budget=16)
    assert [batch.size for batch in forests] == [5, 12]
    within = pack_prefix_trees(long, token_weights(long), budget=11)  # either of two splits repeats as much
    assert [batch.size for batch in within] == [10, 11]
    twigs = [all_trained(tokens) for tokens in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 7, 8], [1, 7, 9])]
    assert [batch.size for batch in pack_prefix_trees(twigs, token_weights(twigs), budget=7)] == [6, 4]


def plain_gradient(model: PreTrainedModel, rows: Sequence[Row]) -> dict[str, Tensor]:
    """Return d/dtheta of sum(w * -A * log pi), computed one row at a time."""
    for row, weights in zip(rows, token_weights(rows), strict=True):
        loss = -trained(row, row.advantages) * plain_logprobs(model, row)
        (loss * trained(row, weights)).sum().backward()
    return gradient(model)


def forest_gradient(model: PreTrainedModel, rows: Sequence[Row], budget: int, share: bool = True) -> dict[str, Tensor]:
    for batch in pack_prefix_trees(rows, token_weights(rows), budget=budget, share=share):
        loss, _ = reinforce(forest_logprobs(model, batch), batch)
        (loss * batch.weights).sum().backward()
    return gradient(model)


@pytest.mark.parametrize(("seed", "budget"), [(1, 10_000), (2, 60)])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_match_plain_rows(family: str, seed: int, budget: int) -> None:
    model = network(family, dtype=torch.float64)
    plain = stock(model)
    use_layouts(model)
    rows = shuffled(random_rows(8, seed=seed), seed)
    forests = pack_prefix_trees(rows, token_weights(rows), budget=budget)
    assert sum(forest.size for forest in forests) < 0.9 * sum(forest.row_tokens for forest in forests)
    with torch.no_grad():
        found = by_row(rows, forests, [forest_logprobs(model, batch) for batch in forests])
        for row, logprobs in zip(rows, found, strict=True):
            torch.testing.assert_close(logprobs, plain_logprobs(plain, row), rtol=0, atol=1e-10)
    expected = plain_gradient(plain, rows)
    assert max(distance(forest_gradient(model, rows, budget), expected)) < 1e-9


def shuffled(rows: Sequence[Row], seed: int) -> list[Row]:
    return [rows[i] for i in np.random.default_rng(seed).permutation(len(rows))]


@pytest.mark.parametrize(("budget", "share"), [(10_000, True), (40, True), (1, True), (10_000, False), (30, False)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_budget_or_order_changes_the_gradient(budget: int, share: bool, seed: int) -> None:
    model = network(dtype=torch.float64)
    plain = stock(model)
    use_layouts(model)
    rows = random_rows(9, seed=seed)
    found = forest_gradient(model, shuffled(rows, seed), budget, share)
    assert max(distance(found, plain_gradient(plain, rows))) < 1e-9


@pytest.mark.parametrize("seed", [4, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_in_single_precision(family: str, seed: int) -> None:
    model = network(family)
    plain = stock(model)
    use_layouts(model)
    rows = random_rows(8, seed=seed, private=20)
    worst, whole = distance(forest_gradient(model, rows, 60), plain_gradient(plain, rows))
    assert worst < 1e-4
    assert whole < 2e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_of_adapters(dtype: torch.dtype) -> None:
    model = network("qwen3", dtype=dtype)
    with torch.no_grad():
        for parameter in choose_trainable(model, "lora", lora_rank=3):
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    model.to(dtype)  # adapters come in single precision
    plain = stock(model)
    use_layouts(model)
    rows = random_rows(8, seed=6)
    expected = {name: slope for name, slope in plain_gradient(plain, rows).items() if "lora_" in name}
    found = forest_gradient(model, rows, 60)
    worst, whole = distance({name: found[name] for name in expected}, expected)
    assert len(expected) == 2 * 2 * 7
    assert worst < (1e-9 if dtype == torch.float64 else 1e-4)
    assert whole < (1e-9 if dtype == torch.float64 else 2e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
def test_gradients_through_a_value_head(family: str, dtype: torch.dtype) -> None:
    """A critic reads the same hidden states as the policy: those that each trained token is sampled from."""
    model = network(family, dtype=dtype)
    plain = stock(model)
    use_layouts(model)
    head = torch.nn.Linear(32, 1, dtype=dtype)
    rows = random_rows(8, seed=7)
    goals = [torch.randn(int(row.loss_mask.sum()), dtype=dtype) for row in rows]
    for row, goal in zip(rows, goals, strict=True):
        tokens = torch.from_numpy(row.token_ids).long()
        hidden = plain.get_decoder()(tokens[None], use_cache=False).last_hidden_state[0]
        before = torch.from_numpy(np.flatnonzero(row.loss_mask) - 1)
        (head(hidden[before])[:, 0] - goal).square().sum().backward()
    expected = gradient(plain) | gradient_of(head)
    for batch in pack_prefix_trees(rows, token_weights(rows), budget=60):
        aims = torch.cat([goals[r] for r in batch.row.unique().tolist()])
        (head(forward_forest(model, batch)[batch.source])[:, 0] - aims).square().sum().backward()
    worst, whole = distance(gradient(model) | gradient_of(head), expected)
    assert worst < (1e-9 if dtype == torch.float64 else 1e-4)
    assert whole < (1e-9 if dtype == torch.float64 else 2e-5)


def gradient_of(head: torch.nn.Linear) -> dict[str, Tensor]:
    found = {f"head.{name}": parameter.grad.clone() for name, parameter in head.named_parameters()}  # type: ignore[union-attr]
    head.zero_grad()
    return found


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "gpt2"])
def test_rows_do_not_train_each_other(family: str, share: bool) -> None:
    """The gradient of one row's loss equals that of the row alone, whatever else its forest holds."""
    model = network(family, dtype=torch.float64)
    use_layouts(model)
    rows = random_rows(8, seed=8)
    found = []
    for company, mine in ((rows[3:4], 0), (rows, 3)):
        (batch,) = pack_prefix_trees(company, token_weights(company), budget=1000, share=share)
        forest_logprobs(model, batch)[batch.row == mine].sum().backward()
        found.append(gradient(model))
    assert max(distance(found[1], found[0])) < 1e-12


@pytest.mark.parametrize("share", [True, False])
def test_rows_do_not_see_each_other(share: bool) -> None:
    """Other tokens after a branch, and other trees, change nothing, to the last bit."""
    model = network()
    use_layouts(model)
    trunk = [5, 6, 7]
    mine = all_trained([*trunk, 8, 9, 10])

    def logprobs(*others: list[int]) -> Tensor:
        rows = [mine, *(all_trained(other) for other in others)]
        (batch,) = pack_prefix_trees(rows, token_weights(rows), budget=1000, share=share)
        with torch.no_grad():
            return forest_logprobs(model, batch)[batch.row == 0]

    before = logprobs([*trunk, 8, 20, 21], [30, 31])
    assert torch.equal(before, logprobs([*trunk, 8, 25, 26], [33, 32]))
    assert not torch.equal(before, logprobs([*trunk, 8, 20, 21], [30, 31])[[0, 1, 2, 3, 3]])  # positions differ
