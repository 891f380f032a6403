"""What learns beside the policy, by what the recipe's credit asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from networks import network
from turnstile.config import Kind, make_recipe
from turnstile.credit.base import GIVEN
from turnstile.errors import ConfigError
from turnstile.models.adapt import choose_trainable
from turnstile.trainer.critic import Critic
from turnstile.trainer.implicit import ImplicitReward
from turnstile.trainer.learner import Learner, LearnerConfig
from turnstile.trainer.optim import constant
from turnstile.trainer.progress import ProgressEstimator
from turnstile.trainer.utterance import UtteranceCritic
from turnstile.wiring.kinds import bind
from turnstile.wiring.learning import make_learned


def made(kind: str, **tables: Any) -> Any:
    recipe = make_recipe({"credit": {"kind": kind, **tables}})
    model = network()
    learner = Learner(
        model, choose_trainable(model, "all"), LearnerConfig(lr=1e-2, schedule=constant, warmup=0, total=1)
    )
    return make_learned(recipe, bind("credit", recipe.credit, given=GIVEN), learner)


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("rloo", type(None)),
        ("gae", Critic),
        ("turn_gae", Critic),
        ("utterance_critic", UtteranceCritic),
        ("implicit_step", ImplicitReward),
        ("progress_attribution", ProgressEstimator),
    ],
)
def test_each_estimator_gets_its_part(kind: str, part: type) -> None:
    assert type(made(kind)) is part


def test_the_recipe_says_how_it_learns() -> None:
    found = made("implicit_step", reward_model={"objective": "dpo", "reference": "old", "beta": 0.2, "lr": 1e-4})
    assert (found._objective, found._reference, found._beta) == ("dpo", "old", 0.2)
    assert found._phi.config.lr == 1e-4
    assert made("utterance_critic", critic={"tau": 0.25})._tau == 0.25
    assert made("progress_attribution", critic={"epochs": 3})._epochs == 3


MINE = """
from typing import Annotated

from pydantic import Field

from turnstile.credit.base import learned


class MyCritic:
    def __init__(self, learner, *, height: Annotated[int, Field(ge=1)] = 2):
        self.learner, self.height = learner, height


@learned("critic", "my_credit:MyCritic")
def mine(groups, scores, aux, *, scale: float = 1.0):
    return []


@learned("oracle", "my_credit:Oracle")
def lost(groups, scores, aux):
    return []
"""


@pytest.fixture
def my_credit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_credit.py").write_text(MINE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("my_credit")
def test_a_part_of_ones_own_is_made_from_its_table() -> None:
    found = made("my_credit:mine", scale=2.0, critic={"height": 3})
    assert (type(found).__name__, found.height) == ("MyCritic", 3)
    assert isinstance(found.learner, Learner)
    assert made("my_credit:mine").height == 2


@pytest.mark.usefixtures("my_credit")
@pytest.mark.parametrize(
    ("kind", "tables", "message"),
    [
        ("my_credit:mine", {"critic": {"hight": 3}}, "credit.critic has no knob 'hight'; did you mean 'height'"),
        ("my_credit:mine", {"critic": {"learner": 3}}, "credit.critic has no knob 'learner'"),
        ("my_credit:mine", {"critic": {"height": "3"}}, "credit.critic: height = '3' is not a whole number"),
        ("my_credit:mine", {"critic": {"height": 0}}, "credit.critic: height = 0 must be at least 1"),
        ("my_credit:mine", {"critic": 3}, "credit.critic = 3 is not a table"),
        ("my_credit:mine", {"oracle": {}}, "credit kind 'my_credit:mine' has no knob 'oracle'"),
        ("my_credit:lost", {"oracle": {}}, "credit.oracle of 'my_credit:lost': my_credit has no 'Oracle'"),
        ("rloo", {"critic": {"lr": 0.1}}, "credit kind 'rloo' has no knob 'critic'"),
    ],
)
def test_a_table_that_does_not_fit_is_one_clear_error(kind: str, tables: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bind("credit", Kind.model_validate({"kind": kind, **tables}), given=GIVEN)
