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

import killed
from ends import metrics, same_end
from turnstile.cli.main import run as command

KILLS, SEED = int(os.environ.get("TURNSTILE_KILLS", "50")), os.environ.get("TURNSTILE_SEED", "0")
MOST = {**killed.POINTS, "moment": 1500}
"""How often a step comes by a point, more or less; of a moment, the milliseconds."""


SHIPPED_EVERY = 5
"""One kill in five is of a shipped recipe: SmolLM2, whose top layers learn; the others of a tiny network."""


def kill(rng: random.Random, point: str, steps: int, recipe: Path, run: Path) -> str:
    """Kill a run at some place and return where that was.

    If the run does not reach the place that is drawn, it is killed earlier in that step, else in another step: a step
    whose attempts all earn the same has no update.
    """
    drawn, nth = rng.randint(1, steps), rng.randint(1, MOST[point])
    halves = [nth]
    while halves[-1] > 1:
        halves.append((halves[-1] + 1) // 2)
    for step in (drawn, *(other for other in range(1, steps + 1) if other != drawn)):
        for time in halves:
            if killed.start("kill", point, step, time, recipe, run).returncode == -signal.SIGKILL:
                return f"{time} ms into step {step}" if point == "moment" else f"{point} {time} of step {step}"
            shutil.rmtree(run)
    raise AssertionError(f"{point} is nowhere")


@pytest.mark.parametrize("number", range(KILLS))
def test_killed_at_random(
    number: int, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every other time at a named point, else at a random moment; always in two threads."""
    rng = random.Random(f"{SEED}/{number}")
    run = tmp_path / "run"
    if number % SHIPPED_EVERY == SHIPPED_EVERY - 1:
        (recipe, undisturbed), steps, what = request.getfixturevalue("shipped"), 2, "recipes/guess.toml, shortened"
    else:
        recipe, undisturbed = request.getfixturevalue("recipe"), request.getfixturevalue("undisturbed")
        steps, what = 4, "a tiny network"
    where = kill(rng, rng.choice([*killed.POINTS]) if number % 2 else "moment", steps, recipe, run)
    assert command(["audit", str(run)]) == 0
    assert command(["train", str(recipe), "--out", str(run)]) == 0
    assert command(["audit", str(run), "--record"]) == 0
    same_end(run, undisturbed)
    assert any(line.get("optim/grad_norm", 0) > 0 for line in metrics(run))
    shutil.rmtree(run)
    with capsys.disabled():
        print(f"\n{number + 1} of {KILLS}: survived SIGKILL at {where} ({what})", flush=True)
