"""Scalar losses on padded arrays: right ones, and what is wrong with others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from turnstile.conform.padded_losses import examine_padded_loss, pad_rows, sample_rows
from turnstile.credit.invariants import broken
from turnstile.errors import ConfigError


def by_token(old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor) -> Tensor:
    ratio = (log_prob - old_log_prob).clamp(-20, 20).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def token_mean(old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    return (by_token(old_log_prob, log_prob, advantages) * response_mask).sum() / response_mask.sum()


def row_mean(old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor) -> tuple[Tensor, float]:
    count = response_mask.sum(1)
    rows = (by_token(old_log_prob, log_prob, advantages) * response_mask).sum(1) / count.clamp(min=1)
    return rows.sum() / (count > 0).sum(), 0.5


def unreduced(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    return (log_prob - ref_log_prob).square() / 2


def value(vpreds: Tensor, returns: Tensor, response_mask: Tensor) -> Tensor:
    return ((vpreds - returns).square() * response_mask).sum()


@pytest.mark.parametrize("loss", [token_mean, row_mean, unreduced, value])
def test_what_is_right_breaks_nothing(loss: Callable[..., Any]) -> None:
    found = examine_padded_loss(loss)
    assert broken(found) == {}
    assert found[5].why == found[6].why == "a loss sees advantages, no rewards"
    assert bool(found[7].why) == (loss in (unreduced, value))


def over_length(old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    return (by_token(old_log_prob, log_prob, advantages) * response_mask).mean()


def over_rows(old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    return row_mean(old_log_prob, log_prob, advantages, response_mask)[0] * (response_mask.sum(1) > 0).float().mean()


def unclamped(old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    return -((log_prob - old_log_prob).exp() * advantages * response_mask).sum()


def whitened(old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    mean = (advantages * response_mask).sum() / response_mask.sum()
    return token_mean(old_log_prob, log_prob, advantages - mean, response_mask)


def biased(old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    return token_mean(old_log_prob, log_prob, advantages + 0.1, response_mask)


def by_place(old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    return token_mean(old_log_prob, log_prob, advantages * torch.arange(len(log_prob))[:, None], response_mask)


@pytest.mark.parametrize(
    ("loss", "number", "seen"),
    [
        (over_length, 1, "with three more observed tokens between turns, the gradient at turn"),
        (over_length, 3, "with three more columns of padding, the gradient at turn"),
        (by_place, 2, "with the rows in another order, the gradient at turn"),
        (whitened, 3, "as micro-batches of 1 and 3 rows"),
        (unclamped, 4, "a masked token, whose log-probabilities lie far apart, has the gradient nan"),
        (over_rows, 4, "beside an attempt that failed, all masked, the gradient at turn"),
        (biased, 7, "where every advantage is 0, a token has the gradient"),
    ],
)
def test_what_is_wrong_has_a_counterexample(loss: Callable[..., Any], number: int, seen: str) -> None:
    assert seen in broken(examine_padded_loss(loss))[number]


def test_the_sample_lies_as_it_is_said_to() -> None:
    rows = sample_rows()
    arrays, places = pad_rows(rows)
    assert places[:2] == [[(0, 3), (5, 7)], [(0, 2), (4, 8)]]
    assert arrays["mask"].sum(1).tolist() == [5, 6, 6, 4]
    assert arrays["mask"].shape == (4, 13)
    np.testing.assert_array_equal(arrays["advantages"][1, 4:8], rows.arrays["advantages"][1][1])
    assert (arrays["logprobs"] < 0).all()


def test_what_has_no_gradient_is_said() -> None:
    def constant(log_prob: Tensor, response_mask: Tensor) -> Tensor:
        return log_prob.detach().sum()

    with pytest.raises(ConfigError, match=r"the result of .*constant has no gradient"):
        examine_padded_loss(constant)
    with pytest.raises(ConfigError, match="takes neither token_level_rewards nor log_prob nor vpreds"):
        examine_padded_loss(lambda response_mask: response_mask)

    def broken_everywhere(log_prob: Tensor) -> Tensor:
        return (log_prob * torch.nan).sum()

    with pytest.raises(AssertionError, match="its gradient is not finite"):
        examine_padded_loss(broken_everywhere)
