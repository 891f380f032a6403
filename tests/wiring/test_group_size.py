"""Groups of one: credit that compares attempts is refused before anything is played."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import guess_run
import turnstile
from turnstile.config import Kind, make_recipe
from turnstile.credit.check import DECLARED
from turnstile.errors import ConfigError
from turnstile.wiring.group_size import check_company

COMPARES = {
    "grpo", "rloo", "turn_return", "gigpo", "salt", "empg", "entropy_aware", "broadcast", "branch", "tree", "segments",
    "vine", "aem", "implicit_step", "normalised_process", "progress_attribution",
}  # fmt: skip
"""Kinds that make nothing of groups of one, with the knobs they have by default."""
ALONE = {
    "reinforce", "reinforce_pp", "random_step_group", "igpo", "rlvmr", "role_baseline", "per_agent", "threshold", "gae",
    "turn_gae", "bilevel_gae", "recalibrated", "subgoal", "utterance_critic",
}  # fmt: skip
"""The others."""


def check(credit: Any, *, attempts: int = 1, **sections: Any) -> None:
    rollout = {"group_size": attempts, **sections.pop("rollout", {})}
    recipe = make_recipe({"credit": credit, "rollout": rollout, **sections})
    check_company(recipe)


def refused(credit: Any, **sections: Any) -> bool:
    try:
        check(credit, **sections)
    except ConfigError:
        return True
    return False


@pytest.mark.parametrize("kind", sorted(COMPARES | ALONE))
def test_every_kind_alone(kind: str) -> None:
    knobs = next(dict(declared.knobs) for declared in DECLARED if declared.kind == kind)
    needed = knobs if kind == "random_step_group" else {}
    assert refused({"kind": kind, **needed}) is (kind in COMPARES)
    assert not refused({"kind": kind, **needed}, attempts=2)


def test_it_depends_on_the_knobs() -> None:
    assert refused({"kind": "turn_return"})
    assert not refused({"kind": "turn_return", "among": "batch"})
    assert refused({"kind": "grpo", "scale": "batch_std"})


@pytest.mark.parametrize("groups", [1, 2, 16])
def test_what_is_kept_by_a_threshold_or_compared_with_earlier_steps_is_no_comparison(groups: int) -> None:
    for credit in (
        {"kind": "threshold"}, {"kind": "threshold", "threshold": 1.0},
        {"kind": "threshold", "threshold": 1.0, "positive": 0.1, "negative": 1.0},
        {"kind": "recalibrated"},
    ):  # fmt: skip
        assert not refused(credit, rollout={"tasks_per_step": groups})


def test_a_step_of_one_attempt_has_no_batch_either() -> None:
    assert not refused({"kind": "reinforce"})
    assert refused({"kind": "reinforce"}, rollout={"tasks_per_step": 1})
    assert not refused({"kind": "reinforce", "baseline": "none"}, rollout={"tasks_per_step": 1})


def test_losses_that_need_no_advantage_may_train_alone() -> None:
    assert refused({"kind": "grpo"}, loss="self_distill")  # flat groups are dropped
    assert not refused({"kind": "grpo"}, loss="self_distill", train={"drop_zero_advantage_groups": False})
    assert refused({"kind": "grpo"}, train={"drop_zero_advantage_groups": False})


def test_credit_of_ones_own_is_trusted() -> None:
    assert not refused({"kind": "turnstile.credit.grpo:grpo"})


def test_a_run_says_so_before_it_begins(tmp_path: Path) -> None:
    recipe = guess_run.recipe(tmp_path, sections={"rollout": {"group_size": 1}}).model_copy(
        update={"credit": Kind(kind="grpo")}
    )
    with pytest.raises(
        ConfigError, match=r"rollout\.group_size = 1 leaves credit\.kind = 'grpo' nothing to compare in 2"
    ):
        turnstile.train(recipe, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()
