"""A run that was killed ends where an undisturbed one does, to the last bit."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import guess_run
from turnstile.build.run_folder import read_results
from turnstile.build.train import train
from turnstile.envs.guess import GuessEnv
from turnstile.errors import CheckpointError
from turnstile.rollout.codec import encode
from turnstile.rollout.record import read_record
from turnstile.rollout.tree import tree_tokens


def killed(inputs: Path, run: Path, how: str, step: int) -> None:
    command = [sys.executable, guess_run.__file__, str(inputs), str(run), how, str(step)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


def metrics(run: Path) -> list[dict[str, Any]]:
    """What was logged, but for what clocks said."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [
        {
            name: value
            for name, value in json.loads(line).items()
            if name not in ("time", "tokens/per_second") and not name.startswith("seconds/")
        }
        for line in lines
    ]


def numbers(file: Path) -> Any:
    """What is in it; the file itself also shows which strings were one object when it was pickled."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.tolist()
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    return plain(torch.load(file, weights_only=True))


def record(run: Path) -> list[Any]:
    """The recorded episodes, but for what clocks said."""

    def timeless(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: timeless(item) for key, item in value.items() if key not in ("seconds", "times")}
        return [timeless(item) for item in value] if isinstance(value, list) else value

    return [timeless(encode(entry)) for entry in read_record(run)]


def recorded_groups(run: Path, step: int) -> int:
    return len(list(read_record(run, phase="train", step=step)))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inputs")


@pytest.fixture(scope="module")
def undisturbed(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    train(guess_run.recipe(inputs), run=run, env=GuessEnv)
    return run


def test_killed_twice_and_the_same_to_the_last_bit(undisturbed: Path, inputs: Path, tmp_path: Path) -> None:
    """Killed in the episodes of step 2, and again while the checkpoint of step 3 was written."""
    run = tmp_path / "run"
    killed(inputs, run, "playing", 2)
    assert guess_run.checkpoint_of(run) == 1
    assert recorded_groups(run, 1) == guess_run.GROUPS
    killed(inputs, run, "saving", 3)
    assert guess_run.checkpoint_of(run) == 2
    assert recorded_groups(run, 2) == guess_run.GROUPS
    assert [entry["step"] for entry in metrics(run)] == [1, 2, 3]  # step 3 will come again
    assert list((run / "checkpoints").glob(".writing-*"))
    assert train(guess_run.recipe(inputs), run=run, env=GuessEnv)["step"] == 4

    assert metrics(run) == metrics(undisturbed)
    last = Path("checkpoints", "step-000004")
    for file in ("model/model.safetensors", "state.json"):
        assert (run / last / file).read_bytes() == (undisturbed / last / file).read_bytes(), file
    for file in ("optimizer.pt", "learned.pt"):
        assert numbers(run / last / file) == numbers(undisturbed / last / file), file
    assert read_results(run) == read_results(undisturbed)
    assert record(run) == record(undisturbed)
    assert not list((run / "checkpoints").glob(".writing-*"))
    said = [json.loads(line)["message"] for line in (run / "messages.jsonl").read_text().splitlines()]
    assert [line for line in said if line.startswith("going on")] == [
        "going on after step 1 of 4",
        "going on after step 2 of 4",
    ]


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
        assert entry["tokens/computed"] == sum(map(tree_tokens, parts)) < entry["tokens/asked"]
        assert entry["tokens/tree"] == sum(map(tree_tokens, played)) < entry["tokens/computed"]
        assert entry["tokens/rebuilt"] == entry["engine/evicted"] == 0


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
    assert metrics(run) == metrics(undisturbed)
    said = [json.loads(line) for line in (run / "messages.jsonl").read_text().splitlines()]
    assert any(line["level"] == "warning" and "step-000004 is torn" in line["message"] for line in said)


@pytest.mark.parametrize("credit", [{"kind": "implicit_step"}, {"kind": "utterance_critic", "gamma": 0.9}])
def test_what_learns_beside_the_policy_goes_on_bit_by_bit(credit: Any, inputs: Path, tmp_path: Path) -> None:
    """The last checkpoint is torn, so that step 3 is made again from what step 2 kept."""
    more = {
        "credit": credit,
        "implicit": {"lr": 1e-3},
        "critic": {"epochs": 3},
        "eval": {"before": False},
    }
    recipe = guess_run.recipe(inputs, sections=more, steps=3, drop_flat_groups=False)
    whole, again = tmp_path / "whole", tmp_path / "again"
    train(recipe, run=whole, env=GuessEnv)
    shutil.copytree(whole, again)
    last = Path("checkpoints", "step-000003")
    (again / last / "learned.pt").write_bytes(b"torn")
    train(recipe, run=again, env=GuessEnv)
    assert metrics(again) == metrics(whole)
    assert numbers(again / last / "learned.pt") == numbers(whole / last / "learned.pt")
    told = {"implicit_step": "implicit/reward", "utterance_critic": "utterance/q"}[credit["kind"]]
    first, *others = [step[told] for step in metrics(whole)]
    assert first == pytest.approx(0.0, abs=1e-6)  # it begins as RL finds the policy, after the warm start
    assert len(others) == 2
    assert all(others)
    (again / last / "learned.pt").unlink()
    state = json.loads((again / last / "state.json").read_text())
    del state["files"]["learned.pt"]
    (again / last / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=r"step-000003 holds nothing of the part that credit\.kind learns"):
        train(recipe, run=again, env=GuessEnv)


def test_a_finished_run_has_nothing_left_to_do(undisturbed: Path, inputs: Path) -> None:
    before = {file: file.read_bytes() for file in undisturbed.rglob("*") if file.suffix in (".safetensors", ".pt")}
    results, steps = read_results(undisturbed), metrics(undisturbed)
    assert train(guess_run.recipe(inputs), run=undisturbed, env=GuessEnv)["step"] == 4
    assert all(file.read_bytes() == data for file, data in before.items())
    assert (read_results(undisturbed), metrics(undisturbed)) == (results, steps)
