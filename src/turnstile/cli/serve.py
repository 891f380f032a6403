"""The command `turnstile serve`."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
from pathlib import Path
from typing import Any

import click

from turnstile.errors import ConfigError


@click.command(short_help="Serve a model over OpenAI's and Anthropic's protocols.")
@click.argument("model")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0: any that is free.")
@click.option("--name", default="", help="What clients call the model; default: MODEL.")
@click.option(
    "--renderer",
    default="chat",
    show_default=True,
    type=click.Choice(["chat", "lines"]),
    help="How conversations are laid out.",
)
@click.option(
    "--weights-from",
    type=click.Path(file_okay=False, path_type=Path),
    help="Let training give the model other weights, from folders below this one.",
)
def serve(
    model: str,
    overrides: tuple[str, ...],
    host: str,
    port: int,
    name: str,
    renderer: str,
    weights_from: Path | None,
) -> None:
    """Serve MODEL, a hub id, a folder or a packaged name, until the process is interrupted or terminated.

    Clients of OpenAI's protocol find it at http://HOST:PORT/v1: /models, /chat/completions with tools and streams, and
    /completions (of texts or token ids; ids and log-probabilities of the sampled tokens are returned on request).
    Clients of Anthropic's protocol find /messages and /messages/count_tokens there.

    KEY=VALUE changes a key of the recipe that the engine is made from, like engine.max_batch=32. With --weights-from
    runs, the server can take part in a training run: it loads the weights that `turnstile train` publishes in a run
    below that folder.

    Clients need the key in the environment variable TURNSTILE_SERVE_TOKEN, if it is set; it must be set if other
    machines can reach HOST. Without it, requests from web pages are refused, and so are requests to a host name that is
    not this machine's. Network traffic is not encrypted: put TLS or an SSH tunnel in front.
    """
    module = importlib.import_module("turnstile.gateway.http")  # needs an extra
    token = os.environ.get(module.TOKEN_VARIABLE, "")
    if not token and not importlib.import_module("turnstile.sandboxes.http.server").is_loopback(host):
        raise ConfigError(f"other machines can reach {host}, so clients must have a key: set {module.TOKEN_VARIABLE}")
    make_server = importlib.import_module("turnstile.runs.serve").make_server
    server = make_server(model, overrides, name=name, token=token, renderer=renderer, weights_from=weights_from)
    asyncio.run(_serve_until_stopped(server, host, port, name or model))


async def _serve_until_stopped(server: Any, host: str, port: int, name: str) -> None:
    """Serve a model until the process is interrupted or terminated."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with server.listening(host, port) as url:
        click.echo(f"{name} is served at {url}")
        await stop.wait()
