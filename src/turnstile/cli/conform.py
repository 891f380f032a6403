"""The command `turnstile conform`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from turnstile.cli.bars import bars
from turnstile.config import make_recipe
from turnstile.conform.verdicts import (
    FORMS,
    GIVEN,
    ROOMS,
    Standing,
    Subject,
    Verdict,
    conform,
    form_of,
    ours,
)
from turnstile.credit.invariants import INVARIANTS, exempt_of
from turnstile.errors import ConfigError
from turnstile.lookup import KINDS, load, nearest, resolve
from turnstile.wiring.kinds import with_knobs

MARKS: Mapping[Standing, str] = {"holds": "+", "broken": "BROKEN", "declared": "d", "does not apply": "-"}


@click.command("conform", short_help="Hold any advantage, return or loss function against the seven invariants.")
@click.argument("name", required=False, metavar="[MODULE:FUNCTION]")
@click.argument("knobs", nargs=-1, metavar="[KNOB=VALUE]...")
@click.option(
    "--as",
    "form",
    metavar="FORM",
    help=f"What it is called with: {', '.join(FORMS)}, or your own adapter, module:function.",
)
@click.option(
    "--exempt",
    "exempted",
    multiple=True,
    type=click.IntRange(1, 7),
    help="An invariant it need not keep; again for more.",
)
@click.option("--seed", default=0, show_default=True, help="Of the made-up groups and tokens.")
def conform_command(
    name: str | None, knobs: tuple[str, ...], form: str | None, exempted: tuple[int, ...], seed: int
) -> int:
    """Check which of the seven invariants of a training signal hold for a function.

    Prints a counterexample for each broken invariant. The exit code is 1 if one is broken that the function does not
    declare.

    MODULE:FUNCTION is any function of yours or of another framework, or a built-in one such as credit:grpo, loss:ppo or
    loss_multiplier:tis. Its knobs follow it. Without a function, all built-in ones are checked. The form of a function
    is recognised by the names of its parameters; if they do not show it, give it with --as. A `padded` function takes
    arrays as most frameworks have them: it turns token_level_rewards [B, L], response_mask and index (and values) into
    advantages, or old_log_prob, log_prob, advantages and response_mask into a scalar loss.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    if name is None:
        if knobs or form or exempted:
            raise click.UsageError("knobs, --as and --exempt are of a function; name it first")
        return check_ours(console, seed)
    subject = find(name, knobs, form, exempted)
    verdicts = conform(subject, seed=seed)
    console.print(to_table(verdicts))
    counts = Counter(each.standing for each in verdicts)
    words: Mapping[Standing, str] = {"holds": "hold", "does not apply": "do not apply"}
    totals = (f"{counts[each]} {words.get(each, each)}" for each in MARKS if counts[each])
    console.print(Text(f"{name}: {', '.join(totals)}"))
    return 1 if counts["broken"] else 0


def find(name: str, knobs: Sequence[str], form: str | None, exempted: Sequence[int] = ()) -> Subject:
    """Return the subject that the command's arguments name.

    Raises ConfigError if there is no such function or the arguments do not fit it.
    """
    given = make_recipe({"credit": {"kind": name}}, [f"credit.{knob}" for knob in knobs]).credit.knobs
    by_hand = dict.fromkeys(exempted, "said so with --exempt")
    paths = {path: (room, kind) for room in ROOMS for kind, path in KINDS[room].items()}
    room, kind = paths.get(name) or name.partition(":")[::2]
    if room in ROOMS and (kind in KINDS[room] or "." not in name):
        if form is not None:
            raise ConfigError(f"{name} is one of ours, whose form is known; leave --as {form} out")
        own, function = ROOMS[room], resolve(room, kind)
        exempt = {**exempt_of(function, given), **by_hand}
        return Subject(name=name, form=own, function=with_knobs(name, function, given, given=GIVEN[own]), exempt=exempt)
    if ":" not in name:
        known = [f"{room}:{kind}" for room in ROOMS for kind in KINDS[room]]
        same = [each for each in known if each.endswith(f":{name}")]
        hint = f"did you mean {' or '.join(same)}?" if same else nearest(name, known)
        raise ConfigError(f"{name!r} names no function; {hint} (or write your own as package.module:function)")
    return foreign(name, load(name, f"the function {name!r}"), given, form, by_hand)


def foreign(
    name: str, function: Any, knobs: Mapping[str, Any], form: str | None, by_hand: Mapping[int, str]
) -> Subject:
    """Return the subject for a function that is not built in.

    Its form is the one that `form` names, or else the one that its parameters show. Raises ConfigError if it cannot be
    called or the form does not exist.
    """
    exempt = {**exempt_of(function, knobs), **by_hand}
    if not callable(function):
        raise ConfigError(f"{name} is {type(function).__name__}, not something that can be called")
    if form is None or form in FORMS:
        found = next((each for each in FORMS if each == form), None) or form_of(name, function)
        bound = with_knobs(name, function, knobs, given=GIVEN[found])
        return Subject(name=name, form=found, function=bound, exempt=exempt)
    if ":" not in form:
        raise ConfigError(
            f"--as {form!r} is no form; {nearest(form, FORMS)} (or an adapter of your own, module:function)"
        )
    adapted = load(form, f"the adapter {form!r}")(with_knobs(name, function, knobs))
    if not callable(adapted):
        raise ConfigError(f"the adapter {form} gives {type(adapted).__name__}, not something that can be called")
    return Subject(name=name, form=form_of(f"what {form} makes of {name}", adapted), function=adapted, exempt=exempt)


def to_table(verdicts: Sequence[Verdict]) -> Table:
    """Return a table with a row for each invariant (number, standing, text), and its note, if any, below it."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    for each in verdicts:
        standing = each.standing.upper() if each.standing == "broken" else each.standing
        table.add_row(str(each.number), standing, INVARIANTS[each.number])
        if each.note:
            table.add_row("", "", Text(each.note, style="bold" if each.standing == "broken" else "dim"))
    return table


def check_ours(console: Console, seed: int) -> int:
    """Print the verdicts on all built-in functions, with their declared knobs.

    Return 1 if one of them breaks an invariant without declaring it, else 0.
    """
    subjects = ours()
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("")
    for number in INVARIANTS:
        table.add_column(str(number), justify="center")
    faults = []
    with bars(console) as shown:
        for subject in shown.track(subjects, description="checking"):
            verdicts = conform(subject, seed=seed)
            table.add_row(Text(subject.name), *(MARKS[each.standing] for each in verdicts))
            faults += [f"{subject.name} breaks {v.number}: {v.note}" for v in verdicts if v.standing == "broken"]
    console.print(table)
    console.print(
        Text("+ holds, d cannot hold, as declared (docs/algorithms.md says why), - does not apply", style="dim")
    )
    for fault in faults:
        console.print(Text(fault))
    console.print(Text(f"{len(subjects)} checked, {len(faults)} invariants broken that should hold"))
    return 1 if faults else 0
