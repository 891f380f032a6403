"""Bad input to every loss and factor, at every set of knobs it declares: one clear error, or nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from knobs import wrong_knobs
from turnstile.config import Kind
from turnstile.credit.invariants import Declaration
from turnstile.errors import ConfigError
from turnstile.lookup import KINDS
from turnstile.losses.base import needs_of
from turnstile.losses.check import DECLARED, LOSS_MULTIPLIERS, sample_batch, select
from turnstile.wiring.kinds import bind

GIVEN = {"loss": ("logprobs", "batch", "values"), "loss_multiplier": ("batch",)}
ALL = [("loss", declared) for declared in DECLARED] + [("loss_multiplier", declared) for declared in LOSS_MULTIPLIERS]
every = pytest.mark.parametrize(
    ("room", "declared"), ALL, ids=[f"{room}-{d.kind}-{'-'.join(map(str, d.knobs.values()))}" for room, d in ALL]
)


def made(room: str, declared: Declaration) -> Any:
    function = bind(room, Kind.model_validate({"kind": declared.kind, **declared.knobs}), given=GIVEN[room])
    return function if room == "loss" else lambda logprobs, batch: function(batch)


@every
def test_a_batch_without_tokens_is_nothing(room: str, declared: Declaration) -> None:
    batch, logprobs = sample_batch()
    nobody = torch.arange(0)
    values, metrics = made(room, declared)(logprobs[nobody], select(batch, nobody))
    assert values.shape == (0,)
    assert all(metric.shape == (0,) for metric in metrics.values())


@every
def test_an_attempt_alone_is_finite(room: str, declared: Declaration) -> None:
    batch, logprobs = sample_batch()
    alone = torch.arange(4, 6)
    values, _ = made(room, declared)(logprobs[alone].requires_grad_(), select(batch, alone))
    assert values.shape == (2,)
    assert torch.isfinite(values).all()


@every
def test_where_no_token_weighs_anything_nothing_is_learned(room: str, declared: Declaration) -> None:
    batch, logprobs = sample_batch()
    leaf = logprobs.clone().requires_grad_()
    values, _ = made(room, declared)(leaf, replace(batch, weights=torch.zeros_like(batch.weights)))
    total = (values * 0.0).sum()
    assert torch.isfinite(total)
    if total.requires_grad:
        total.backward()
        assert leaf.grad is None or not leaf.grad.any()


@every
def test_an_array_that_is_missing_is_one_clear_error(room: str, declared: Declaration) -> None:
    batch, logprobs = sample_batch()
    function = bind(room, Kind.model_validate({"kind": declared.kind, **declared.knobs}), given=GIVEN[room])
    for name in needs_of(function).extras:
        without = replace(batch, extras={key: value for key, value in batch.extras.items() if key != name})
        with pytest.raises(ConfigError, match=f"'{declared.kind}' needs .*no extra '{name}'") as caught:
            made(room, declared)(logprobs, without)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("room", ["loss", "loss_multiplier"])
def test_a_knob_of_the_wrong_type_is_one_clear_error(room: str) -> None:
    found = wrong_knobs(room, GIVEN[room])
    assert len(found) > 5
    for kind, knob, value in found:
        with pytest.raises(ConfigError, match=f"{room} kind '{kind}': {knob} = ") as caught:
            bind(room, Kind.model_validate({"kind": kind, knob: value}), given=GIVEN[room])
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("room", "kind"), [(room, kind) for room in GIVEN for kind in sorted(KINDS[room])])
def test_unknown_words_name_the_nearest(room: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown {room} kind '{kind}x'; did you mean '"):
        bind(room, Kind(kind=f"{kind}x"), given=GIVEN[room])
    with pytest.raises(ConfigError, match=f"{room} kind '{kind}' has no knob 'zzz'; "):
        bind(room, Kind.model_validate({"kind": kind, "zzz": 1}), given=GIVEN[room])
