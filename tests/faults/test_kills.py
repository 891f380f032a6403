"""SIGKILL at random moments of a real `turnstile train`; each run goes on to the end of an undisturbed one.

TURNSTILE_KILLS says how many (50 unless it is set), TURNSTILE_SEED which.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path

import pytest

import guess_run
import killed
from ends import metrics, same_end
from turnstile.cli.main import run as command

KILLS, SEED = int(os.environ.get("TURNSTILE_KILLS", "50")), os.environ.get("TURNSTILE_SEED", "0")
MOST = {**killed.POINTS, "moment": 1500}
"""How often a step comes by a point, more or less; of a moment, the milliseconds."""


def kill(rng: random.Random, point: str, recipe: Path, run: Path) -> str:
    """Kills a run at some place, sooner than it was to be if it did not come there; says where that was."""
    step, nth = rng.randint(1, 4), rng.randint(1, MOST[point])
    while killed.start("kill", point, step, nth, recipe, run).returncode != -signal.SIGKILL:
        assert nth > 1, f"{point} of step {step} is nowhere"
        nth = (nth + 1) // 2
        shutil.rmtree(run)
    return f"{nth} ms into step {step}" if point == "moment" else f"{point} {nth} of step {step}"


@pytest.mark.parametrize("number", range(KILLS))
def test_killed_at_random(
    number: int, recipe: Path, undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every other time at a named point, else wherever it is by then."""
    rng = random.Random(f"{SEED}/{number}")
    run = tmp_path / "run"
    where = kill(rng, rng.choice([*killed.POINTS]) if number % 2 else "moment", recipe, run)
    assert command(["audit", str(run)]) == 0
    assert command(["train", str(recipe), "--out", str(run)]) == 0
    assert command(["audit", str(run), "--record"]) == 0
    same_end(run, undisturbed)
    shutil.rmtree(run)
    with capsys.disabled():
        print(f"\n{number + 1} of {KILLS}: survived SIGKILL at {where}", flush=True)


def test_a_shipped_recipe_is_killed_and_ends_the_same(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real model, part of which learns, in two threads: in a step's rollout, and in its update."""
    recipe = guess_run.shipped_file(tmp_path_factory.mktemp("shipped"))
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    assert command(["train", str(recipe), "--out", str(undisturbed)]) == 0
    assert all(line["optim/grad_norm"] > 0 for line in metrics(undisturbed) if "loss/total" in line)
    for point, step, nth in (("rollout", 1, 9), ("checkpoint", 2, 3)):
        killed.train(point, step, nth, recipe, run)
    assert command(["train", str(recipe), "--out", str(run)]) == 0
    assert command(["audit", str(run), "--record"]) == 0
    same_end(run, undisturbed)
    with capsys.disabled():
        print("\nsurvived SIGKILL twice in a run of recipes/guess.toml, shortened, in two threads", flush=True)
