from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.research import lab_game
from turnstile.lookup import KINDS


def test_there_are_ten_estimators_and_more() -> None:
    assert len({lab_game.label(kind, knobs) for kind, knobs in lab_game.SUBJECTS}) == len(lab_game.SUBJECTS) >= 10
    assert {kind for kind, _ in lab_game.SUBJECTS} <= set(KINDS["credit"])


def test_the_network_is_small_and_knows_every_word(tmp_path: Path) -> None:
    lab_game.network(0, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert 70_000 < sum(parameter.numel() for parameter in model.parameters()) < 100_000
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("higher\n", "lower\n", "right\n", "guess 7\n", f"guess from 1 to {lab_game.HIGH}\n"):
        assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"]


def test_demonstrations_tell_nothing_of_the_answers() -> None:
    draw = random.Random(0)
    shown = [lab_game.blind(task, draw) for task in lab_game.TASKS for _ in range(50)]
    numbers = [[step.message.tool_calls[0].arguments["number"] for step in steps] for steps in shown]
    assert {number for steps in numbers for number in steps} == set(range(1, lab_game.HIGH + 1))
    again = [steps for steps in numbers if len(steps) > 1 and steps[1] == steps[0]]
    assert again  # a number that was answered already


def test_what_is_kept_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[tuple[str, int]] = []

    def learn(kind: str, knobs: Any, seed: int) -> list[float]:
        played.append((lab_game.label(kind, knobs), seed))
        return [0.5] * 6

    monkeypatch.setattr(lab_game, "learn", learn)
    kept: list[Any] = []
    first = [{"estimator": "rloo", "seed": 0, "curve": [0.1] * 6}]
    runs = lab_game.play_out(first, kept.append, seeds=1)
    count = len(lab_game.SUBJECTS)
    assert ("rloo", 0) not in played
    assert len(played) == count - 1
    assert first + kept == runs
    assert lab_game.play_out(runs, kept.append, seeds=1) == runs
    assert len(kept) == count - 1


def test_the_table_compares_seed_by_seed() -> None:
    def run(name: str, seed: int, value: float) -> dict[str, Any]:
        return {"estimator": name, "seed": seed, "curve": [value] * 8}

    runs = [run("rloo", 0, 0.2), run("rloo", 1, 0.6), run("grpo", 0, 0.3), run("grpo", 1, 0.7), run("salt", 1, 0.5)]
    rows = {row[0]: row[1:] for row in lab_game.table(runs).rows}
    assert rows["rloo"][:3] == ("2", "0.400 [-2.141, 2.941]", "-")
    assert rows["grpo"][2] == "0.100 [0.100, 0.100]"
    assert rows["salt"] == ("1", "0.500", "-0.100", "0.500")
