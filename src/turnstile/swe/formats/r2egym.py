"""R2E-Gym, which gives the status that every test must have, and hides the tests in the image.

Columns used here: repo_name, docker_image, commit_hash, parsed_commit_content (JSON), problem_statement,
expected_output_json (JSON: status by test). `bash run_tests.sh` runs the tests in /testbed; the agent's container has
neither that script nor the tests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from turnstile.errors import TaskError
from turnstile.swe.formats import logs
from turnstile.swe.formats.instance import Instance, extra_of, field_of
from turnstile.types import JSON

_SETUP = "export PATH=/testbed/.venv/bin:$PATH"
_HIDDEN = ("/r2e_tests", "/root/r2e_tests", "/testbed/r2e_tests", "/root/run_tests.sh", "/testbed/run_tests.sh")
_TESTS = (
    "rm -rf r2e_tests; for found in /root/r2e_tests /r2e_tests; do test -d $found && cp -r $found r2e_tests && break"
)
_TESTS += "; done; if test -f run_tests.sh; then bash run_tests.sh; else bash /root/run_tests.sh; fi"
_USED = ("repo_name", "docker_image", "commit_hash", "problem_statement", "expected_output_json")


def from_row(row: Mapping[str, Any], where: str) -> Instance:
    """Convert a row to an instance.

    The agent starts at the parent of the row's commit. No column has the repair as a diff.
    """
    repo, commit = field_of(row, "repo_name", where), field_of(row, "commit_hash", where)
    expected = _parse_field(row, "expected_output_json", where)
    parsed = _parse_field(row, "parsed_commit_content", where) if row.get("parsed_commit_content") else {}
    return Instance(
        id=f"{repo}__{commit}",
        problem=field_of(row, "problem_statement", where),
        repo=repo,
        base_commit=str(parsed.get("old_commit_hash") or f"{commit}^"),
        expected={str(test): str(status) for test, status in expected.items()},
        image=field_of(row, "docker_image", where),
        test_command=_TESTS,
        log_parser="r2e-gym",
        setup=_SETUP,
        hidden=_HIDDEN,
        extra={"commit_hash": commit, **extra_of(row, _USED)},
    )


def _parse_field(row: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(field_of(row, name, where))
    except json.JSONDecodeError as error:
        raise TaskError(f"{where}: field {name!r} is not JSON ({error.msg})") from error
    if not isinstance(value, dict):
        raise TaskError(f"{where}: field {name!r} is no JSON object")
    return value


def log(text: str) -> dict[str, str]:
    """Return the statuses in pytest's output by this data set's test names, which leave out the file."""
    return {".".join(test.split("::")[1:]) or test: status for test, status in logs.pytest_log(text).items()}


def to_row(instance: Instance) -> dict[str, JSON]:
    """Convert an instance to a row."""
    return {
        "repo_name": instance.repo,
        "docker_image": instance.image,
        "problem_statement": instance.problem,
        "expected_output_json": json.dumps(dict(instance.expected)),
        **instance.extra,
    }
