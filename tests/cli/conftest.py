"""A finished run to read, and the command as a function."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from helpers import byte_tokenizer
from turnstile.cli.main import run as run_command
from turnstile.config import Recipe
from turnstile.records.record import LOGPROB, WEIGHT, Recorder
from turnstile.types import Completion, Group, Message, Sampling, Score, Stop, Task, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class Output:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line on standard error."""
        (line,) = self.err.splitlines()
        return line


Command = Callable[..., Output]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """Runs the command line in an empty folder, 200 columns wide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def command(*arguments: str) -> Output:
        code = run_command(arguments)
        captured = capsys.readouterr()
        return Output(code, captured.out, captured.err)

    return command


def trajectory(group: str, attempt: int, actions: list[str], stop: Stop, error: str | None = None) -> Trajectory:
    """Each action after a prompt or an observation `n lines`, as bytes."""
    ids = byte_tokenizer()
    turns = []
    for k, action in enumerate(actions):
        tokens = np.array(ids.encode(action), np.int32)
        completion = Completion(
            token_ids=tokens,
            logprobs=np.full(len(tokens), -0.5, np.float32),
            versions=np.zeros(len(tokens), np.int32),
            sampling=Sampling(),
            finish="stop",
            seconds=0.1,
        )
        turns.append(
            Turn(
                context_ids=np.array(ids.encode("Repair it.\n" if k == 0 else "ok\n"), np.int32),
                completion=completion,
                message=Message(role="assistant", content=action),
                observation=(Message(role="tool", content=f"seen after {action}"),),
                signals={"ok": True},
            )
        )
    return Trajectory(
        task_id="toolz/get",
        group=group,
        attempt=attempt,
        turns=tuple(turns),
        stop=stop,
        signals={"resolved": True},
        error=error,
    )


def record_group(recorder: Recorder, step: int, task: str) -> None:
    """Three attempts at one task: total 1.2, total -0.5 (its step reward withheld), and one lost."""
    name = f"train/{step}/0/{task}"
    trajectories = (
        trajectory(name, 0, ["view", "fix"], Stop.SUBMITTED),
        trajectory(name, 1, ["view"], Stop.TURNS),
        trajectory(name, 2, [], Stop.ERROR, error="SandboxError: it died"),
    )
    f32 = np.float32
    scores = [
        Score(
            outcome={"agent": 1.0}, turn=np.array([0.1, 0.1], f32), total=1.2,
            granted={"command": np.array([0.1, 0.1], f32)}, gates={"outcome": True},
        ),
        Score(
            outcome={"agent": -0.5}, turn=np.array([0.0], f32), total=-0.5,
            withheld={"command": np.array([0.1], f32)}, gates={"outcome": False}, withheld_by={"command": ("outcome",)},
        ),
        Score(outcome=None, turn=np.zeros(0, f32), total=0.0, in_baseline=False, in_gradient=False),
    ]  # fmt: skip

    def per_token(*values: float) -> list[list[np.ndarray]]:
        return [
            [np.full(len(turn.completion.token_ids), value, f32) for turn in item.turns]
            for item, value in zip(trajectories, values, strict=True)
        ]

    group = Group(id=name, task=Task(id=task, env="swe"), trajectories=trajectories)
    trained = {WEIGHT: per_token(0.25, 0.0, 0.0), LOGPROB: per_token(-0.625, 0.0, 0.0)}
    recorder.write(step, "train", group, scores, per_token(1.0, -1.0, 0.0), trained)


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """runs/demo: two training steps and one evaluation, with a model folder that holds a byte tokenizer."""
    model = tmp_path / "model"
    byte_tokenizer().save_pretrained(model)
    (model / "config.json").write_text('{"model_type": "llama"}')
    run = tmp_path / "runs" / "demo"
    recorder = Recorder(run)
    record_group(recorder, 1, "toolz/first")
    record_group(recorder, 2, "toolz/second")
    name = "eval/oracle/0/slugify/x"
    group = Group(
        id=name, task=Task(id="slugify/x", env="swe"), trajectories=(trajectory(name, 0, ["submit"], Stop.SUBMITTED),)
    )
    score = Score(outcome={"agent": 0.0}, turn=np.zeros(1, np.float32), total=0.0)
    recorder.write(2, "eval", group, [score], label="oracle")
    recipe = Recipe.model_validate({"name": "demo", "model": {"id": str(model)}})
    (run / "resolved.json").write_text(json.dumps({"recipe": recipe.model_dump(mode="json")}))
    return run
