"""What else may happen to a real `turnstile train`: a disk that fills up, a clock that moves, what does not end."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import killed
import stopped
from ends import same_end
from turnstile.cli.main import run as command
from turnstile.trainer import checkpoint


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(
    ("point", "step", "nth"),
    [
        ("turn written", 2, 7),
        ("record", 2, 1),
        ("finalize", 3, 1),
        ("checkpoint", 3, 1),
        ("checkpoint", 3, 4),
        ("commit", 3, 1),
        ("rollout", 1, 1),
    ],
)
def test_a_disk_that_fills_up(
    point: str, step: int, nth: int, recipe: Path, undisturbed: Path, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says so; with room again the same command goes on, and nothing is lost."""
    run = disk / "run"
    done = killed.start("fill", point, step, nth, recipe, run)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("error: "), done.stderr
    assert "No space left on device" in line or "could not be written" in line or "disk" in line
    (disk / "ballast").unlink()
    assert command(["audit", str(run)]) == 0
    assert command(["train", str(recipe), "--out", str(run)]) == 0
    assert command(["audit", str(run), "--record"]) == 0
    same_end(run, undisturbed)
    with capsys.disabled():
        print(f"\nsurvived a full disk at {point} {nth} of step {step}: {line}", flush=True)


def test_a_disk_that_fills_up_while_another_process_plays(
    recipe: Path, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What that one tells is booked beside the training; the line is said when training looks up."""
    ahead, run = disk / "ahead.toml", disk / "run"
    text = recipe.read_text().replace("deterministic = true", "deterministic = false")
    ahead.write_text(text.replace("rollout = {", "rollout = {max_staleness = 1, "))
    done = killed.start("fill", "turn written", 3, 7, ahead, run)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("error: "), done.stderr
    (disk / "ballast").unlink()
    assert command(["audit", str(run)]) == 0
    assert command(["train", str(ahead), "--out", str(run)]) == 0
    assert command(["audit", str(run), "--record"]) == 0
    with capsys.disabled():
        print(f"\nsurvived a full disk while another process plays: {line}", flush=True)


def test_a_clock_that_goes_back(
    recipe: Path, undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    done = killed.start("clock", "rollout", 2, 5, recipe, run)
    assert done.returncode == 0, done.stderr
    assert command(["audit", str(run), "--record"]) == 0
    same_end(run, undisturbed)
    with capsys.disabled():
        print("\nsurvived a clock that goes back a year with each look at it", flush=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("what", "override", "step"),
    [("a tool", 'env={kind="stopped:HangingEnv"}', 2), ("a reward", 'rewards.terms=[{kind="stopped:slow_reward"}]', 0)],
)
def test_what_does_not_end_is_stopped_within_ten_seconds(
    what: str, override: str, step: int, number: signal.Signals, recipe: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A tool that hangs in a thread leaves the last whole step in a checkpoint; a step that computes on and on leaves
    the checkpoint before it."""
    run = tmp_path / "run"
    quick = ["train.checkpoint_every=0", "eval.before=false", "eval.every=0", "sft.demos=0", override]
    with stopped.start(recipe, run, *quick) as process:
        assert process.stdout is not None
        while process.stdout.readline() != "hangs\n":
            assert process.poll() is None
        began = time.monotonic()
        process.send_signal(number)
        process.wait(timeout=60)
        took = time.monotonic() - began
    assert process.returncode == 128 + number
    found, complaints = checkpoint.latest(run / "checkpoints")
    assert found is not None
    assert (found.step, complaints) == (step, [])
    assert command(["audit", str(run)]) == 0
    assert took < 10
    with capsys.disabled():
        print(f"\nsurvived {number.name} while {what} hangs: ended in {took:.1f} s, step {step} saved", flush=True)


def test_a_second_process_is_refused(recipe: Path, tmp_path: Path) -> None:
    """It says so in one line, whatever it was asked, and the first one goes on."""
    run, long = tmp_path / "run", "train.steps=10000"
    with stopped.start(recipe, run, long) as first:
        while not (run / "messages.jsonl").is_file():
            assert first.poll() is None
            time.sleep(0.01)
        for more in ([], ["--fresh"]):
            with stopped.start(recipe, run, long, *more) as second:
                told = second.communicate(timeout=60)[1]
            assert second.returncode == 1
            assert f"is in use by process {first.pid}; wait until it ends" in told
        assert first.poll() is None
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=60)
    assert command(["audit", str(run)]) == 0
