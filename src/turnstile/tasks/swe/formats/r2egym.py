"""R2E-Gym: what every test must come to is a map, and the tests wait in the image.

Columns used here: repo_name, docker_image, commit_hash, parsed_commit_content (JSON), problem_statement,
expected_output_json (JSON: status by test). `bash run_tests.sh` runs them in /testbed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from turnstile.errors import TaskError
from turnstile.tasks.swe.formats.instance import Instance, extra_of, field_of
from turnstile.types import JSON

_USED = ("repo_name", "docker_image", "commit_hash", "problem_statement", "expected_output_json")


def read(row: Mapping[str, Any], where: str) -> Instance:
    """A row as an instance. The agent starts at the parent of the commit; its repair is in no column as a diff."""
    repo, commit = field_of(row, "repo_name", where), field_of(row, "commit_hash", where)
    expected = _parsed(row, "expected_output_json", where)
    parsed = _parsed(row, "parsed_commit_content", where) if row.get("parsed_commit_content") else {}
    return Instance(
        id=f"{repo}__{commit}",
        problem=field_of(row, "problem_statement", where),
        repo=repo,
        base_commit=str(parsed.get("old_commit_hash") or f"{commit}^"),
        expected={str(test): str(status) for test, status in expected.items()},
        image=field_of(row, "docker_image", where),
        test_command="bash run_tests.sh",
        extra={"commit_hash": commit, **extra_of(row, _USED)},
    )


def _parsed(row: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(field_of(row, name, where))
    except json.JSONDecodeError as error:
        raise TaskError(f"{where}: field {name!r} is not JSON ({error.msg})") from error
    if not isinstance(value, dict):
        raise TaskError(f"{where}: field {name!r} is no JSON object")
    return value


def write(instance: Instance) -> dict[str, JSON]:
    """The instance as a row."""
    return {
        "repo_name": instance.repo,
        "docker_image": instance.image,
        "problem_statement": instance.problem,
        "expected_output_json": json.dumps(dict(instance.expected)),
        **instance.extra,
    }
