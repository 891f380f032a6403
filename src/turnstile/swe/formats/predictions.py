"""Write a policy's patches as `predictions.jsonl`, for the graders of SWE-bench and its relatives."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from turnstile.errors import ConfigError
from turnstile.types import Group


def write_predictions(file: str | Path, name: str, groups: Iterable[Group]) -> int:
    """Write one line per task, and return the number of lines.

    A line holds instance_id, model_name_or_path (`name`) and model_patch, which is the signal `patch` of the task's
    first episode ("" if infrastructure failed). Raises ConfigError if no episode recorded a patch; only repository
    environments do.
    """
    groups = list(groups)
    if not any("patch" in trajectory.signals for group in groups for trajectory in group.trajectories):
        raise ConfigError("there are no predictions: no episode recorded a patch; the env kinds swe and swe_shell do")
    lines = [
        json.dumps(
            {
                "instance_id": group.task.id,
                "model_name_or_path": name,
                "model_patch": group.trajectories[0].signals.get("patch", ""),
            },
            ensure_ascii=False,
        )
        for group in groups
    ]
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8", newline="\n")
    return len(lines)
