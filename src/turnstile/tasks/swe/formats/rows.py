"""Instances from files and from a hub: JSON, JSON lines, Parquet, Harbor folders."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from turnstile.errors import MissingExtraError, TaskError
from turnstile.lookup import nearest
from turnstile.tasks.swe.formats import harbor, r2egym, swebench, swegym, swesmith
from turnstile.tasks.swe.formats.instance import Instance

Read = Callable[[Mapping[str, Any], str], Instance]
FORMATS: Mapping[str, Read] = {
    "swe-bench": swebench.read,
    "swe-gym": swegym.read,
    "swe-smith": swesmith.read,
    "r2e-gym": r2egym.read,
    "turnstile": lambda row, where: Instance.from_json(row),
}
_FILES = (".jsonl", ".json", ".parquet")


def read_instances(source: str | Path, format: str = "auto", *, split: str = "") -> list[Instance]:
    """The instances of a file, of a Harbor task folder or a folder of such, or of a data set on the hub (OWNER/NAME).

    `format` is one of FORMATS, by default told from the columns. `split` chooses among the files of a data set.
    Raises TaskError naming file and row for what cannot be read.
    """
    if format != "auto" and format not in FORMATS:
        raise TaskError(f"unknown instance format {format!r}; {nearest(format, (*FORMATS, 'auto'))}")
    path = Path(source)
    if path.is_dir() and (found := harbor.task_folders(path)):
        return [harbor.read_folder(folder) for folder in found]
    files = _files(path, str(source), split)
    instances = [
        FORMATS[_told(row, where) if format == "auto" else format](row, where)
        for file in files
        for where, row in _rows(file)
    ]
    if not instances:
        raise TaskError(f"{source}: it holds no instance")
    return instances


def _told(row: Mapping[str, Any], where: str) -> str:
    """The format of a row, told from its columns."""
    if "expected_output_json" in row:
        return "r2e-gym"
    if "instance_id" not in row:
        if "id" in row and "problem" in row:
            return "turnstile"
        raise TaskError(f"{where}: the columns are of no known format; known: {', '.join(FORMATS)}")
    if "test_patch" not in row and "image_name" in row:
        return "swe-smith"
    return "swe-bench" if "environment_setup_commit" in row or isinstance(row.get("FAIL_TO_PASS"), str) else "swe-gym"


def _files(path: Path, name: str, split: str) -> list[Path]:
    if path.is_file():
        return [path]
    folder = path if path.is_dir() else _downloaded(name)
    files = sorted(file for file in folder.rglob("*") if file.suffix in _FILES and file.stem != "dataset_infos")
    chosen = [file for file in files if not split or file.name.startswith(split) or split in file.parent.parts]
    if not chosen:
        hint = f" of the split {split!r}" if split else ""
        raise TaskError(f"{name}: there is no {', '.join(_FILES)} file{hint} in it")
    return chosen


def _downloaded(name: str) -> Path:
    """A data set's files from the hub, or from its cache."""
    if name.count("/") != 1 or name.startswith((".", "/")):
        raise TaskError(f"{name}: there is no such file or folder, and a data set on the hub is OWNER/NAME")
    hub = importlib.import_module("huggingface_hub")
    try:
        return Path(hub.snapshot_download(name, repo_type="dataset", allow_patterns=[f"*{end}" for end in _FILES]))
    except (hub.errors.HfHubHTTPError, hub.errors.LocalEntryNotFoundError, OSError, ValueError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise TaskError(f"{name}: no such file, and the data set cannot be had from the hub: {first}") from error


def _rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows of a file, each with where it stands."""
    try:
        found = list(_parquet(file) if file.suffix == ".parquet" else _json(file))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TaskError(f"{file}: it cannot be read ({error})") from error
    for number, row in enumerate(found, start=1):
        where = f"{file}, row {number}"
        if not isinstance(row, Mapping):
            raise TaskError(f"{where}: a row is an object with named fields, this is {type(row).__name__}")
        yield where, row


def _json(file: Path) -> Iterator[Any]:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".json":
        whole = json.loads(text)
        yield from whole if isinstance(whole, list) else [whole]
    else:
        yield from (json.loads(line) for line in text.split("\n") if line.strip())


def _parquet(file: Path) -> Iterator[Any]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise MissingExtraError("reading Parquet files", "parquet") from None
    for batch in parquet.ParquetFile(file).iter_batches():
        yield from batch.to_pylist()
