"""What losses and credit take from elsewhere, through whole tiny runs: feedback, stored samples, earlier attempts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import guess_run
from ends import same_end
from turnstile.cli.main import run as command
from turnstile.config import Recipe, make_recipe
from turnstile.envs.guess import GuessEnv, guess_tasks
from turnstile.errors import ConfigError
from turnstile.records.audit import Expected, audit
from turnstile.records.ledger import open_ledger
from turnstile.records.record import REHEARSAL, REPLAYED, read_record
from turnstile.runs.audit import audit_run
from turnstile.runs.rehearsal import read_rehearsal, rehearsal_objective
from turnstile.runs.train import train
from turnstile.tasks.base import write_tasks
from turnstile.wiring.agent import check_kinds
from turnstile.wiring.learning import make_objective
from turnstile.wiring.recipe_check import check_recipe

SECTIONS: Mapping[str, Any] = {
    "credit": {"kind": "recalibrated", "over": "trajectories"},
    "regularizers": [{"kind": "self_distill", "coef": 0.1, "feedback": {"show": ["rounds"]}}],
    "rehearsal": {"tasks": 3, "attempts": 2, "batch": 4, "loss": {"kind": "forward_kl", "coef": 0.05}},
    "replay_buffer": {"size": 6, "batch": 3, "uses": 2},
    "eval": {"before": False},
}


def recipe(inputs: Path) -> Recipe:
    return guess_run.recipe(inputs, sections=SECTIONS, steps=4, minibatches=1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("providers")
    train(recipe(folder), run=folder / "run", env=GuessEnv)
    return folder / "run"


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_every_step_says_what_it_took_from_elsewhere(run: Path) -> None:
    steps = [line for line in metrics(run) if "loss/total" in line]
    assert steps[0]["replay_buffer/again"] == 0.0
    assert sum(line["replay_buffer/again"] for line in steps) > 0
    assert max(line["replay_buffer/kept"] for line in steps) <= 6
    assert all("loss/kl_feedback" in line for line in steps if line["tokens/trained"])
    assert all(line["rehearsal/kl_forward"] >= 0 for line in steps if line["tokens/trained"])


def test_what_was_computed_is_recorded(run: Path) -> None:
    fresh = list(read_record(run, phase="train", label=""))
    learned = [entry for entry in fresh if any(w.any() for turns in entry.trained["weight"] for w in turns)]
    assert learned
    for entry in learned:
        seen = [value for turns in entry.trained["feedback_logprobs"] for own in turns for value in own]
        assert min(seen) < 0.0
    again = list(read_record(run, phase="train", label=REPLAYED))
    first = {trajectory.key for entry in fresh for trajectory in entry.group.trajectories}
    taken = [
        (entry.step, one.key, own)
        for entry in again
        for one, own in zip(entry.group.trajectories, entry.scores, strict=True)
    ]
    assert taken
    assert all(key in first and not own.in_baseline for _, key, own in taken)
    assert all(int(key[0].split("/")[1]) < step for step, key, _ in taken)
    samples = list(read_record(run, phase="warmstart", label=REHEARSAL))
    assert [len(entry.group.trajectories) for entry in samples] == [2, 2, 2]


def test_the_ledger_counts_every_use_and_balances(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["audit", str(run), "--record"]) == 0
    assert "lost: 0\nused more often than declared: 0\n" in capsys.readouterr().out
    found = audit_run(run).audit
    assert found.balanced
    strict = audit(run, Expected(attempts=guess_run.GROUPS * guess_run.ATTEMPTS, passes=2))  # without the buffer's
    assert strict.overused_count > 0
    db = open_ledger(run)
    most = db.execute("SELECT MAX(n) FROM (SELECT COUNT(DISTINCT step) n FROM uses GROUP BY attempt)").fetchone()[0]
    db.close()
    assert 1 < most <= 3  # played once, taken again at most twice


def test_a_run_that_goes_back_a_step_ends_the_same(run: Path, tmp_path: Path) -> None:
    back = tmp_path / "run"
    shutil.copytree(run, back)
    shutil.rmtree(back / "checkpoints" / "step-000004")
    train(recipe(run.parent), run=back, env=GuessEnv)
    same_end(back, run)
    assert command(["audit", str(back)]) == 0


def test_rescoring_counts_attempts_where_they_were_played(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["rollout", "rescore", str(run), "--phase", "train"]) == 0
    groups = 4 * guess_run.GROUPS
    assert f"{groups} groups of two attempts or more" in capsys.readouterr().out


def test_a_run_trained_again_from_its_record_takes_the_same_samples(run: Path, tmp_path: Path) -> None:
    train(recipe(run.parent), run=tmp_path / "again", replay=run)
    wanted, found = (
        [entry.group.id for entry in read_record(one, phase="warmstart", label=REHEARSAL)]
        for one in (run, tmp_path / "again")
    )
    assert wanted == found
    assert command(["audit", str(tmp_path / "again")]) == 0


def configure(sections: dict[str, Any]) -> None:
    recipe = make_recipe(sections)
    check_recipe(recipe)
    check_kinds(recipe)
    make_objective(recipe)
    rehearsal_objective(recipe)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"replay_buffer": {"size": 4}, "credit": {"kind": "grpo"}},
            "replay_buffer.size = 4 wants credit.kind = 'recalibrated'",
        ),
        ({"replay_buffer": {"sise": 4}}, "unknown key 'replay_buffer.sise'; did you mean 'size'"),
        ({"loss": {"kind": "value"}}, "the loss `value` is a critic's, and no policy's"),
        ({"rehearsal": {"tasks": 1, "loss": {"kind": "kll"}}}, "unknown loss kind 'kll'; did you mean 'kl'"),
        (
            {"rehearsal": {"tasks": 1, "loss": {"kind": "distill"}}},
            "needs the array 'teacher_logprobs', which no sample",
        ),
        ({"rehearsal": {"tasks": 1, "loss": {"kind": "dpo"}}}, "compares the tokens of a whole group, which stored"),
        ({"rehearsal": {"tasks": 1, "loss": {"kind": "kl", "coef": 0.0}}}, "rehearsal.loss.coef = 0.0 must be above 0"),
        ({"loss": {"kind": "self_distill", "feedback": {"chars": 3}}}, "loss.feedback.chars"),
        ({"credit": {"kind": "gae", "critic": {"clip": -1.0}}}, "credit.critic.clip"),
        (
            {
                "loss": {"kind": "self_distill", "feedback": {"last": False}},
                "regularizers": [{"kind": "self_distill", "coef": 0.1}],
            },
            "two losses want the array 'feedback_logprobs' in different ways",
        ),
    ],
)
def test_bad_recipes_are_one_clear_error(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        configure(sections)
    assert "\n" not in str(caught.value)


def test_samples_of_which_none_is_good_enough(run: Path) -> None:
    class Like:
        folder = run
        recipe = make_recipe({"rehearsal": {"tasks": 3, "least": 99.0}})

    with pytest.raises(ConfigError, match="none of the samples of 3 tasks has an outcome of 99 or more"):
        read_rehearsal(Like)  # type: ignore[arg-type]


def test_a_run_that_shows_a_rubric_and_asks_for_answers(tmp_path: Path) -> None:
    sections = {
        "hint": {"kind": "rubric", "decay": "none", "heading": "guess"},
        "graders": [{"kind": "answer_probabilities", "form": "guess {answer}"}],
        "rewards": {
            "terms": [{"kind": "signal", "name": "resolved", "level": 1}, {"kind": "information_gain", "level": 1}]
        },
        "credit": {"kind": "igpo"},
        "regularizers": [],
        "eval": {"before": False, "every": 0},
        "sft": {},
    }
    wanted = guess_run.recipe(tmp_path, sections=sections, steps=1, minibatches=1)
    rubric = {"low": "Find the number", "high": "guess from 1 to 15"}
    games = [replace(task, data={"answer": 5, "rubric": rubric}) for task in guess_tasks(3, seed=4)]
    write_tasks(tmp_path / "train.jsonl", games)
    write_tasks(tmp_path / "heldout.jsonl", [replace(task, id=f"held-{task.id}") for task in games[:1]])
    train(wanted, run=tmp_path / "run", env=GuessEnv)
    for entry in read_record(tmp_path / "run", phase="train"):
        hints = [one.hint for one in entry.group.trajectories]
        assert [text.count("\n- ") for text in hints] == [2, 1, 1, 0]  # round(2 * (1, 2/3, 1/3, 0))
        for one, own in zip(entry.group.trajectories, entry.scores, strict=True):
            found = one.signals["answer_probabilities"]
            assert len(found) == len(one.turns) + 1
            gained = np.diff(found)
            gained[-1] = 0.0
            assert own.turn == pytest.approx(gained, abs=1e-6)
            assert np.abs(gained).max(initial=0.0) > 0.0 or len(one.turns) == 1
    (held,) = read_record(tmp_path / "run", phase="eval")
    assert all(not one.hint and "answer_probabilities" in one.signals for one in held.group.trajectories)
