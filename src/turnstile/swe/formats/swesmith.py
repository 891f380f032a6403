"""SWE-smith, in which the column `patch` puts the bug in, and undoing it is the repair.

Columns: instance_id, repo (swesmith/OWNER__NAME.COMMIT), patch, FAIL_TO_PASS and PASS_TO_PASS (lists), image_name,
problem_statement (empty for some).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnstile.swe.formats.instance import Instance, extra_of, field_of, reversed_patch, tests_of
from turnstile.swe.formats.swebench import CONDA, row_of
from turnstile.types import JSON

_USED = ("instance_id", "repo", "base_commit", "patch", "FAIL_TO_PASS", "PASS_TO_PASS", "image_name",
         "problem_statement")  # fmt: skip


def from_row(row: Mapping[str, Any], where: str) -> Instance:
    """Convert a row to an instance.

    If base_commit is missing, it is the short hash at the end of the repo's name.
    """
    repo, bug = field_of(row, "repo", where), field_of(row, "patch", where)
    return Instance(
        id=field_of(row, "instance_id", where),
        problem=str(row.get("problem_statement") or ""),
        repo=repo,
        base_commit=str(row.get("base_commit") or repo.rpartition(".")[2]),
        patch=reversed_patch(bug),
        bug_patch=bug,
        fail_to_pass=tests_of(row, "FAIL_TO_PASS", where),
        pass_to_pass=tests_of(row, "PASS_TO_PASS", where),
        image=field_of(row, "image_name", where),
        setup=CONDA,
        extra=extra_of(row, _USED),
    )


def to_row(instance: Instance) -> dict[str, JSON]:
    """Convert an instance to a row."""
    return row_of(instance, instance.bug_patch, list, image_name=instance.image)
