"""The command `turnstile tasks describe`."""

from __future__ import annotations

from collections import Counter

import click
from rich.console import Console
from rich.text import Text

from turnstile.cli.bars import bars
from turnstile.runs.describe import describe_tasks
from turnstile.swe.bug import ENV
from turnstile.swe.bugs.describe import Described
from turnstile.tasks.base import load_tasks


@click.command()
@click.argument("file")
@click.option("--model", required=True, help="A hub id, a folder or a packaged name of a chat model.")
@click.option(
    "--tries", default=3, show_default=True, type=click.IntRange(min=1), help="Texts asked for until one is accepted."
)
@click.option("--temperature", default=0.7, show_default=True, type=click.FloatRange(min=0))
@click.option("--max-tokens", default=256, show_default=True, type=click.IntRange(min=16), help="Length of a text.")
def describe(file: str, model: str, tries: int, temperature: float, max_tokens: int) -> None:
    """Let a model write the problem statements of FILE's repository tasks.

    The model sees the messages of the failing tests and the function's signature and docstring, but never the code or
    the repair. A text that reveals the repair is refused; if no text is accepted, the task keeps its statement. After
    an interruption the command continues where it stopped.
    """
    console = Console(highlight=False)
    with bars(console) as shown:
        bar = shown.add_task("describing", total=sum(task.env == ENV for task in load_tasks(file)))

        def done(one: Described) -> None:
            shown.update(bar, advance=1)

        found = describe_tasks(file, model, tries=tries, temperature=temperature, max_tokens=max_tokens, done=done)
    kept = [one.why.partition(":")[0] for one in found if one.why is not None]
    console.print(Text(f"{file}: {len(found) - len(kept)} of {len(found)} statements are by {model}"))
    for why, count in Counter(kept).most_common():
        console.print(Text(f"  {count} kept as they were: {why}"))
