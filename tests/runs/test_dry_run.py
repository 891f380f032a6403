from __future__ import annotations

from pathlib import Path

import pytest

import guess_run
from turnstile.runs.dry_run import dry_run


@pytest.mark.slow
def test_the_process_that_plays_ahead_is_counted(tmp_path: Path) -> None:
    """It holds a model of its own, in a Python of its own."""
    found = dry_run(guess_run.recipe(tmp_path, sections={"rollout": {"max_staleness": 1}}))
    own = found["peak memory of the process that plays, MB"]
    assert 100 < own < found["peak memory, MB"]
    assert found["at best, where the two processes share no processor"] <= found["minutes of RL"]
