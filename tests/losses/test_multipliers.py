"""Off-policy corrections by hand, and what they make of a loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tokens import batch, gradient
from turnstile.errors import ConfigError
from turnstile.losses.base import Needs, needs_of
from turnstile.losses.correction import icepop, mis, tis
from turnstile.losses.kl import kl
from turnstile.losses.multipliers import with_multipliers
from turnstile.losses.ppo import ppo


def sampled(rho: list[float], **fields: Any) -> tuple[Any, torch.Tensor]:
    """Tokens whose proximal / behaviour is rho, with the policy at the proximal one."""
    return batch(rho, [1.0] * len(rho), {"proximal_logprobs": [-1.0] * len(rho)}, **fields)


@pytest.mark.parametrize(
    ("factor", "knobs", "expected"),
    [
        (tis, {}, [0.5, 1.5, 2.0]),
        (mis, {"unit": "token"}, [0.5, 1.5, 0.0]),
        (icepop, {"low": 0.6, "high": 3.1}, [0.0, 1.5, 3.0]),
        (mis, {"cap": 2.3}, [2.25, 2.25, 2.25]),  # the product of all three
        (mis, {"cap": 2.2}, [0.0, 0.0, 0.0]),
        (tis, {"unit": "trajectory", "mean": True}, [2.25 ** (1 / 3)] * 3),
        (tis, {"unit": "turn", "cap": 9.0}, [0.75, 0.75, 3.0]),
    ],
)
def test_corrections_by_hand(factor: Any, knobs: dict[str, Any], expected: list[float]) -> None:
    given, _ = sampled([0.5, 1.5, 3.0], turn=[0, 0, 1])
    number, metrics = factor(given, **knobs)
    assert number.tolist() == pytest.approx(expected)
    assert torch.equal(metrics["correction"], number)
    assert metrics["kl_mismatch"].tolist() == pytest.approx([r - 1 - math.log(r) for r in (0.5, 1.5, 3.0)])


def test_what_is_corrected_is_counted() -> None:
    given, _ = sampled([0.5, 1.5, 3.0])
    assert tis(given)[1]["corrected"].tolist() == [0, 0, 1]
    assert icepop(given, low=0.6, high=2.0)[1]["corrected"].tolist() == [1, 0, 1]


def test_a_token_of_weight_0_has_no_part_in_a_product() -> None:
    given, _ = sampled([0.5, 1.5, 3.0], weights=[1.0, 1.0, 0.0])
    assert tis(given, unit="trajectory")[0].tolist() == pytest.approx([0.75] * 3)


def test_under_a_correction_a_loss_holds_on_to_the_proximal_policy() -> None:
    # pi / behaviour = 3, 1.2 and pi / proximal = 1.5, 0.6: rho = 2, 2, of which 1.8 is left
    proximal = [-1 - math.log(1.5), -1 - math.log(0.6)]
    given, logprobs = batch([3.0, 1.2], [1.0, 1.0], {"proximal_logprobs": proximal})
    loss, metrics = with_multipliers(ppo, [lambda batch: tis(batch, cap=1.8)])(logprobs, given)
    assert loss.tolist() == pytest.approx([-2.16, -2.16])  # a factor that declares nothing leaves the loss as it is
    declared = with_multipliers(ppo, [tis])
    loss, metrics = declared(logprobs, given)
    assert loss.tolist() == pytest.approx([-2 * 1.2, -2 * 0.6])
    assert metrics["ratio"].tolist() == pytest.approx([1.5, 0.6])
    assert metrics["correction"].tolist() == pytest.approx([2.0, 2.0])
    assert gradient(loss, logprobs) == pytest.approx([0, -1.2])


def test_needs_go_up() -> None:
    names = ("ref_logprobs", "proximal_logprobs")
    assert needs_of(with_multipliers(kl, [tis])) == Needs(extras=names)
    assert needs_of(with_multipliers(kl, [tis, mis])) == Needs(extras=names, scope="trajectory")
    assert with_multipliers(ppo, []) is ppo


@pytest.mark.parametrize(
    ("factor", "knobs", "message"),
    [
        (tis, {"cap": 0.0}, "loss multiplier 'tis': bounds"),
        (icepop, {"low": 2.0, "high": 1.0}, "loss multiplier 'icepop': bounds"),
        (mis, {"unit": "row"}, "'mis': unit must be 'token'"),
    ],
)
def test_bad_knobs(factor: Any, knobs: dict[str, Any], message: str) -> None:
    given, _ = sampled([1.0])
    with pytest.raises(ConfigError, match=message):
        factor(given, **knobs)
