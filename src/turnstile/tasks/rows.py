"""Rows of data sets (JSON, JSON lines, Parquet) from a file, a folder or the hub, and atomic writing of lines."""

from __future__ import annotations

import importlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from turnstile.errors import MissingExtraError, TaskError

SUFFIXES = (".jsonl", ".json", ".parquet")


def files_of(source: str | Path, split: str = "") -> list[Path]:
    """Return the files of a source, which is a file, a folder, or a data set on the hub (OWNER/NAME).

    A data set is downloaded, unless it is in the hub's cache. `split` selects among several files by the start of their
    name or by folder. Raises TaskError if there is no file.
    """
    path = Path(source)
    if path.is_file():
        return [path]
    folder = path if path.is_dir() else _download(str(source))
    files = sorted(file for file in folder.rglob("*") if file.suffix in SUFFIXES and file.stem != "dataset_infos")
    chosen = [file for file in files if not split or file.name.startswith(split) or split in file.parent.parts]
    if not chosen:
        hint = f" of the split {split!r}" if split else ""
        raise TaskError(f"{source}: it has no {', '.join(SUFFIXES)} file{hint}")
    return chosen


def read_rows(
    file: Path, on_error: Callable[[TaskError], None] | None = None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of a file, each with its position.

    A row that cannot be read is skipped and its TaskError passed to `on_error`; without `on_error` that error is
    raised. Raises TaskError, naming file and row, if the file cannot be read any further, and MissingExtraError for a
    Parquet file if that extra is not installed.
    """
    rows = _parquet(file) if file.suffix == ".parquet" else _json(file)
    for number in itertools.count(1):
        where = f"{file}, row {number}"
        try:
            row = next(rows)
        except StopIteration:
            return
        except (OSError, ValueError) as error:  # ValueError: not UTF-8, JSON or Parquet
            raise TaskError(f"{where}: it cannot be read ({error})") from error
        try:
            fields = _object(row, where)
        except TaskError as error:
            if on_error is None:
                raise
            on_error(error)
            continue
        yield where, fields


def _object(row: Any, where: str) -> Mapping[str, Any]:
    """Return a row as an object. Raises TaskError if it is not one.

    A row of JSON lines is given as bytes, so that the rows after a damaged one can still be read.
    """
    if isinstance(row, bytes):
        try:
            row = json.loads(row)
        except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
            raise TaskError(f"{where}: it cannot be read ({error})") from error
    if not isinstance(row, Mapping):
        raise TaskError(f"{where}: a row is an object with named fields, this is {type(row).__name__}")
    return row


def write_lines(path: str | Path, lines: Iterable[str]) -> int:
    """Write these lines to a file atomically, and return their number.

    Readers see either the old file or the new one, even if producing the lines fails.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    number = 0
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            for line in lines:
                file.write(line + "\n")
                number += 1
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return number


def _download(name: str) -> Path:
    """Return the folder with a data set's files from the hub or from its cache."""
    if name.count("/") != 1 or name.startswith((".", "/")):
        raise TaskError(f"{name}: no such file or folder; give a path, or a data set on the hub as OWNER/NAME")
    hub = importlib.import_module("huggingface_hub")
    try:
        return Path(hub.snapshot_download(name, repo_type="dataset", allow_patterns=[f"*{end}" for end in SUFFIXES]))
    except (hub.errors.HfHubHTTPError, hub.errors.LocalEntryNotFoundError, OSError, ValueError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise TaskError(f"{name}: no such file, and the hub does not give the data set: {first}") from error


def _json(file: Path) -> Iterator[Any]:
    if file.suffix == ".json":
        content = json.loads(file.read_text(encoding="utf-8"))
        yield from content if isinstance(content, list) else [content]
    else:
        with file.open("rb") as lines:
            yield from (line for line in lines if line.strip())


def _parquet(file: Path) -> Iterator[Any]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise MissingExtraError("reading Parquet files", "parquet") from None
    for batch in parquet.ParquetFile(file).iter_batches():
        yield from batch.to_pylist()
