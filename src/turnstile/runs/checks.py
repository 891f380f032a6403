"""The checks of a recipe and its tasks that run before a model is loaded or a folder is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from turnstile.config import Recipe
from turnstile.credit.base import GIVEN, Estimator
from turnstile.envs.base import Env
from turnstile.rewards.build import Scorer
from turnstile.runs.checkpoint_state import check_keep_best
from turnstile.runs.rehearsal import rehearsal_objective
from turnstile.runs.scripted import check_scripts
from turnstile.runs.sft import read_recipe_conversations
from turnstile.runs.task_validation import refuse_failed
from turnstile.tasks.conversations.conversation import Conversation
from turnstile.trainer.learner import Objective
from turnstile.types import Task
from turnstile.wiring.agent import check_kinds, check_models
from turnstile.wiring.graders import check_asked, check_graders
from turnstile.wiring.kinds import bind
from turnstile.wiring.learning import make_objective
from turnstile.wiring.world import make_scorer


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedParts:
    """The parts of a run that need no model."""

    scorer: Scorer
    objective: Objective
    estimator: Estimator
    conversations: Sequence[Conversation]


def check_parts(
    recipe: Recipe,
    train_tasks: list[Task],
    heldout: list[Task],
    *,
    env: Callable[..., Env] | None = None,
    reward: Callable[..., Any] | None = None,
    plays: bool = True,
) -> CheckedParts:
    """Check a recipe and its tasks, and return the parts of a run that need no model.

    `wiring.recipe_check.check_recipe` is expected to have passed. `env` and `reward` replace the recipe's. `plays` is
    False if no episode will be played, as in a replay. Raises ConfigError or TaskError for the first error found.
    """
    refuse_failed(recipe, train_tasks, heldout)
    check_kinds(recipe, env)
    check_graders(recipe)
    if plays:
        check_asked(recipe, train=train_tasks, heldout=heldout)
    scorer, objective = make_scorer(recipe, reward), make_objective(recipe)
    rehearsal_objective(recipe)
    estimator = bind("credit", recipe.credit, given=GIVEN)
    check_scripts(recipe)
    check_keep_best(recipe, env)
    conversations = read_recipe_conversations(recipe)
    check_models(recipe)
    return CheckedParts(scorer=scorer, objective=objective, estimator=estimator, conversations=conversations)
