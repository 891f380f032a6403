"""The recipe of the shell environment, end to end on a generated task: the oracle's repair, and a dry run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers import TEMPLATES, bug_task, byte_tokenizer, tiny_llama
from turnstile.config import Recipe, load_recipe
from turnstile.runs.dry_run import dry_run
from turnstile.runs.evaluate import evaluate
from turnstile.tasks.base import write_tasks

RECIPE = Path(__file__).parents[2] / "recipes" / "swe_shell.toml"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """The recipe with a network of random weights over single bytes, and one task in both of its files."""
    monkeypatch.setenv("TURNSTILE_CACHE", str(tmp_path / "cache"))
    write_tasks(tmp_path / "tasks.jsonl", [bug_task(tmp_path / "cache")])
    words = byte_tokenizer("<tool_call>", "</tool_call>")
    words.chat_template = (TEMPLATES / "qwen2_5.jinja").read_text(encoding="utf-8")
    words.save_pretrained(tmp_path / "model")
    tiny_llama(len(words), hidden=32, context=16_384).save_pretrained(tmp_path / "model")
    file = tmp_path / "tasks.jsonl"
    return load_recipe(
        RECIPE,
        [f"model.id={tmp_path / 'model'}", "model.device=cpu", "sandbox.kind=local", f"tasks.train={file}",
         f"tasks.heldout={file}", "rollout.group_size=2", "episode.turns=8"],
    )  # fmt: skip


def test_the_oracle_repairs_through_the_shell(recipe: Recipe, tmp_path: Path) -> None:
    found = evaluate(recipe, policy="oracle", predictions=tmp_path / "predictions.jsonl")
    (result,) = found["oracle"]
    assert (result.task_id, result.rates["resolution"], result.turns) == ("tinyrange/clamp", True, 5)
    (line,) = (tmp_path / "predictions.jsonl").read_text().splitlines()
    prediction = json.loads(line)
    assert (prediction["instance_id"], prediction["model_name_or_path"]) == ("tinyrange/clamp", "oracle")
    assert "-        if value > low:\n+        if value < low:\n" in prediction["model_patch"]


def test_a_dry_run_accepts_the_recipe(recipe: Recipe) -> None:
    found = dry_run(recipe.model_copy(update={"sampling": recipe.sampling.model_copy(update={"max_tokens": 8})}))
    assert found["training tasks"] == 1
    assert found["seconds a group, playing"] > 0
