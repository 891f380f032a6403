"""Whole tiny runs through `build`: what a user can get wrong, and what can go wrong under a run."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
from torch import Tensor

import guess_run
import turnstile
from ends import said
from turnstile.batching.batch import Batch
from turnstile.config import Kind, Recipe, make_recipe
from turnstile.envs.base import Start, Step
from turnstile.envs.guess import GuessEnv, guess_tasks
from turnstile.errors import ConfigError, SandboxError, TrainingError
from turnstile.losses.base import Metrics, needs
from turnstile.records.ledger import open_ledger
from turnstile.records.record import read_record
from turnstile.runs.dry_run import dry_run
from turnstile.runs.session import read_costs
from turnstile.runs.train import train
from turnstile.tracking.jsonl import read_metrics
from turnstile.types import Message, Task, Trajectory
from turnstile.wiring.learning import make_objective


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    made = guess_run.recipe(tmp_path_factory.mktemp("inputs"), steps=1, epochs=1, minibatches=1)
    return made.model_copy(update={"sft": made.sft.model_copy(update={"demos": 0})})


class Broken(GuessEnv):
    """A world whose floor gives way at the first step."""

    async def step(self, message: Message) -> Step:
        raise SandboxError("the floor gave way")


@needs("made_up")
def lacking(logprobs: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
    return logprobs, {}


def brevity(task: Task, trajectory: Trajectory) -> float:
    return -float(len(trajectory.turns))


def test_a_step_of_nothing_but_failures_ends_the_run(recipe: Recipe, tmp_path: Path) -> None:
    failed = r"8 of 8 episodes failed: SandboxError 8 \(.*\); the first: SandboxError: the"
    with pytest.raises(TrainingError, match=failed):
        turnstile.train(recipe, env=Broken, run=tmp_path / "run")


class FaultyOnce(GuessEnv):
    """A world with a mistake in it that few episodes meet."""

    left = 0

    async def step(self, message: Message) -> Step:
        if FaultyOnce.left:
            FaultyOnce.left -= 1
            raise IndexError("a mistake")
        return await super().step(message)


def test_a_fault_in_one_environment_costs_its_attempt_and_not_the_run(recipe: Recipe, tmp_path: Path) -> None:
    plain = recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"before": False})})
    FaultyOnce.left = 1
    turnstile.train(plain, env=FaultyOnce, run=tmp_path / "run")
    fates = Counter(state for (state,) in open_ledger(tmp_path / "run").execute("SELECT state FROM attempts"))
    assert (fates["given_up"], fates.total()) == (1, 8)
    messages = [json.loads(line) for line in (tmp_path / "run" / "messages.jsonl").read_text().splitlines()]
    assert any("1 of 8 episodes failed: IndexError 1 (" in each["message"] for each in messages)

    FaultyOnce.left = 1
    with pytest.raises(IndexError, match="a mistake"):
        train(plain, env=FaultyOnce, run=tmp_path / "strict", strict=True)


class Late(GuessEnv):
    """A world that takes its time to open, in which nobody has anything to sample."""

    notes = ("Its doors open late.",)

    async def reset(self, task: Task) -> Start:
        await asyncio.sleep(0.3)
        return await super().reset(task)


def test_a_step_logs_where_its_seconds_went(recipe: Recipe, tmp_path: Path) -> None:
    turnstile.train(recipe, env=Late, run=tmp_path)
    (step,) = read_metrics(tmp_path)
    spent = {name.removeprefix("seconds/"): value for name, value in step.items() if name.startswith("seconds/")}
    assert spent["rollout"] + spent.get("update", 0.0) + spent["publish"] <= spent["step"]  # flat groups update nothing
    assert spent["environment"] >= 8 * 0.3
    assert spent["idle"] >= 0.3
    assert spent["idle"] + spent["generate"] == pytest.approx(spent["rollout"])
    assert "Its doors open late." in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_credit_by_a_missing_signal_gives_one_warning(recipe: Recipe, tmp_path: Path) -> None:
    more = {"credit": Kind(kind="rlvmr"), "train": recipe.train.model_copy(update={"steps": 2})}
    turnstile.train(recipe.model_copy(update=more), run=tmp_path / "run", env=GuessEnv)
    lines = [line for line in said(tmp_path / "run") if "compares turns by their signal" in line]
    assert len(lines) == 1
    assert lines[0].startswith("step 1: credit 'rlvmr' compares turns by their signal 'tag', which none of")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000002")
    turnstile.train(recipe.model_copy(update=more), run=tmp_path / "run", env=GuessEnv)  # goes on with step 2
    assert [line for line in said(tmp_path / "run") if "compares turns by their signal" in line] == lines


def test_a_wrong_recipe_keeps_the_old_run(recipe: Recipe, tmp_path: Path) -> None:
    run = tmp_path / "run"
    turnstile.train(recipe, run=run)
    wrong = recipe.model_copy(update={"env": recipe.env.model_copy(update={"kind": "gues"})})
    with pytest.raises(ConfigError, match="did you mean 'guess'"):
        turnstile.train(wrong, run=run, fresh=True)
    assert (run / "report.html").is_file()


def test_another_overfitted_task_is_refused_in_the_same_folder(recipe: Recipe, tmp_path: Path) -> None:
    first, second = (task.id for task in guess_tasks(5, seed=1)[:2])
    turnstile.train(recipe, run=tmp_path / "run", overfit=first)
    with pytest.raises(ConfigError, match="overfit changed"):
        turnstile.train(recipe, run=tmp_path / "run", overfit=second)


def test_a_reward_function_replaces_the_recipes_rewards(recipe: Recipe, tmp_path: Path) -> None:
    turnstile.train(recipe, reward=brevity, run=tmp_path / "run")
    entries = list(read_record(tmp_path / "run", phase="train"))
    assert entries
    for entry in entries:
        for trajectory, score in zip(entry.group.trajectories, entry.scores, strict=True):
            assert score.total == -len(trajectory.turns)


def test_a_step_is_on_the_disk_before_its_checkpoint(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever something is brought to the disk: the episodes and the metrics of every step whose checkpoint stands
    are there."""
    run, synced, seen = tmp_path / "run", {}, set()
    real = os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        synced[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size
        for checkpoint in (run / "checkpoints").glob("step-*"):
            for file in (run / "record").glob(f"{checkpoint.name[5:]}-train*"):
                assert synced.get(file.stat().st_ino) == file.stat().st_size
                seen.add(file.name)
            if steps := int(checkpoint.name[5:]):
                logged = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
                assert synced[(run / "metrics.jsonl").stat().st_ino] >= len(b"".join(logged[:steps])) > 0
                seen.add("metrics.jsonl")

    monkeypatch.setattr(os, "fsync", fsync)
    turnstile.train(recipe, run=run)
    assert seen == {"000001-train.jsonl.gz", "metrics.jsonl"}


def test_costs_are_kept_for_each_stage(recipe: Recipe, tmp_path: Path) -> None:
    turnstile.train(recipe, run=tmp_path / "run")
    seconds = read_costs(tmp_path / "run")["seconds"]
    assert set(seconds) >= {"evaluate untouched", "reinforcement learning", "evaluate trained"}
    assert all(value > 0 for value in seconds.values())


def test_a_dry_run_trains_nothing(recipe: Recipe) -> None:
    found = dry_run(recipe)
    assert found["training tasks"] == 5
    assert found["minutes of RL"] > 0


def with_losses(recipe: Recipe, **train: object) -> Recipe:
    """A recipe whose losses need everything that a run can give them."""
    data = recipe.model_dump()
    data["loss"] = {"kind": "gspo", "clip_low": 0.2, "clip_high": 0.2}
    data["loss_multipliers"] = [{"kind": "tis", "cap": 1.5}, {"kind": "high_entropy_only", "share": 0.5}]
    names = ("kl", "entropy", "entropy_band", "forward_kl", "distill")
    data["regularizers"] = [{"kind": name, "coef": 0.01} for name in names]
    data["train"] |= {"max_tokens_per_microbatch": 64, "drop_zero_advantage_groups": False, **train}
    return make_recipe(data)


def test_a_recipe_names_losses_factors_and_a_teacher(recipe: Recipe, tmp_path: Path) -> None:
    wanted = with_losses(recipe, teacher=recipe.model.id, steps=2)
    turnstile.train(wanted, run=tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first, second = ({k: v for k, v in line.items() if k.startswith("loss/")} for line in lines if "loss/total" in line)
    assert first["loss/kl_mismatch"] == pytest.approx(0, abs=1e-6)  # one machine: the sampler's word is the trainer's
    assert first["loss/kl_ref"] == first["loss/kl_teacher"] == pytest.approx(0, abs=1e-6)  # all began alike
    assert abs(second["loss/kl_teacher"]) > 1e-6
    assert 0.4 < first["loss/learns"] <= 0.75
    assert first["loss/outside"] == 0  # there was no step before


AWAY = {"kind": "openai", "url": "http://127.0.0.1:8000/v1"}


@pytest.mark.parametrize(
    ("changes", "corrects"),
    [
        ({}, False),
        ({"engine": AWAY}, True),
        ({"rollout": {"max_staleness": 1}}, True),
        ({"replay_buffer": {"size": 8}}, True),
        ({"engine": AWAY, "loss_multipliers": ["high_entropy_only"]}, True),
        ({"engine": AWAY, "loss_multipliers": ["mis"]}, True),
        ({"engine": AWAY, "loss": "decoupled_ppo"}, True),
    ],
)
def test_tokens_of_another_engine_or_older_weights_are_corrected_for(
    recipe: Recipe, changes: dict[str, object], corrects: bool
) -> None:
    """Another engine's numbers are a little different on the same weights; older weights' are as well."""
    data = recipe.model_dump() | {"regularizers": [], "engine": {"kind": "transformers"}}
    asked = make_objective(make_recipe(data | changes)).needs.extras
    assert ("proximal_logprobs" in asked) == corrects


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": f"{__name__}:lacking"}, "nothing in a recipe gives the array 'made_up'"),
        ({"loss": "value"}, "the loss `value` is a critic's"),
        ({"loss": "distill"}, "name its model in train.teacher"),
        ({"train": {"reference_every": 2, "checkpoint_every": 3}}, "reference_every = 2 needs a checkpoint at least"),
        ({"loss_multipliers": ["tiss"]}, "did you mean 'tis'"),
        (
            {"loss_multipliers": [{"kind": "tis", "cop": 1.0}]},
            "loss_multiplier kind 'tis' has no knob 'cop'; did you mean 'cap'",
        ),
    ],
)
def test_unusable_losses_are_refused_before_the_run(
    recipe: Recipe, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        turnstile.train(make_recipe(recipe.model_dump() | changes), run=tmp_path / "run")
    assert not (tmp_path / "run").exists()
