"""The command `turnstile sandbox image`."""

from __future__ import annotations

import datetime
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.filesize import decimal
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from turnstile.cli.bars import bars
from turnstile.swe.packages.source import fetch

if TYPE_CHECKING:
    from turnstile.sandboxes.containers.images import Images, ImageStep

DAEMON = click.option(
    "--daemon", help="The engine's socket, like unix:///run/podman/podman.sock; default: DOCKER_HOST."
)


@click.group()
def image() -> None:
    """Build, pull and list the images that containers start from."""


@image.command()
@click.option("--image", "name", default="", help="Start from this image of a registry; it is pulled if need be.")
@click.option(
    "--dockerfile",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Start from what this Dockerfile makes of its folder.",
)
@click.option(
    "--rootfs",
    type=click.Path(path_type=Path),
    help="Start from a root file system: a folder, or a tar archive of one.",
)
@click.option(
    "--requirement",
    "requirements",
    multiple=True,
    help="Install this with the image's pip, like pytest==9.0.2; repeatable.",
)
@click.option(
    "--repository",
    metavar="SOURCE",
    help="Put this source tree in, as a git repository with one commit, and its dependencies beside it.",
)
@click.option("--workdir", default="/testbed", show_default=True, help="Where the repository goes.")
@click.option("--user", default="1000:1000", show_default=True, help="Whose the repository is: sandbox.isolation.user.")
@click.option("--network", help="What steps that install may use, like host; default: the engine's own choice.")
@DAEMON
def build(
    name: str,
    dockerfile: Path | None,
    rootfs: Path | None,
    requirements: tuple[str, ...],
    repository: str | None,
    workdir: str,
    user: str,
    network: str | None,
    daemon: str | None,
) -> None:
    """Build an image for sandboxes, unless the same one exists already, and print its name.

    SOURCE is a package of the index (pypi:toolz==1.2.0), a folder (./toolz) or a commit of a git repository
    (git+file:///work/toolz@v1.2.0), as in turnstile tasks make.
    """
    console = Console(highlight=False, stderr=True)
    with bars(console) as shown, open_images(daemon, _View(shown)) as images:
        if dockerfile is not None and not name and rootfs is None:
            made = images.from_dockerfile(dockerfile, network=network)
        else:
            made = images.base(image=name, dockerfile=dockerfile, rootfs=rootfs)
        if requirements:
            made = images.with_packages(made, requirements, network=network)
        if repository is not None:
            package = fetch(repository, progress=lambda message: console.print(Text(message)))
            made = images.with_repository(
                made, package.tree, holds=package.label, deps=package.deps, workdir=workdir, user=user
            ).name
    click.echo(made)


@image.command()
@click.argument("name")
@DAEMON
def pull(name: str, daemon: str | None) -> None:
    """Pull the image NAME from a registry, unless the engine has it."""
    with bars(Console(highlight=False, stderr=True)) as shown, open_images(daemon, _View(shown)) as images:
        images.pull(name)
    click.echo(name)


@image.command("list")
@DAEMON
def list_images(daemon: str | None) -> None:
    """List the images that were built here."""
    with open_images(daemon) as images:
        found = images.kept()
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("image", "holds", "size", "made"):
        table.add_column(heading, overflow="fold")
    for each in found:
        made = datetime.datetime.fromtimestamp(each.created).strftime("%Y-%m-%d %H:%M")
        table.add_row(Text(each.name), Text(each.holds), decimal(each.size), made)
    Console(highlight=False).print(table if found else "no image was made here")


def remove_kept(engine: Any) -> None:
    """Remove all images that were built here, and print which are gone and which stay."""
    images = importlib.import_module("turnstile.sandboxes.containers.images").Images(engine)
    found = images.kept()
    used = images.remove(found)
    click.echo(f"images made here: {len(found) - len(used)} removed")
    for each in used:
        click.echo(f"  {each.name} stays, as a container uses it")


@contextmanager
def open_images(daemon: str | None, view: _View | None = None) -> Iterator[Images]:
    """Yield the images of an engine.

    Raises ConfigError if the extra with the engine's client is not installed or no engine answers.
    """
    engine = importlib.import_module("turnstile.sandboxes.containers.daemon").Daemon(daemon)
    try:
        yield importlib.import_module("turnstile.sandboxes.containers.images").Images(engine, view)
    finally:
        engine.close()


class _View:
    """A display of progress: a line for each action, and a bar while it lasts."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._bar = bars.add_task("looking", total=None)
        self._what = ""

    def __call__(self, step: ImageStep) -> None:
        if step.what != self._what:
            self._what = step.what
            self._bars.console.print(Text(step.what))
        self._bars.update(self._bar, description="", completed=step.done, total=step.total)
