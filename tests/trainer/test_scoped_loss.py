"""Losses over whole trajectories, groups and steps: packing and prefix sharing change no gradient."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from networks import distance, network, random_rows
from turnstile.batching.batch import Batch, join
from turnstile.batching.forest import pack_prefix_trees
from turnstile.batching.weights import token as token_weights
from turnstile.credit.invariants import Declaration
from turnstile.lookup import resolve
from turnstile.losses.base import Needs, needs, needs_of
from turnstile.losses.check import DECLARED
from turnstile.losses.gspo import gspo
from turnstile.losses.kl import kl
from turnstile.trainer import learner as learner_module
from turnstile.trainer.learner import Learner, LearnerConfig, Objective
from turnstile.trainer.optim import constant
from turnstile.trainer.scoped_loss import is_cut
from turnstile.types import F32, Row


@needs(scope="step", entropy_gradient=True)
def tangled(logprobs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Every token's loss depends on every other token's log-probability and entropy."""
    share = (logprobs * batch.advantages).sum().tanh() + batch.extras["entropy"].square().sum().sqrt()
    return share * logprobs, {"share": share.detach().expand(len(logprobs))}


def rows_of_groups() -> list[Row]:
    """Three groups; one trajectory in each has two rows, as after a rewritten context."""
    rng, rows = np.random.default_rng(0), random_rows(9, seed=4)
    rows = [replace(row, origin=(f"g{i % 3}", i // 3)) for i, row in enumerate(rows)]
    later = [replace(row, origin=(f"g{i}", 0)) for i, row in enumerate(random_rows(3, seed=5))]
    later = [replace(row, turn_ids=np.where(row.loss_mask, row.turn_ids + 9, -1)) for row in later]
    return [replace(row, extras=extras(row, rng)) for row in (*rows, *later)]


def extras(row: Row, rng: np.random.Generator) -> dict[str, F32]:
    """Return rows with log-probabilities of other policies near the recorded ones."""
    names = ("ref_logprobs", "proximal_logprobs", "teacher_logprobs", "feedback_logprobs", "values", "returns")
    near = {name: (row.logprobs + 0.2 * rng.normal(size=len(row.logprobs))).astype(np.float32) for name in names}
    return {**near, "entropy_past": np.full(len(row.logprobs), 2.0, np.float32)}


class GradientRecorder:
    """A replacement of the learner's step that records the gradient."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: dict[str, Tensor] = {}
        monkeypatch.setattr(Learner, "_step", lambda learner: self.take(learner))

    def take(self, learner: Learner) -> dict[str, float]:
        self.found = {name: p.grad.clone() for name, p in learner.model.named_parameters() if p.grad is not None}
        return {}


def step(
    recorder: GradientRecorder, objective: Objective, rows: list[Row], budget: int
) -> tuple[dict[str, float], dict[str, Tensor]]:
    model = network(dtype=torch.float64)
    config = LearnerConfig(lr=1e-3, schedule=constant, warmup=0, total=1, budget=budget)
    report, _, _ = Learner(model, list(model.parameters()), config).update(rows, objective)
    return report, recorder.found


@pytest.mark.parametrize("regularizers", [(), ((0.3, kl),)])
def test_packing_changes_no_gradient_of_a_loss_of_the_step(regularizers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, rows = GradientRecorder(monkeypatch), rows_of_groups()
    objective = Objective(loss=tangled, aggregation=token_weights, regularizers=regularizers)
    report, expected = step(recorder, objective, rows, 10_000)
    assert len(pack_prefix_trees(rows, token_weights(rows), budget=20)) > 3
    for budget in (20, 45):
        other, found = step(recorder, objective, rows, budget)
        assert distance(found, expected)[0] < 1e-9
        for name in ("loss/total", "loss/share", "policy/entropy", "policy/logprob_gap"):
            assert other[name] == pytest.approx(report[name], rel=1e-9), name


@pytest.mark.parametrize("declared", DECLARED, ids=lambda d: f"{d.kind}-{'-'.join(map(str, d.knobs.values()))}")
def test_packing_and_sharing_change_no_gradient_of_any_loss(
    declared: Declaration, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = functools.partial(resolve("loss", declared.kind), **declared.knobs)
    recorder, rows = GradientRecorder(monkeypatch), rows_of_groups()
    objective = Objective(loss=loss, aggregation=token_weights)
    report, expected = step(recorder, objective, rows, 10_000)
    assert any(tensor.any() for tensor in expected.values())
    reports = [report]
    for budget, share in ((20, True), (45, True), (10_000, False), (20, False)):
        monkeypatch.setattr(learner_module, "pack_prefix_trees", functools.partial(pack_prefix_trees, share=share))
        other, found = step(recorder, objective, rows, budget)
        assert distance(found, expected)[0] < 1e-9
        reports.append(other)
    for name in report:
        if name.startswith(("loss/", "policy/")):
            assert [other[name] for other in reports] == pytest.approx([report[name]] * 5, rel=1e-5, abs=1e-9), name


def test_packing_changes_a_loss_that_does_not_declare_its_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, rows = GradientRecorder(monkeypatch), rows_of_groups()
    silent = Objective(loss=lambda logprobs, batch: tangled(logprobs, batch), aggregation=token_weights)
    _, expected = step(recorder, silent, rows, 10_000)
    _, found = step(recorder, silent, rows, 20)
    assert distance(found, expected)[0] > 1e-3


def test_is_cut_by_scope() -> None:
    rows = rows_of_groups()
    small = pack_prefix_trees(rows, token_weights(rows), budget=20)
    assert [is_cut(small, whole) for whole in ("", "trajectory", "group", "step")] == [False, True, True, True]
    groups = [[row for row in rows if row.origin[0] == name] for name in ("g0", "g1")]
    alone = [pack_prefix_trees(group, token_weights(group), budget=999)[0] for group in groups]
    alone = [replace(b, group=b.group + g, trajectory=b.trajectory + 10 * g) for g, b in enumerate(alone)]
    assert [is_cut(alone, whole) for whole in ("", "trajectory", "group", "step")] == [False, False, False, True]
    assert not is_cut(alone[:1], "step")


def test_join_puts_forests_side_by_side() -> None:
    rows = random_rows(6)
    weights = token_weights(rows)
    parts = pack_prefix_trees(rows, weights, budget=20)
    whole = join(parts)
    assert whole.size == sum(part.size for part in parts) == whole.trees[-1][1]
    begin, first = 0, 0
    for part in parts:
        n, m = part.size, len(part.target)
        assert torch.equal(whole.subtree_end[begin : begin + n] - begin, part.subtree_end)
        assert torch.equal(whole.tokens[whole.source[first : first + m]], part.tokens[part.source])
        assert torch.equal(whole.group[first : first + m], part.group)
        assert torch.equal(whole.extras["ref_logprobs"][first : first + m], part.extras["ref_logprobs"])
        begin, first = begin + n, first + m


def test_needs_combine() -> None:
    objective = Objective(loss=tangled, aggregation=token_weights, regularizers=((1.0, kl),))
    assert needs_of(kl) == Needs(extras=("ref_logprobs",))
    assert objective.needs == Needs(extras=("ref_logprobs",), scope="step", entropy_gradient=True)
    assert needs_of(lambda logprobs, batch: (logprobs, {})) == Needs()
    assert needs_of(gspo).scope == "trajectory"
    assert needs_of(functools.partial(gspo, unit="turn")).scope == ""
    assert Needs(scope="group") | Needs(scope="trajectory") == Needs(scope="group")
