"""A run that is told to stop leaves a checkpoint, and goes on from there as if nothing had been."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from pathlib import Path

import pytest

import guess_run
import stopped
from ends import said
from turnstile.cli.main import run as command
from turnstile.errors import StoppedError
from turnstile.runs.stopping import Stopping
from turnstile.trainer import checkpoint

STEPS = ["train.steps=12", "train.checkpoint_every=0", "eval.every=0", "eval.before=false", "sft.demos=0"]
"""Of checkpoints there are the first, the last, and what a signal brings about."""


def logged(run: Path) -> int:
    file = run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.is_file() else 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
def test_a_run_is_stopped_between_two_steps(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, run, undisturbed = guess_run.recipe_file(tmp_path), tmp_path / "run", tmp_path / "undisturbed"
    assert command(["train", str(recipe), "--out", str(undisturbed), *STEPS]) == 0
    with stopped.start(recipe, run, *STEPS) as process:
        while logged(run) < 2:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        _, told = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    name = "interrupted" if number is signal.SIGINT else "stopped by SIGTERM"
    assert told.splitlines()[-1] == f"error: {name}; finished work is kept, and the same command resumes from there"
    found, complaints = checkpoint.latest(run / "checkpoints")
    assert found is not None
    assert (found.step, complaints) == (logged(run), [])
    assert 2 <= found.step < 12
    assert command(["audit", str(run)]) == 0

    assert command(["train", str(recipe), "--out", str(run), *STEPS]) == 0
    assert f"going on after step {found.step} of 12" in said(run)
    last = Path("checkpoints", "step-000012", "model", "model.safetensors")
    assert (run / last).read_bytes() == (undisturbed / last).read_bytes()
    assert command(["audit", str(run), "--record"]) == 0


def test_a_signal_ends_the_wait_of_the_loop() -> None:
    """A signal that does not interrupt the loop's `select`, here since another thread gets it, ends the wait too."""
    helped = threading.Event()

    async def wait() -> None:
        loop, never = asyncio.get_running_loop(), asyncio.Event()

        def help_out() -> None:
            helped.set()
            loop.call_soon_threadsafe(never.set)

        helper = threading.Timer(20, help_out)
        helper.start()
        threading.Timer(0.2, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM)).start()
        try:
            await never.wait()
        finally:
            helper.cancel()

    with pytest.raises(StoppedError):
        Stopping().run(wait())
    assert not helped.is_set()


def test_stopping_leaves_no_wakeup_descriptor_behind() -> None:
    async def nothing() -> int:
        return 1

    assert Stopping().run(nothing()) == 1
    assert signal.set_wakeup_fd(-1) == -1
