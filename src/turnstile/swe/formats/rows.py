"""Read instances from the rows of data sets, and from Harbor task folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from turnstile.errors import TaskError
from turnstile.lookup import nearest
from turnstile.swe.formats import harbor, r2egym, swebench, swegym, swesmith
from turnstile.swe.formats.instance import Instance
from turnstile.tasks.rows import files_of, read_rows

FromRow = Callable[[Mapping[str, Any], str], Instance]
FORMATS: Mapping[str, FromRow] = {
    "swe-bench": swebench.from_row,
    "swe-gym": swegym.from_row,
    "swe-smith": swesmith.from_row,
    "r2e-gym": r2egym.from_row,
    "turnstile": lambda row, where: Instance.from_json(row),
}


def read_instances(source: str | Path, format: str = "auto", *, split: str = "") -> list[Instance]:
    """Return the instances in a file, in Harbor task folders, or in a data set on the hub (OWNER/NAME).

    A folder may be a task folder or hold task folders. `format` is one of FORMATS, or inferred from the columns by
    default. `split` chooses among the files of a data set. Raises TaskError naming file and row for anything that
    cannot be read.
    """
    if format != "auto" and format not in FORMATS:
        raise TaskError(f"unknown instance format {format!r}; {nearest(format, (*FORMATS, 'auto'))}")
    path = Path(source)
    if path.is_dir() and (found := harbor.task_folders(path)):
        return [harbor.read_folder(folder) for folder in found]
    instances = [
        FORMATS[_detect_format(row, where) if format == "auto" else format](row, where)
        for file in files_of(source, split)
        for where, row in read_rows(file)
    ]
    if not instances:
        raise TaskError(f"{source}: it holds no instance")
    return instances


def _detect_format(row: Mapping[str, Any], where: str) -> str:
    """Return the format of a row, inferred from its columns. Raises TaskError if it matches none."""
    if "expected_output_json" in row:
        return "r2e-gym"
    if "instance_id" not in row:
        if "id" in row and "problem" in row:
            return "turnstile"
        raise TaskError(f"{where}: the columns are of no known format; known: {', '.join(FORMATS)}")
    if "test_patch" not in row and "image_name" in row:
        return "swe-smith"
    return "swe-bench" if "environment_setup_commit" in row or isinstance(row.get("FAIL_TO_PASS"), str) else "swe-gym"
