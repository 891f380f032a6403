"""What learns beside the policy, by what the recipe's credit asks for."""

from __future__ import annotations

from typing import Any

import pytest

from networks import network
from turnstile.config import make_recipe
from turnstile.credit.base import learned
from turnstile.errors import ConfigError
from turnstile.models.adapt import choose_trainable
from turnstile.trainer.critic import Critic
from turnstile.trainer.implicit import ImplicitReward
from turnstile.trainer.learner import Learner, LearnerConfig
from turnstile.trainer.optim import constant
from turnstile.trainer.progress import ProgressEstimator
from turnstile.trainer.utterance import UtteranceCritic
from turnstile.wiring.components import make_learned
from turnstile.wiring.kinds import bind

GIVEN = ("groups", "scores", "aux", "state")


def made(kind: str, **sections: Any) -> Any:
    recipe = make_recipe({"credit": {"kind": kind}, **sections})
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
    found = made("implicit_step", implicit={"objective": "dpo", "reference": "old", "beta": 0.2, "lr": 1e-4})
    assert (found._manner.objective, found._manner.reference, found._manner.beta) == ("dpo", "old", 0.2)
    assert found._phi.config.lr == 1e-4
    assert made("utterance_critic", critic={"tau": 0.25})._tau == 0.25
    assert made("progress_attribution", critic={"epochs": 3})._epochs == 3


def test_an_unknown_part_is_one_clear_error() -> None:
    @learned("oracle")
    def estimator(groups, scores, aux, state):  # type: ignore[no-untyped-def]
        return [], state

    recipe = make_recipe({"credit": {"kind": "rloo"}})
    with pytest.raises(ConfigError, match="credit 'rloo' asks for 'oracle', which the trainer has not"):
        make_learned(recipe, estimator, made("rloo"))
