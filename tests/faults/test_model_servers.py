"""Training over servers that get SIGKILL: real `turnstile serve` and `turnstile train`. What is trained is to the last
bit what it would have been."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import guess_run
from ends import same_end
from modelprocess import ModelProcess, model_processes
from turnstile.cli.main import run as command
from turnstile.records.record import read_record

ONE_THREAD = ("engine.deterministic=true", "model.threads=1", "model.device=cpu")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the factor that training over servers has anyhow, so that a run without them is the same."""
    return guess_run.recipe_file(tmp_path_factory.mktemp("inputs"), sections={"loss_multipliers": [{"kind": "tis"}]})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def servers(recipe: Path, runs: Path) -> Iterator[list[ModelProcess]]:
    with model_processes(2, runs / "servers", str(recipe.parent / "model"), runs, *ONE_THREAD) as found:
        yield found


class Training:
    """`turnstile train` over the servers, in a process of its own."""

    def __init__(self, recipe: Path, run: Path, servers: list[ModelProcess], *overrides: str) -> None:
        self.run = run
        urls = ", ".join(f'"{server.url}"' for server in servers)
        over = ["engine.kind=openai", f"engine.url=[{urls}]", "engine.retries=0", *overrides]
        self._log = run.parent / f"{run.name}.log"
        train = [sys.executable, "-u", "-m", "turnstile", "train", str(recipe), "--out", str(run), *over]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(train, stdout=log, stderr=log)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def at(self, step: int, seconds: float) -> None:
        """Waits until so long after a step was logged."""
        file = self.run / "metrics.jsonl"
        while not file.is_file() or len(file.read_text().splitlines()) < step:
            assert self.process.poll() is None, self.log
            time.sleep(0.01)
        time.sleep(seconds)
        assert self.process.poll() is None, "it was over before"

    def ends_well(self) -> None:
        assert self.process.wait(600) == 0, self.log
        assert command(["audit", str(self.run), "--record"]) == 0


def killed_and_started(servers: list[ModelProcess], rng: random.Random) -> None:
    for server in servers:
        server.kill()
    time.sleep(rng.uniform(0, 1))
    for server in servers:
        server.begin()


@pytest.mark.parametrize("number", range(4))
def test_servers_that_are_killed_and_started_again_change_nothing(
    number: int,
    recipe: Path,
    undisturbed: Path,
    runs: Path,
    servers: list[ModelProcess],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One of two, or both, somewhere in a step."""
    rng = random.Random(f"servers/{number}")
    step, seconds = rng.randint(0, 3), rng.uniform(0, 0.3)
    training = Training(recipe, runs / f"run-{number}", servers)
    training.at(step, seconds)
    dead = servers if number == 3 else [servers[number % 2]]
    killed_and_started(dead, rng)
    training.ends_well()
    for server in servers:
        server.wait()
    same_end(training.run, undisturbed)
    with capsys.disabled():
        print(f"\nsurvived SIGKILL of {len(dead)} of 2 servers, {seconds:.2f} s after step {step}", flush=True)


def test_servers_killed_while_episodes_are_played_ahead(
    recipe: Path, runs: Path, servers: list[ModelProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random("ahead")
    ahead = (
        "engine.deterministic=false",
        "rollout.max_staleness=1",
        "regularizers=[]",
        "train.steps=10",
        "eval.every=0",
    )
    training = Training(recipe, runs / "ahead", servers, *ahead)
    for step, server in ((1, servers[0]), (3, servers[1])):  # at times there is none
        training.at(step, rng.uniform(0, 0.1))
        killed_and_started([server], rng)
    training.ends_well()
    for server in servers:
        server.wait()
    for entry in read_record(training.run, phase="train"):
        versions = [t.completion.versions for one in entry.group.trajectories for t in one.turns]
        assert min(v.min() for v in versions) >= entry.step - 2
        assert max(v.max() for v in versions) <= entry.step - 1
    with capsys.disabled():
        print("\nsurvived SIGKILL of both servers, one after the other, while another process plays ahead", flush=True)


def test_training_that_is_killed_goes_on_with_the_servers_that_it_had(
    recipe: Path, undisturbed: Path, runs: Path, servers: list[ModelProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    """The servers have weights of a step that is played again."""
    training = Training(recipe, runs / "killed", servers)
    training.at(2, 0.1)
    training.process.kill()
    training.process.wait()
    again = Training(recipe, runs / "killed", servers)
    again.ends_well()
    same_end(again.run, undisturbed)
    with capsys.disabled():
        print("\nsurvived SIGKILL of training over servers", flush=True)
