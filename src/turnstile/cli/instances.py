"""The commands `turnstile tasks import` and `turnstile tasks export`, which convert common formats of data sets."""

from __future__ import annotations

import json
from pathlib import Path

import click

from turnstile.errors import TaskError
from turnstile.swe.bug import ENV, Bug, package_of
from turnstile.swe.formats.harbor import write_folder
from turnstile.swe.formats.instance import Instance, as_task, instance_of
from turnstile.swe.formats.made import as_instance
from turnstile.swe.formats.rows import FORMATS, read_instances
from turnstile.swe.problems.problems import REPOSITORY
from turnstile.tasks.base import load_tasks, write_tasks


@click.command("import")
@click.argument("source")
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The file to write.")
@click.option(
    "--format", "kind", default="auto", show_default=True, type=click.Choice(("auto", *FORMATS)), help="How to read it."
)
@click.option("--split", default="", help="Of a data set of several files, those of this split.")
def import_instances(source: str, out: Path, kind: str, split: str) -> None:
    """Convert the instances of a data set to a task file, for recipes with env.kind = "swe_shell".

    SOURCE is a JSON, JSON lines or Parquet file, a Harbor task folder or a folder of such folders, or OWNER/NAME of a
    data set on the hub. The file can be used as tasks.train and as tasks.heldout.
    """
    found = read_instances(source, kind, split=split)
    click.echo(f"{out}: {write_tasks(out, map(as_task, found))} tasks")


@click.command("export")
@click.argument("file")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--image", default="", help="The container image of tasks that were made, which name none.")
@click.option("--workdir", default="/testbed", show_default=True, help="Where their package lies in it.")
def export_tasks(file: str, folder: Path, image: str, workdir: str) -> None:
    """Write the repository tasks or the instances of FILE as Harbor task folders below FOLDER.

    The image of a made task must hold the files of the task's package and its dependencies, in a git repository.
    """
    instances = _instances(file, image, workdir)
    for instance in instances:
        write_folder(instance, folder / instance.id.replace("/", "__"))
    click.echo(f"{folder}: {len(instances)} task folders")


def _holds_tasks(file: str) -> bool:
    """Return whether a file's first line is a task.

    An unreadable file counts as holding none; the reader that is tried next then reports the error.
    """
    try:
        with open(file, encoding="utf-8") as lines:
            first = json.loads(lines.readline())
    except (OSError, ValueError):
        return False
    return isinstance(first, dict) and "env" in first


def _instances(file: str, image: str, workdir: str) -> list[Instance]:
    if not _holds_tasks(file):
        return read_instances(file)
    tasks = [task for task in load_tasks(file) if task.env in REPOSITORY]
    if not tasks:
        raise TaskError(f"{file}: it holds no repository task")
    if not image and any(task.env == ENV for task in tasks):
        raise TaskError(f"{file}: tasks that were made name no container image; give one with --image")
    return [
        as_instance(task.id, Bug.of(task), package_of(task), image=image, workdir=workdir)
        if task.env == ENV
        else instance_of(task)
        for task in tasks
    ]
