"""The command `turnstile sandbox`."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import secrets
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from turnstile.cli.images import image, remove_kept
from turnstile.config import Kind, make_recipe
from turnstile.errors import ConfigError, SandboxError, TurnstileError
from turnstile.sandboxes.base import Sandboxes
from turnstile.sandboxes.check import check_sandboxes
from turnstile.sandboxes.folder import default_parent, sweep
from turnstile.wiring.kinds import bind
from turnstile.wiring.sandboxes import make_sandboxes


@click.group(short_help="Check, serve and prune sandboxes; make images for them.")
def sandbox() -> None:
    """Check, serve and prune sandboxes, in which the code of tasks and agents runs."""


sandbox.add_command(image)


@sandbox.command()
@click.argument("kind", default="local")
@click.argument("knobs", nargs=-1, metavar="[KNOB=VALUE]...")
def check(kind: str, knobs: tuple[str, ...]) -> None:
    """Check that sandboxes of KIND do what every kind must do: commands, limits, files, snapshots, clean-up.

    Knobs are those of the recipe's section [sandbox], as in: turnstile sandbox check container image=python:3.12
    """
    found = asyncio.run(check_sandboxes(bind("sandbox", section_of(kind, knobs))()))
    for line in found:
        click.echo(f"wrong: {line}")
    if found:
        raise SandboxError(f"sandbox kind {kind!r} breaks {len(found)} of the promises that a sandbox makes")
    click.echo(f"sandbox kind {kind!r} does what a sandbox must do")


@sandbox.command()
@click.argument("kind", default="local")
@click.argument("knobs", nargs=-1, metavar="[KNOB=VALUE]...")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option("--port", default=8850, show_default=True, type=click.IntRange(0, 65535), help="0: any that is free.")
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Holds the token that clients must have; made, with a new one, where it does not exist.",
)
@click.option(
    "--lease",
    default=60.0,
    show_default=True,
    type=click.FloatRange(min=1),
    help="Seconds after which a client that is not heard of is gone, and its sandboxes are closed.",
)
@click.option("--clients", default=16, show_default=True, type=click.IntRange(min=1), help="Clients at once.")
@click.option("--most-mb", default=512, show_default=True, type=click.IntRange(min=1), help="One request or answer.")
@click.option(
    "--templates-mb",
    default=4096,
    show_default=True,
    type=click.IntRange(min=1),
    help="Templates that are kept, as they lie unpacked.",
)
@click.option("--image", "images", multiple=True, help="An image that clients may have pulled; repeatable.")
@click.option("--pull", is_flag=True, help="Clients may have any image pulled.")
def serve(
    kind: str,
    knobs: tuple[str, ...],
    host: str,
    port: int,
    token_file: Path | None,
    lease: float,
    clients: int,
    most_mb: int,
    templates_mb: int,
    images: tuple[str, ...],
    pull: bool,
) -> None:
    """Serve sandboxes of KIND to other machines, until the process is interrupted or terminated.

    Recipes on those machines need: sandbox = { kind = "remote", url = "http://HOST:PORT" }. Knobs are those of the
    recipe's section [sandbox], as in: turnstile sandbox serve container image=python:3.12. The token is read from
    --token-file or from the environment variable TURNSTILE_SANDBOX_TOKEN; without either, one is generated, and only
    this machine is served. Network traffic is not encrypted: put TLS or an SSH tunnel in front. Clients can start
    images that the engine has. Others are pulled for them only if --image names them, or with --pull.
    """
    module = importlib.import_module("turnstile.sandboxes.http.server")  # needs an extra
    section = section_of(kind, knobs)
    token, token_source = find_token(token_file)
    if token_source is None and not module.is_loopback(host):
        raise ConfigError(
            f"other machines can reach {host}, so a token must be given: --token-file FILE, or {module.TOKEN}"
        )

    def make(run: str) -> Sandboxes:
        return make_sandboxes(section, run=run, grading=True, pull=None if pull else images)

    asyncio.run(
        make("trial").close()
    )  # slow preparations, like building an image, happen here, where an interrupt ends them
    server = module.SandboxServer(
        make,
        token=token,
        lease=lease,
        clients=clients,
        most_mb=most_mb,
        templates_mb=templates_mb,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    asyncio.run(serve_until_stopped(server, host, port, kind, token_source or f"token: {token}"))


async def serve_until_stopped(server: Any, host: str, port: int, kind: str, token_line: str) -> None:
    """Serve sandboxes until the process is interrupted or terminated."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with server.listening(host, port) as url:
        click.echo(f"sandboxes of kind {kind!r} are served at {url}\n{token_line}")
        await stop.wait()
        click.echo("closing all sandboxes")


def find_token(file: Path | None) -> tuple[str, str | None]:
    """Return a server's token and a line about its source. The line is None if the token is new and not stored."""
    if file is not None and not file.exists():
        token = secrets.token_urlsafe(32)
        try:
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as made:
                made.write(token + "\n")
        except OSError as error:
            raise ConfigError(f"the token file {file} cannot be made: {error.strerror}") from None
        return token, f"token: a new one, written to {file}"
    remote = importlib.import_module("turnstile.sandboxes.http.remote")
    if file is not None:
        return remote.read_token(str(file)), f"token: that of {file}"
    if os.environ.get(remote.TOKEN):
        return os.environ[remote.TOKEN], f"token: that of {remote.TOKEN}"
    return secrets.token_urlsafe(32), None


def section_of(kind: str, knobs: Sequence[str]) -> Kind:
    """Return the recipe's sandbox section for a kind and its knobs from the command line."""
    return make_recipe({"sandbox": {"kind": kind}}, [f"sandbox.{knob}" for knob in knobs]).sandbox


@sandbox.command()
@click.option("--daemon", help="The engine's socket, like unix:///run/podman/podman.sock; default: DOCKER_HOST.")
@click.option(
    "--all", "everybodys", is_flag=True, help="Also those of runs that are still going, or of other machines."
)
@click.option("--images", is_flag=True, help="Also images that were made here; they are made again when needed.")
def prune(daemon: str | None, everybodys: bool, images: bool) -> None:
    """Remove containers, snapshots and folders of runs that were killed.

    Every run does so when it first starts a sandbox; this command is for machines without a next run.
    """
    folders = sweep(default_parent())
    click.echo(f"folders of local sandboxes: {folders} removed")
    try:
        engine = importlib.import_module("turnstile.sandboxes.containers.daemon").Daemon(daemon)
    except TurnstileError as error:
        if daemon is not None:
            raise
        click.echo(f"containers: not looked for ({error})")
        return
    try:
        found = engine.find(everybodys=everybodys)
        engine.remove_all(found)
        click.echo(
            f"containers: {len(found.containers)} removed, {len(found.images)} snapshots, {len(found.volumes)} volumes"
        )
        if images:
            remove_kept(engine)
    finally:
        engine.close()
