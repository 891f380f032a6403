"""SWE-bench and the data sets that share its columns (Verified, Lite, Multilingual, and many others).

Columns: instance_id, repo, base_commit, patch, test_patch, problem_statement, hints_text, created_at, version,
FAIL_TO_PASS and PASS_TO_PASS (lists as JSON text), environment_setup_commit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from turnstile.swe.formats.instance import Instance, extra_of, field_of, tests_of
from turnstile.types import JSON

_USED = ("instance_id", "repo", "base_commit", "patch", "test_patch", "problem_statement", "FAIL_TO_PASS",
         "PASS_TO_PASS", "image_name", "docker_image")  # fmt: skip


CONDA = "if test -f /opt/miniconda3/bin/activate; then . /opt/miniconda3/bin/activate testbed; fi"
"""Shell line that the published images of this data set and its relatives need before every command."""


def from_row(row: Mapping[str, Any], where: str) -> Instance:
    """Convert a row to an instance; if it names no image, use the one that the benchmark publishes for its id."""
    name = field_of(row, "instance_id", where)
    django = row.get("repo") == "django/django"
    published = f"swebench/sweb.eval.x86_64.{name.replace('__', '_1776_').lower()}:latest"
    return Instance(
        id=name,
        problem=field_of(row, "problem_statement", where),
        repo=field_of(row, "repo", where),
        base_commit=field_of(row, "base_commit", where),
        patch=field_of(row, "patch", where),
        test_patch=str(row.get("test_patch") or ""),
        fail_to_pass=tests_of(row, "FAIL_TO_PASS", where),
        pass_to_pass=tests_of(row, "PASS_TO_PASS", where),
        image=str(row.get("docker_image") or row.get("image_name") or published),
        test_command=_django_tests(row) if django else "",
        log_parser="unittest" if django else "pytest",
        setup=CONDA,
        extra=extra_of(row, _USED),
    )


def to_row(instance: Instance) -> dict[str, JSON]:
    """Convert an instance to a row."""
    own = {"test_patch": instance.test_patch, "docker_image": instance.image}
    return row_of(instance, instance.patch, json.dumps, **own)


def row_of(instance: Instance, patch: str, tests: Callable[[Sequence[str]], JSON], **own: JSON) -> dict[str, JSON]:
    """Return a row with the columns that related data sets share, and `own`; `tests` converts lists of test names."""
    return {
        "instance_id": instance.id,
        "repo": instance.repo,
        "base_commit": instance.base_commit,
        "patch": patch,
        "problem_statement": instance.problem,
        "FAIL_TO_PASS": tests(instance.fail_to_pass),
        "PASS_TO_PASS": tests(instance.pass_to_pass),
        **own,
        **instance.extra,
    }


def _django_tests(row: Mapping[str, Any]) -> str:
    """Return the command for Django's own test runner, which takes modules and prints like unittest."""
    files = re.findall(r"^diff --git a/tests/(\S+)\.py b/", str(row.get("test_patch") or ""), re.MULTILINE)
    modules = " ".join(dict.fromkeys(file.replace("/", ".") for file in files))
    return f"./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 {modules}"
