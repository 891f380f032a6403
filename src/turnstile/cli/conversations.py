"""The command `turnstile conversations`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from turnstile.cli.bars import bars
from turnstile.cli.main import LazyGroup
from turnstile.errors import TaskError
from turnstile.tasks.conversations import chat
from turnstile.tasks.conversations.select import read_report, read_tools, refusal, with_report
from turnstile.tasks.conversations.source import FORMATS
from turnstile.tasks.conversations.source import conversations as read_conversations
from turnstile.tasks.rows import write_lines

conversations = LazyGroup(
    name="conversations",
    lazy={
        "import": (
            "turnstile.cli.conversations:import_conversations",
            "Read the conversations of others into one form.",
        )
    },
    help="Conversations of agents, to learn from before RL: sft.conversations in a recipe.",
    short_help="Conversations to learn from before RL.",
)


@click.command("import")
@click.argument("source")
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The file to write.")
@click.option(
    "--format", "kind", default="auto", show_default=True, type=click.Choice(("auto", *FORMATS)), help="How to read it."
)
@click.option("--split", default="", help="Of a data set of several files, those of this split.")
@click.option("--resolved", is_flag=True, help="Only those whose task was solved.")
@click.option("--report", help="A report of SWE-bench's harness that says which were: JSON with resolved_ids.")
@click.option("--ended", "exit_statuses", multiple=True, help="Only those that ended so, like Submitted; repeatable.")
@click.option("--tools", "tools_file", help="Tools that were offered where SOURCE names none: a JSON list.")
@click.option("--skip-bad", is_flag=True, help="Leave out rows that cannot be read, instead of stopping at the first.")
def import_conversations(
    source: str,
    out: Path,
    kind: str,
    split: str,
    resolved: bool,
    report: str | None,
    exit_statuses: tuple[str, ...],
    tools_file: str | None,
    skip_bad: bool,
) -> None:
    """Convert conversations to JSON lines in one form: chat messages in OpenAI's format.

    SOURCE is a JSON, JSON lines or Parquet file, a folder of such files or of mini-swe-agent's trajectories, or
    OWNER/NAME of a data set on the hub.
    """
    solved = read_report(report) if report else None
    tools = read_tools(tools_file) if tools_file else ()
    console = Console(highlight=False)
    left_out: Counter[str] = Counter()
    bad: list[TaskError] = []
    turns: list[int] = []

    def lines() -> Iterator[str]:
        with bars(console) as shown:
            bar = shown.add_task("conversations", total=None)
            for found in read_conversations(source, kind, split=split, on_error=bad.append if skip_bad else None):
                shown.update(bar, advance=1)
                one = found if solved is None else with_report(found, solved)
                one = one if one.tools or not tools else replace(one, tools=tools)
                if why := refusal(one, resolved=resolved, ended=exit_statuses):
                    left_out[why] += 1
                    continue
                turns.append(sum(one.trainable))
                yield json.dumps(chat.to_row(one), ensure_ascii=False)
        if not turns:
            why = "; ".join(_reasons(left_out, bad)) or "it holds none"
            raise TaskError(f"{source}: no conversation is left to write ({why})")

    number = write_lines(out, lines())
    console.print(Text(f"{out}: conversations: {number}, messages to learn: {sum(turns)}"))
    for line in _reasons(left_out, bad):
        console.print(Text(f"  {line}"))


def _reasons(left_out: Counter[str], bad: Sequence[TaskError]) -> list[str]:
    """Return why conversations were left out, one line for each reason, the most frequent first.

    Rows that could not be read come last.
    """
    lines = [f"{count} left out: {why}" for why, count in left_out.most_common()]
    return lines + ([f"{len(bad)} left out that cannot be read, the first: {bad[0]}"] if bad else [])
