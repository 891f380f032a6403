"""Episodes played ahead of training, in a real worker process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import guess_run
import played_ahead
from ends import said
from turnstile.cli.main import run as command
from turnstile.config import Recipe
from turnstile.envs.guess import GuessEnv
from turnstile.errors import ConfigError, TrainingError
from turnstile.records.record import read_record
from turnstile.rollout.episode import Attempt
from turnstile.rollout.workers import LOG, MODULE, PlayJobs, Worker, describe_exit
from turnstile.runs.train import train
from turnstile.runs.worker import Setup
from turnstile.types import Task


def in_turn(inputs: Path, steps: int, demos: int = 0, **rollout: Any) -> Recipe:
    """Return the recipe of `guess_run` without evaluations before and after its steps."""
    recipe = guess_run.recipe(inputs, steps=steps)
    changed = {"sft": {"demos": demos}, "eval": {"before": False, "every": 0}, "rollout": rollout}
    changed["engine"] = {"deterministic": not rollout}
    return recipe.model_copy(
        update={name: getattr(recipe, name).model_copy(update=keys) for name, keys in changed.items()}
    )


def ahead(inputs: Path, steps: int, demos: int = 0) -> Recipe:
    return in_turn(inputs, steps, demos, max_staleness=1)


def seldom_saved(inputs: Path) -> Recipe:
    recipe = ahead(inputs, 6)
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"checkpoint_every": 6})})


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inputs")


@pytest.fixture(scope="module")
def run(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ahead") / "run"
    assert train(ahead(inputs, 4, demos=30), run=folder)["step"] == 4
    return folder


def versions(run: Path, step: int) -> list[int]:
    groups = [entry.group for entry in read_record(run, phase="train", step=step)]
    turns = [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]
    return sorted(set(np.concatenate([turn.completion.versions for turn in turns]).tolist()))


def test_tokens_are_at_most_max_staleness_old(run: Path) -> None:
    found = [versions(run, step) for step in (1, 2, 3, 4)]
    assert found[0] == [0]
    assert 0 in found[1]  # asked for with the first weights
    for step, own in enumerate(found, start=1):
        assert max(0, step - 2) <= min(own) <= max(own) <= step - 1
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [entry["staleness/max"] for entry in logged] == [
        step - 1 - min(own) for step, own in enumerate(found, start=1)
    ]
    trained = [entry for entry in logged if entry["groups/zero_advantage"] < entry["groups/total"]]
    assert trained
    assert all("loss/correction" in entry for entry in trained)  # tis, as the recipe names no factor


def test_steps_have_the_same_tasks_as_in_sync_mode(run: Path, inputs: Path, tmp_path: Path) -> None:
    train(in_turn(inputs, 2, demos=30), run=tmp_path / "run")
    for step in (1, 2):
        names = [
            [entry.group.id for entry in read_record(each, phase="train", step=step)]
            for each in (run, tmp_path / "run")
        ]
        assert names[0] == names[1]
        assert len(names[0]) == guess_run.GROUPS


def workers(parent: int) -> list[int]:
    """Return the living worker processes of a training process."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, ppid = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(ppid) == parent and state != "Z" and MODULE.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_leaves_no_process_and_no_weights(run: Path) -> None:
    assert not (run / "weights").exists()
    assert workers(os.getpid()) == []


def in_a_process(script: Path, inputs: Path, run: Path) -> subprocess.CompletedProcess[str]:
    folders = os.pathsep.join((str(Path(__file__).parent), str(Path(guess_run.__file__).parent), *sys.path))
    return subprocess.run(
        [sys.executable, str(script), str(inputs), str(run)],
        env={**os.environ, "PYTHONPATH": folders}, capture_output=True, text=True, check=False, timeout=400,
    )  # fmt: skip


@pytest.mark.slow
def test_killed_run_leaves_no_process_and_resumes(inputs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    script = f"from test_async_source import *; train(ahead(Path({str(inputs)!r}), 4), run=Path({str(run)!r}))"
    folders = os.pathsep.join((str(Path(__file__).parent), str(Path(guess_run.__file__).parent), *sys.path))
    training = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": folders})
    while not (run / "checkpoints/step-000001").exists():
        assert training.poll() is None
        time.sleep(0.02)
    playing = workers(training.pid)
    training.kill()
    training.wait()
    assert len(playing) == 1
    while not is_gone(playing[0]):
        time.sleep(0.02)
    assert train(ahead(inputs, 4), run=run)["step"] == 4
    assert not (run / "weights").exists()
    for step in (1, 2, 3, 4):
        groups = [entry.group for entry in read_record(run, phase="train", step=step)]
        assert [len(group.trajectories) for group in groups] == [guess_run.ATTEMPTS] * guess_run.GROUPS
    tasks = [entry.group.task.id for step in (1, 2) for entry in read_record(run, phase="train", step=step)]
    assert len(set(tasks)) == len(tasks)  # of five tasks four are given out before one comes again
    assert command(["audit", str(run)]) == 0


@pytest.fixture
def first_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the mark of environments that fail once."""
    monkeypatch.setenv(played_ahead.ONCE, str(tmp_path / "mark"))


@pytest.mark.usefixtures("first_time")
@pytest.mark.slow
def test_replaces_a_worker_that_died(inputs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(ahead(inputs, 2), run=run, env=played_ahead.Deadly)["step"] == 2
    (line,) = [line for line in said(run) if "SIGKILL" in line]
    assert "another one plays its" in line
    for step in (1, 2):
        groups = [entry.group for entry in read_record(run, phase="train", step=step)]
        assert [len(group.trajectories) for group in groups] == [guess_run.ATTEMPTS] * guess_run.GROUPS
        assert all(trajectory.turns for group in groups for trajectory in group.trajectories)
    assert command(["audit", str(run)]) == 0


@pytest.mark.usefixtures("first_time")
@pytest.mark.parametrize("env", [played_ahead.ToldToEnd, played_ahead.Interrupted])
@pytest.mark.slow
def test_replaces_a_worker_that_was_stopped_by_a_signal(
    env: type[played_ahead.ToldToEnd], inputs: Path, tmp_path: Path
) -> None:
    """Its output is in the run's folder, and reported with its process id."""
    run = tmp_path / "run"
    assert train(ahead(inputs, 2), run=run, env=env)["step"] == 2
    lines = said(run)
    assert any(f"was stopped ({env.number.name}); another one plays its" in line for line in lines)
    assert (run / LOG).read_text().splitlines() == ["a tool's complaint"]
    (line,) = [line for line in lines if line.endswith("a tool's complaint")]
    assert re.match(r"worker process \d+: ", line)
    assert command(["audit", str(run), "--record"]) == 0


@pytest.mark.slow
def test_records_episodes_played_while_training_computes(inputs: Path, tmp_path: Path) -> None:
    """The update of step 1 waits until all of step 2 has finished, and is killed."""
    script = tmp_path / "computes.py"
    script.write_text(
        "import os, sqlite3, sys, time\nfrom pathlib import Path\nimport turnstile.trainer.loop as loop\n"
        "from test_async_source import ahead, train\n\n"
        "COUNT = \"SELECT COUNT(*) FROM attempts WHERE step = 2 AND state = 'finished'\"\n"
        "run, latest = Path(sys.argv[2]), time.monotonic() + 300\n\n"
        "def update(*arguments, **named):\n    while time.monotonic() < latest:\n        time.sleep(0.02)\n"
        "        db = sqlite3.connect(run / 'ledger.db')\n        (count,) = db.execute(COUNT).fetchone()\n"
        "        db.close()\n        count == 8 and os.kill(os.getpid(), 9)\n\n"
        "loop.update = update\ntrain(ahead(Path(sys.argv[1]), 3), run=run)\n"
    )
    run = tmp_path / "run"
    done = in_a_process(script, inputs, run)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert train(ahead(inputs, 3), run=run)["step"] == 3
    assert [line for line in said(run) if "had finished before" in line] == [
        f"step {step}: 8 of 8 episodes had finished before, and were not played again" for step in (1, 2)
    ]
    assert command(["audit", str(run), "--record"]) == 0


@pytest.mark.usefixtures("first_time")
@pytest.mark.slow
def test_gives_up_when_workers_keep_dying(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"was killed .SIGKILL.*and so did 3 in a row"):
        train(ahead(inputs, 2), run=tmp_path / "run", env=played_ahead.AlwaysDeadly)


@pytest.mark.usefixtures("first_time")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.slow
def test_raises_an_episodes_error_in_training(inputs: Path, tmp_path: Path, strict: bool) -> None:
    with pytest.raises(KeyError, match="no such tool") as raised:
        train(ahead(inputs, 2), run=tmp_path / "run", env=played_ahead.Faulty, strict=strict)
    assert any("10 attempts had failed before it" in note for note in raised.value.__notes__) is not strict
    (note,) = [note for note in raised.value.__notes__ if note.startswith("in the process that plays episodes")]
    assert 'raise KeyError("no such tool")' in note


@pytest.mark.slow
async def test_raises_an_error_that_arrived_while_training_computed(inputs: Path, tmp_path: Path) -> None:
    """It is raised when training waits again."""
    worker = Worker(Setup(recipe=ahead(inputs, 2), env=played_ahead.no_env), log=tmp_path / LOG)
    try:
        worker.send(PlayJobs([(Task(id="guess-1-0", env="guess"), Attempt(group="g", number=0, seed=0))]))
        while worker._process.poll() is None:
            time.sleep(0.02)  # noqa: ASYNC251 - as training does
        with pytest.raises(LookupError, match="no such environment"):
            await to_the_end(worker)
    finally:
        await worker.close()


async def to_the_end(worker: Worker) -> None:
    while True:
        await worker.receive()


@pytest.mark.slow
def test_refuses_a_setup_that_cannot_be_pickled(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be sent to another process .*rollout.max_staleness = 0"):
        train(ahead(inputs, 2), run=tmp_path / "run", env=lambda: GuessEnv())


@pytest.mark.usefixtures("first_time")
@pytest.mark.slow
def test_refuses_a_setup_that_cannot_be_unpickled(inputs: Path, tmp_path: Path) -> None:
    """It can be pickled, but not unpickled in the worker."""
    script = tmp_path / "own.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom test_async_source import ahead, train\n"
        "from turnstile.envs.guess import GuessEnv\n\nclass Own(GuessEnv):\n    pass\n\n"
        "train(ahead(Path(sys.argv[1]), 2), run=Path(sys.argv[2]), env=Own)\n"
    )
    done = in_a_process(script, inputs, tmp_path / "run")
    assert done.returncode == 1
    assert "ConfigError: this run cannot be played ahead" in done.stderr
    assert "'Own'" in done.stderr


@pytest.mark.slow
def test_training_may_be_faster_than_the_worker_starts(inputs: Path, tmp_path: Path) -> None:
    """It was killed in step 4 and has no checkpoint since the first: three steps are in the journal, and the weights
    that are to be sampled with first are gone when they are looked for."""
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, sys\nfrom pathlib import Path\nimport turnstile.trainer.loop as loop\n"
        "from test_async_source import seldom_saved, train\n\nmetrics, steps = loop._metrics, []\n\n"
        "def die(*arguments, **named):\n    steps.append(1)\n    len(steps) == 4 and os.kill(os.getpid(), 9)\n"
        "    return metrics(*arguments, **named)\n\nloop._metrics = die\n"
        "train(seldom_saved(Path(sys.argv[1])), run=Path(sys.argv[2]))\n"
    )
    run = tmp_path / "run"
    done = in_a_process(script, inputs, run)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert train(seldom_saved(inputs), run=run)["step"] == 6
    assert len([line for line in said(run) if "had finished before" in line]) >= 3
    assert command(["audit", str(run)]) == 0


def test_describe_exit() -> None:
    assert describe_exit(3) == "ended with code 3"
    assert describe_exit(-signal.SIGTERM) == "was killed (SIGTERM)"
    assert describe_exit(128 + signal.SIGTERM) == "was stopped (SIGTERM)"
