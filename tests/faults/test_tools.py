"""What tools and rollouts do to a real `turnstile train`, which plays in turn with training or ahead of it."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from pathlib import Path

import pytest

import guess_run
import played_ahead
from broken_tools import COMMANDS, LIMITS, ToolEnv
from dockerd import IMAGE, ULIMITS, Dockerd
from ends import metrics, said
from turnstile.cli.main import run as command
from turnstile.records.ledger import open_ledger
from turnstile.records.record import read_record
from turnstile.types import JSON, Trajectory

STEPS = 3
QUICK = [f"train.steps={STEPS}", "sft.demos=0", "eval.before=false", "eval.every=0"]
AHEAD = pytest.mark.parametrize("ahead", [0, 1], ids=["in turn", "ahead"])
CODES = {"hangs": 124, "floods": 0, "crashes": 128 + signal.SIGSEGV}


@pytest.fixture
def recipe(tmp_path: Path, template: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command that trains, but for what the tool does."""
    monkeypatch.setenv(played_ahead.ONCE, str(tmp_path / "once"))
    monkeypatch.setattr(ToolEnv, "turns", itertools.count(1))
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    return ["train", str(guess_run.recipe_file(inputs)), "--out", str(tmp_path / "run"), *QUICK]


def with_tool(recipe: list[str], template: Path, how: str, ahead: int, every: int = 7) -> list[str]:
    env = f'env={{kind="broken_tools:ToolEnv", template="{template}", how="{how}", every={every}}}'
    return [*recipe, env, f"rollout.max_staleness={ahead}", f"engine.deterministic={'false' if ahead else 'true'}"]


def played(run: Path) -> list[Trajectory]:
    return [one for entry in read_record(run, phase="train") for one in entry.group.trajectories]


def assert_whole(run: Path) -> None:
    """All steps are trained, on all the episodes that the recipe says, and the books balance."""
    assert len(metrics(run)) == STEPS
    assert len(played(run)) == STEPS * guess_run.GROUPS * guess_run.ATTEMPTS
    assert command(["audit", str(run), "--record"]) == 0


@AHEAD
@pytest.mark.parametrize("how", COMMANDS)
def test_a_tool_that(
    how: str, ahead: int, recipe: list[str], template: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is a result like any other, for the agent to see; the episode goes on."""
    run = tmp_path / "run"
    assert command(with_tool(recipe, template, how, ahead)) == 0
    assert_whole(run)
    signals: list[dict[str, JSON]] = [dict(turn.signals) for one in played(run) for turn in one.turns]
    broken = [each for each in signals if each["tool"] or each["printed"]]
    assert len(broken) >= len(signals) // 10
    assert {each["tool"] for each in broken} == {CODES[how]}
    assert all(int(str(each["printed"])) <= LIMITS.output_chars + 100 for each in broken)
    with capsys.disabled():
        print(f"\nsurvived a tool that {how} in {len(broken)} of {len(signals)} turns", flush=True)


@AHEAD
def test_a_sandbox_that_is_lost_again_and_again(
    ahead: int, recipe: list[str], template: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The attempt is played again; the few that fail three times are given up, and are not zeros."""
    run = tmp_path / "run"
    assert command(with_tool(recipe, template, "loses its sandbox", ahead)) == 0
    assert_whole(run)
    given_up = [one for one in played(run) if one.error]
    assert {one.error for one in given_up} <= {"SandboxError: the sandbox is gone"}
    told = [line for line in said(run) if "episodes failed" in line]
    assert bool(told) == bool(given_up)
    with capsys.disabled():
        print(f"\nsurvived sandboxes that are lost: {len(given_up)} of {len(played(run))} given up", flush=True)


@AHEAD
def test_a_rollout_that_raises(
    ahead: int, recipe: list[str], template: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fault of the environment's code ends a strict run, with the place; once it is fixed, the same command goes
    on."""
    run, train = tmp_path / "run", with_tool(recipe, template, "raises", ahead, every=6 * guess_run.CONCURRENT)
    train.append("--strict")
    with pytest.raises(ValueError, match="a rollout that raises") as raised:
        command(train)
    assert any(note.startswith("in task 'guess-1-") for note in raised.value.__notes__)
    assert command(["audit", str(run)]) == 0
    assert command(train) == 0
    assert_whole(run)
    (line,) = [line for line in said(run) if "had finished before" in line and line.startswith("step 1:")]
    with capsys.disabled():
        print(f"\nsurvived a rollout that raises: {line}", flush=True)


def test_a_daemon_that_is_restarted_under_a_run(
    engine: Dockerd, recipe: list[str], template: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    ulimits = ", ".join(f"{name} = {most}" for name, most in ULIMITS.items())
    knobs = f'kind="container", image="{IMAGE}", daemon="{engine.address}", pool={{warm=0}}'
    knobs += f", resources={{ulimits={{{ulimits}}}}}"

    def restart() -> None:
        while not (run / "metrics.jsonl").is_file() or not metrics(run):
            time.sleep(0.05)
        engine.kill()
        engine.start()

    restarting = threading.Thread(target=restart)
    restarting.start()
    assert command([*with_tool(recipe, template, "", 0), f"sandbox={{{knobs}}}", "episode.retries=5"]) == 0
    restarting.join()
    assert_whole(run)
    assert engine.containers() == []
    ledger = open_ledger(run)
    (again,) = ledger.execute("SELECT COUNT(*) FROM attempts WHERE begun > 1").fetchone()
    ledger.close()
    with capsys.disabled():
        print(f"\nsurvived a restarted daemon of containers: {again} episodes were played again", flush=True)
