"""A run that was killed ends where an undisturbed one does, to the last bit."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import guess_run
import killed
from ends import metrics, numbers, record, said, same_end
from turnstile.cli.main import run as command
from turnstile.envs.guess import GuessEnv
from turnstile.records.record import read_record
from turnstile.rollout.tree import tree_tokens
from turnstile.runs.run_folder import read_results
from turnstile.runs.train import train
from turnstile.tracking.jsonl import read_metrics
from turnstile.tracking.metrics import meaning_of
from turnstile.trainer import checkpoint


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inputs")


@pytest.fixture(scope="module")
def undisturbed(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    train(guess_run.recipe(inputs), run=run, env=GuessEnv)
    return run


KILLS = [("rollout", 1, 24), ("before training", 2, 1), ("optimizer", 2, 3), ("checkpoint", 3, 4), ("commit", 4, 4)]
"""(point, step, how often it is come by), one process after the other in one run."""


@pytest.mark.slow
def test_killed_five_times_and_the_same_to_the_last_bit(
    undisturbed: Path, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, recipe = tmp_path / "run", guess_run.recipe_file(inputs)
    for number, (point, step, nth) in enumerate(KILLS):
        killed.train(point, step, nth, recipe, run)
        assert command(["audit", str(run)]) == 0  # at any time
        whole, _ = checkpoint.latest(run / "checkpoints")
        assert whole is not None
        assert whole.step == (4 if point == "commit" else step - 1)
        assert len([line for line in said(run) if line.startswith("going on")]) == number
    capsys.readouterr()
    assert command(["train", str(recipe), "--out", str(run)]) == 0
    with capsys.disabled():
        print("\nsurvived SIGKILL at", ", ".join(f"{point} of step {step}" for point, step, _ in KILLS))

    same_end(run, undisturbed)
    assert not list((run / "checkpoints").glob(".writing-*"))
    assert any("step-000004 is not in the ledger" in line for line in said(run))
    assert [line for line in said(run) if "had finished before" in line][1:] == [
        f"step {step}: 8 of 8 episodes had finished before, and were not played again" for step in (2, 2, 3, 4)
    ]
    assert command(["audit", str(run), "--record"]) == 0
    assert "lost: 0\nused more often than declared: 0\n" in capsys.readouterr().out
    assert command(["audit", "--diff", str(run), str(undisturbed)]) == 0
    assert "equal up to step 4" in capsys.readouterr().out


def test_the_run_learnt_something(undisturbed: Path) -> None:
    """The comparison above is of runs in which weights moved and every step trained."""
    steps = metrics(undisturbed)
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert all(step["optim/grad_norm"] > 0 and step["optim/skipped"] == 0 for step in steps)
    weights = [(undisturbed / "checkpoints" / f"step-{n:06d}/model/model.safetensors").read_bytes() for n in (3, 4)]
    assert weights[0] != weights[1]
    assert set(read_results(undisturbed)) == {"untouched", "warmstart", "step-0002", "trained"}


def test_what_an_evaluation_sampled_is_no_part_of_a_step(undisturbed: Path) -> None:
    """Step 3 follows the evaluation of step 2: its tokens are those of its own record."""
    for entry in metrics(undisturbed):
        played = [e.group for e in read_record(undisturbed, phase="train", step=entry["step"])]
        turns = [turn for group in played for trajectory in group.trajectories for turn in trajectory.turns]
        assert entry["tokens/sampled"] == sum(len(turn.completion.token_ids) for turn in turns)


def test_every_token_of_a_step_was_computed_once(undisturbed: Path) -> None:
    """Once for each wave of episodes, that is: what a group has computed goes when its last session closes."""
    for entry in metrics(undisturbed):
        played = [e.group for e in read_record(undisturbed, phase="train", step=entry["step"])]
        everyone = [(group, trajectory) for group in played for trajectory in group.trajectories]
        waves = [everyone[begin : begin + guess_run.CONCURRENT] for begin in range(0, 8, guess_run.CONCURRENT)]
        parts = [
            replace(group, trajectories=tuple(trajectory for own, trajectory in wave if own is group))
            for wave in waves
            for group in played
        ]
        assert entry["tokens/computed"] == sum(map(tree_tokens, parts)) < entry["tokens/requested"]
        assert entry["tokens/tree"] == sum(map(tree_tokens, played)) < entry["tokens/computed"]
        assert entry["tokens/recomputed"] == entry["engine/evicted"] == 0


def test_going_back_behind_an_evaluation_does_it_again(undisturbed: Path, inputs: Path, tmp_path: Path) -> None:
    """The last checkpoint is torn, so the run goes back to step 3; what was evaluated at step 4 is stale."""
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    (run / "checkpoints" / "step-000004" / "optimizer.pt").write_bytes(b"torn")
    stale = run / "evaluations" / "trained.jsonl"
    before = stale.read_text()
    stale.write_text("")
    train(guess_run.recipe(inputs), run=run, env=GuessEnv)
    assert stale.read_text() == before
    assert metrics(run, engine=False) == metrics(undisturbed, engine=False)
    assert any("step-000004 is torn" in line for line in said(run))
    assert "step 4: 8 of 8 episodes had finished before, and were not played again" in said(run)
    assert record(run) == record(undisturbed)


@pytest.mark.parametrize(
    "credit",
    [
        {"kind": "implicit_step", "reward_model": {"lr": 1e-3}},
        {"kind": "utterance_critic", "gamma": 0.9, "critic": {"epochs": 3}},
        {"kind": "progress_attribution", "critic": {"epochs": 3}},
    ],
)
@pytest.mark.slow
def test_what_learns_beside_the_policy_goes_on_bit_by_bit(credit: Any, inputs: Path, tmp_path: Path) -> None:
    """The last checkpoint is torn, so that step 3 is made again from what step 2 kept."""
    more = {"credit": credit, "eval": {"before": False}}
    recipe = guess_run.recipe(inputs, sections=more, steps=3, drop_zero_advantage_groups=False)
    whole, again = tmp_path / "whole", tmp_path / "again"
    train(recipe, run=whole, env=GuessEnv)
    shutil.copytree(whole, again)
    last = Path("checkpoints", "step-000003")
    (again / last / "learned.pt").write_bytes(b"torn")
    train(recipe, run=again, env=GuessEnv)
    assert metrics(again, engine=False) == metrics(whole, engine=False)
    assert numbers(again / last / "learned.pt") == numbers(whole / last / "learned.pt")
    names = {"implicit_step": "implicit/reward", "utterance_critic": "utterance/q"}
    told = names.get(credit["kind"], "progress/contribution")
    first, *others = [step[told] for step in metrics(whole)]
    assert first == pytest.approx(0.0, abs=1e-6)  # it begins as RL finds the policy, after the warm start
    assert len(others) == 2
    assert others[-1]  # the contributions of turns stay at 0 as long as nobody wins


def test_a_finished_run_has_nothing_left_to_do(undisturbed: Path, inputs: Path) -> None:
    before = {file: file.read_bytes() for file in undisturbed.rglob("*") if file.suffix in (".safetensors", ".pt")}
    results, steps = read_results(undisturbed), metrics(undisturbed)
    assert train(guess_run.recipe(inputs), run=undisturbed, env=GuessEnv)["step"] == 4
    assert all(file.read_bytes() == data for file, data in before.items())
    assert (read_results(undisturbed), metrics(undisturbed)) == (results, steps)


def test_every_metric_of_a_run_has_a_meaning(undisturbed: Path) -> None:
    logged = {name for step in read_metrics(undisturbed) for name in step}
    assert len(logged) > 40
    assert {name for name in logged if meaning_of(name) is None} == {"step"}
