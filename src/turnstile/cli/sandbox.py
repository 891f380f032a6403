"""`turnstile sandbox`."""

from __future__ import annotations

import asyncio
import importlib

import click

from turnstile.build.kinds import bind
from turnstile.cli.images import image, remove_kept
from turnstile.config import make_recipe
from turnstile.errors import SandboxError, TurnstileError
from turnstile.sandboxes.check import check_sandboxes
from turnstile.sandboxes.folder import default_parent, sweep


@click.group(short_help="Check a kind of sandbox; make images; remove what killed runs left.")
def sandbox() -> None:
    """Sandboxes are where the code of tasks and of agents runs."""


sandbox.add_command(image)


@sandbox.command()
@click.argument("kind", default="local")
@click.argument("knobs", nargs=-1, metavar="[KNOB=VALUE]...")
def check(kind: str, knobs: tuple[str, ...]) -> None:
    """Tries out whether sandboxes of KIND do what every kind must do: commands, limits, files, snapshots, ends.

    Knobs are those of the recipe's section, as in: turnstile sandbox check container image=python:3.12
    """
    section = make_recipe({"sandbox": {"kind": kind}}, [f"sandbox.{knob}" for knob in knobs]).sandbox
    found = asyncio.run(check_sandboxes(bind("sandbox", section)()))
    for line in found:
        click.echo(f"wrong: {line}")
    if found:
        raise SandboxError(f"sandbox kind {kind!r} breaks {len(found)} of the promises that a sandbox makes")
    click.echo(f"sandbox kind {kind!r} does what a sandbox must do")


@sandbox.command()
@click.option("--daemon", help="The engine's socket, like unix:///run/podman/podman.sock; default: DOCKER_HOST.")
@click.option(
    "--all", "everybodys", is_flag=True, help="Also those of runs that are still going, or of other machines."
)
@click.option("--images", is_flag=True, help="Also images that were made here; they are made again when needed.")
def prune(daemon: str | None, everybodys: bool, images: bool) -> None:
    """Removes containers, snapshots and folders that runs left behind which were killed.

    Every run does so when it first starts a sandbox; this is for when there is no next run.
    """
    folders = sweep(default_parent())
    click.echo(f"folders of local sandboxes: {folders} removed")
    try:
        engine = importlib.import_module("turnstile.sandboxes.daemon").Daemon(daemon)
    except TurnstileError as error:
        if daemon is not None:
            raise
        click.echo(f"containers: not looked for ({error})")
        return
    try:
        found = engine.find(everybodys=everybodys)
        engine.clear(found)
        click.echo(
            f"containers: {len(found.containers)} removed, {len(found.images)} snapshots, {len(found.volumes)} volumes"
        )
        if images:
            remove_kept(engine)
    finally:
        engine.close()
