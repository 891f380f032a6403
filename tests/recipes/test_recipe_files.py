"""Every recipe that comes with the project: short, whole, and buildable up to its model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers import TEMPLATES, byte_tokenizer, tiny_llama
from turnstile.agents.check import check_renderer
from turnstile.config import load_recipe
from turnstile.credit.base import GIVEN
from turnstile.runs.scripted import check_scripts
from turnstile.wiring.agent import make_agent
from turnstile.wiring.kinds import bind
from turnstile.wiring.learning import make_learner, make_objective
from turnstile.wiring.tasks import overlap, read_tasks
from turnstile.wiring.world import SHARED, make_scorer

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: json.dumps(value)}
    return {name: found for key, part in value.items() for name, found in flat(part, f"{prefix}.{key}").items()}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_short_and_everything_it_names_is_there(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 30
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    make_scorer(recipe)
    make_objective(recipe)
    check_scripts(recipe)
    bind("credit", recipe.credit, given=GIVEN)
    bind("env", recipe.env, given=SHARED)
    bind("sandbox", recipe.sandbox)
    bind("parser", recipe.agent.parser)
    bind("renderer", recipe.agent.renderer, given=("tokenizer", "parser"))
    for tracker in recipe.trackers:
        bind("tracker", tracker, given=("run",))
    train, heldout = read_tasks(recipe, "train"), read_tasks(recipe, "heldout")
    assert not overlap(train, heldout)
    kinds = {"swe_shell": {"swe", "swe_shell"}}.get(recipe.env.kind, {recipe.env.kind})  # that one takes both
    assert {task.env for task in (*train, *heldout)} <= kinds
    assert len(heldout) >= recipe.eval.tasks


def test_the_quick_demo_is_the_demo_with_less_of_it() -> None:
    demo, quick = (flat(load_recipe(ROOT / "recipes" / f"{name}.toml").model_dump()) for name in ("demo", "demo-quick"))
    differ = {name for name in demo | quick if demo.get(name) != quick.get(name)}
    assert differ <= {
        ".name", ".trackers", ".sft.demos", ".train.steps", ".rollout.tasks_per_step", ".eval.tasks",
        ".eval.baseline_tasks",
    }  # fmt: skip


def test_the_chat_recipe_builds_around_a_model_of_its_family(tmp_path: Path) -> None:
    """Qwen's template and special tokens over single bytes, and a network with random weights."""
    words = byte_tokenizer("<tool_call>", "</tool_call>")
    words.chat_template = (TEMPLATES / "qwen2_5.jinja").read_text(encoding="utf-8")
    words.save_pretrained(tmp_path)
    tiny_llama(len(words), hidden=32, context=512).save_pretrained(tmp_path)
    recipe = load_recipe(ROOT / "recipes" / "qwen.toml", [f"model.id={tmp_path}", "model.device=cpu"])
    agent = make_agent(recipe)
    assert check_renderer(agent.scaffold.renderer) == []
    assert agent.context == 512  # the model's own window is smaller than the recipe's limit
    learner = make_learner(recipe, agent)
    learning = [name for name, value in agent.model.named_parameters() if value.requires_grad]
    assert learning
    assert all("lora_" in name for name in learning)
    assert len(learner.parameters) == len(learning)
