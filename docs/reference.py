"""Write configuration.md, algorithms.md and its pages, metrics.md, cli.md and src/turnstile/knobs.json from the code.

python docs/reference.py            # write them
python docs/reference.py --check    # fail if they are not up to date
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import re
import sys
import textwrap
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from knob_table import knob_table

from turnstile import config
from turnstile.cli.main import cli
from turnstile.credit.base import GIVEN as CREDIT_GIVEN
from turnstile.credit.invariants import INVARIANTS, Declaration, declarations
from turnstile.knobs import TABLE
from turnstile.lab.study import line_of
from turnstile.lab.table import Grid, directions, progress, to_markdown
from turnstile.lookup import KINDS, load, part_of, resolve
from turnstile.tracking.metrics import METRICS
from turnstile.wiring.kinds import OFFERED

DOCS = Path(__file__).parent
MADE = "Made by `make docs` from the code.\n"
GIVEN = {
    "reward": {"task", "trajectory"},
    "credit": set(CREDIT_GIVEN),
    "loss": {"logprobs", "batch", "values"},
    "loss_multiplier": {"batch"},
    "loss_aggregation": {"rows"},
    "tracker": {"run", "board"},
    "env": {"grader", "sandboxes", "problems"},
    "engine": {"tokenizer", "stop_ids", "writer", "policy"},
    "renderer": {"tokenizer", "parser"},
    "schedule": {"progress"},
    "compose": {"terms", "task", "trajectory"},
    "grader": {"asker", "chars", "engine", "renderer", "tokenizer"},
    "hint": {"seed", "steps", "criteria"},
    "demonstrator": {"task", "rng"},
    "policy": {"task", "rng"},
}
"""room -> parameters that are passed in, and so are not knobs."""
ALGORITHMS = {
    "reward": ("rewards", "Rewards"),
    "compose": ("composition", "Composition of rewards"),
    "credit": ("credit", "Credit"),
    "loss": ("losses", "Losses"),
    "loss_multiplier": ("loss_multipliers", "Loss multipliers"),
    "grader": ("graders", "Graders: signals from finished episodes, for rewards to read"),
    "hint": ("hints", "Hints: text that training prompts show besides the task"),
    "loss_aggregation": ("loss_aggregation", "Loss aggregation"),
}
"""room -> its page and title in the catalogue."""
OTHERS = frozenset(
    {"env", "sandbox", "engine", "renderer", "parser", "demonstrator", "policy", "log_parser", "schedule", "tracker"}
)
"""Rooms whose kinds are not algorithms of the catalogue."""
ELSEWHERE = (
    ("LOOP", '`credit.kind = "rloo"`'),
    ("oracle_turn: a symbolic oracle's verdict on each turn", "the environment's signal, by the reward `turn_signal`"),
    ("count: intrinsic rewards of counts", 'the reward `novelty` with `form = "count"`, within an episode'),
    (
        "implicit_prm (PRIME, OPRL)",
        '`credit.kind = "implicit_step"` with `[credit.reward_model]`, learned in the same step: it is '
        "credit, which no gate withholds and `rescore` does not judge again",
    ),
    (
        "progress_attribution as a reward (SPA-RL)",
        '`credit.kind = "progress_attribution"` with `[credit.critic]`; likewise',
    ),
    ("ProRL's reference reset", "`train.reference_every`"),
    ("DPH-RL's stored samples", "`[rehearsal]` with the loss `forward_kl`"),
    ("SPEAR's replay buffer", '`[replay_buffer]` with `credit.kind = "recalibrated"`'),
    ("SDPO's feedback", "`[loss.feedback]` of the loss `self_distill`"),
    ("RuscaRL", 'the reward and grader `rubric` with `hint.kind = "rubric"`'),
)
"""What the literature calls otherwise, and where it is."""
LAB = {"credit": "gradients.json", "loss": "losses.json", "loss_multiplier": "factors.json"}
"""room -> what the lab found of its kinds, below results/lab/."""


def comments(source: str) -> dict[int, str]:
    """The comment at the end of each line that has one."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}


def default_of(value: ast.expr | None) -> str:
    """A field's default as the recipe would write it; "" if there is none."""
    if value is None:
        return ""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "Field":
        value = value.args[0] if value.args else None
        return default_of(value) if value is not None else "{}"
    return ast.unparse(value).replace("'", '"').replace("True", "true").replace("False", "false").replace("None", "-")


def sections() -> Iterator[str]:
    """One table a section of a recipe: key, type, default, what it is."""
    source = inspect.getsource(config)
    notes = comments(source)
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    names = {
        field.annotation.__name__: name
        for name, field in config.Recipe.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, config.Section | config.EngineConfig)
    }
    names |= {"TermConfig": "rewards.terms", "GateConfig": "rewards.terms.gate"}
    for name in ("Recipe", *names):
        node = classes[name]
        fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
        simple = [f for f in fields if not (name == "Recipe" and ast.unparse(f.annotation).endswith("Config"))]
        yield f"## {'top level' if name == 'Recipe' else f'[{names[name]}]'}\n"
        if (told := ast.get_docstring(node)) and name != "Recipe":
            yield told + "\n"
        yield "| key | type | default | |\n| --- | --- | --- | --- |"
        for field in simple:
            key, kind = ast.unparse(field.target), ast.unparse(field.annotation).replace("|", "\\|")
            if field.lineno not in notes:
                sys.exit(f"error: config.{name}.{key} has no description; write it as a comment behind the field")
            yield f"| `{key}` | `{kind}` | `{default_of(field.value)}` | {notes.get(field.lineno, '')} |".replace(
                "``", ""
            )
        yield ""


def kinds() -> Iterator[str]:
    """One table a room: each kind with its knobs and the first line of its docstring."""
    for room, table in KINDS.items():
        yield f"### {room}\n\n| kind | knobs | |\n| --- | --- | --- |"
        for kind in table:
            thing = resolve(room, kind)
            told = (inspect.getdoc(thing) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
            told = re.sub(r"^Return (.)", lambda verb: verb[1].upper(), told)  # a table tells what it is
            own = part_of(thing)
            keys = [knobs(room, thing)]
            keys += [knobs(room, load(own.path, kind), f"{own.section}.")] if own is not None else []
            yield f"| `{kind}` | {', '.join(filter(None, keys))} | {told} |"
        yield ""


def knobs(room: str, thing: Any, table: str = "") -> str:
    """The knobs of a kind, or of the part that has a `table` of it, with their defaults."""
    return ", ".join(
        f"`{table}{p.name}`" if p.default is p.empty else f"`{table}{p.name} = {shown(p.default)}`"
        for p in inspect.signature(thing).parameters.values()
        if p.name not in (OFFERED if table else GIVEN.get(room, ()))
        and not (room == "engine" and p.name == "model" and p.default is p.empty)  # a network, not its name
        and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
    )


def catalogue() -> dict[Path, str]:
    """Return the page of each room: every kind with its docstring, knobs, file, and the invariants it cannot keep."""
    if unplaced := set(KINDS) - set(ALGORITHMS) - OTHERS:
        raise SystemExit(f"docs/reference.py does not say whether {sorted(unplaced)} belongs in the catalogue")
    found = {}
    for room, (page, title) in ALGORITHMS.items():
        parts = [f"# {title}\n\n{MADE}\nPart of [the catalogue](../algorithms.md).\n", links(room) + "\n"]
        for kind, path in KINDS[room].items():
            thing = resolve(room, kind)
            file = path.partition(":")[0].replace(".", "/") + ".py"
            taken = knobs(room, thing)
            parts += [f"## {kind}\n", f"[{file}](../../src/{file})" + (f"; knobs: {taken}" if taken else "") + "\n"]
            parts.append(plain(inspect.getdoc(thing) or "") + "\n")
            parts += [
                *part(room, thing),
                *exemptions([d for d in declarations(room) if d.kind == kind]),
                *lab_figures(room, kind),
            ]
        found[DOCS / "algorithms" / f"{page}.md"] = "\n".join(parts).rstrip() + "\n"
    return found


def links(room: str, folder: str = "") -> str:
    """Links to all kinds of a room."""
    page = f"{folder}{ALGORITHMS[room][0]}.md" if folder else ""
    return " · ".join(f"[{kind}]({page}#{kind})" for kind in KINDS[room])


def part(room: str, thing: Any) -> Iterator[str]:
    """The keys of the table of a kind's part: key, type, default, what it is."""
    if (found := part_of(thing)) is None:
        return
    made = load(found.path, f"{room} {found.section}")
    source = textwrap.dedent(inspect.getsource(made.__init__))
    notes = comments(source)
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    yield f"`[{room}.{found.section}]`, of `{made.__name__}`:\n"
    yield "| key | type | default | |\n| --- | --- | --- | --- |"
    for key, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
        if key.lineno not in notes:
            sys.exit(f"error: {found.path}: {key.arg} has no description; write it as a comment behind the parameter")
        kind = ast.unparse(key.annotation or ast.Name("Any")).removeprefix("Annotated[").partition(", Field(")[0]
        yield f"| `{key.arg}` | `{kind}` | `{default_of(default)}` | {notes[key.lineno]} |"
    yield ""


def lab_figures(room: str, kind: str) -> Iterator[str]:
    """What the lab found of a kind at the first knobs it declares: direction and progress on every process."""
    if room not in LAB:
        return
    kept = json.loads((DOCS / "results" / "lab" / LAB[room]).read_text(encoding="utf-8"))["lines"]
    found = [line for line in map(line_of, kept) if line.kind == kind and line.figures is not None]
    found = [line for line in found if line.estimator == found[0].estimator]
    if not found:
        yield "Not in [the lab's figures](../results/lab.md).\n"
        return
    grids = {"direction": directions(found), "progress": progress(found)}
    columns = grids["progress"].columns[1:]
    rows = tuple((name, *grid.rows[0][1 : 1 + len(columns)]) for name, grid in grids.items())
    title = f"[lab](../results/lab.md), `{found[0].estimator}`"
    yield to_markdown(Grid(title="", columns=(title, *columns), rows=rows, note="")) + "\n"


def plain(text: str) -> str:
    """Text with stars and angle brackets escaped, except between backticks."""
    pieces = text.split("`")
    pieces[::2] = [piece.replace("*", "\\*").replace("<", "&lt;") for piece in pieces[::2]]
    return "`".join(pieces)


def exemptions(declared: list[Declaration]) -> Iterator[str]:
    """Which invariants do not hold for a kind, at which knobs, and why: each reason once."""
    found: dict[tuple[int, str], list[str]] = {}
    for declaration in declared:
        at = ", ".join(f"`{name} = {value!r}`" for name, value in declaration.knobs.items()) or "the defaults"
        for number, why in declaration.exempt.items():
            found.setdefault((number, why), []).append(at)
    for (number, why), where in found.items():
        yield f"- Does not hold that {INVARIANTS[number]} (with {'; '.join(where)}): {why}."
    if found:
        yield ""


def shown(value: object) -> str:
    return getattr(value, "__name__", None) or repr(value)


def commands(command: click.Command, name: str, parent: click.Context | None = None) -> Iterator[str]:
    """The help of a command and of everything below it."""
    context = click.Context(command, info_name=name, parent=parent, terminal_width=100, max_content_width=100)
    yield f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            if found is not None:
                yield from commands(found, below, context)


def pages() -> dict[Path, str]:
    configuration = [
        f"# Configuration\n\n{MADE}\nA recipe is a TOML file with these keys; `section.key=value` on the command line "
        'changes one. `base = "other.toml"` at the top takes from another recipe what this one does not say: tables '
        "are merged key by key, lists and tables of another `kind` replace the whole. "
        "Relative paths in a recipe start at its folder, those on the command line at the current one. A "
        "section with a `kind` takes the knobs of the function that it names, and `kind` may be any "
        '`package.module:name` of your own; without knobs the name alone will do: `sandbox = "bubblewrap"`.\n',
        *sections(),
        "## Kinds\n",
        *kinds(),
    ]
    algorithms = [
        f'# The catalogue\n\n{MADE}\nA recipe names these kinds, `credit.kind = "gigpo"`; their knobs are keys of the '
        "same section. `turnstile conform` tests that each keeps these invariants, and [tests your own functions and "
        "those of other frameworks](howto/conform.md); `turnstile.rewards.check.check_rewards` tests rewards:\n",
        *(f"{number}. {what}" for number, what in INVARIANTS.items()),
        "\nEach page names the invariants that a kind cannot keep. Credit, losses and loss multipliers have a row of "
        "[the lab](results/lab.md): the cosine between their gradient and the exact one (! surely biased, o: it "
        "follows the outcome alone), and the progress of a step of 64 episodes (1: as far as the exact gradient). A "
        "regulariser is compared with the exact gradient of the quantity that it regularises. `+0.1` says how far the "
        "logits have moved since the rollout; for loss multipliers, how far the sampler's differ from the trainer's.\n",
        *(
            f"## [{title}](algorithms/{page}.md)\n\n{links(room, 'algorithms/')}\n"
            for room, (page, title) in ALGORITHMS.items()
        ),
        "## Under other names\n\n| in the literature | here |\n| --- | --- |",
        *(f"| {name} | {here} |" for name, here in ELSEWHERE),
    ]
    reference = [f"# Command line\n\n{MADE}", *commands(cli, "turnstile")]
    return {
        DOCS / "configuration.md": "\n".join(configuration).rstrip() + "\n",
        DOCS / "metrics.md": "\n".join(metrics()).rstrip() + "\n",
        DOCS / "algorithms.md": "\n".join(algorithms).rstrip() + "\n",
        **catalogue(),
        DOCS / "cli.md": "\n".join(reference).rstrip() + "\n",
        TABLE: knob_table(GIVEN),
    }


def metrics() -> Iterator[str]:
    """One table a section: metric, unit, meaning."""
    yield "# Metrics\n\nMade by `make docs` from the code.\n"
    yield (
        "Every number that a training step can log, in `metrics.jsonl`, TensorBoard and the report. Means are over the "
        "step's episodes or trained tokens; a `*` stands for a name that the recipe decides, like a reward term. The "
        "[glossary](glossary.md) explains words.\n"
    )
    for title, table in METRICS.items():
        yield f"## {title}\n\n| metric | unit | meaning |\n| --- | --- | --- |"
        yield from (f"| `{name}` | {unit} | {meaning} |" for name, (unit, meaning) in table.items())
        yield ""


def main() -> int:
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(DOCS.parent)} is not up to date; run: make docs", file=sys.stderr)
        return int(bool(stale))
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(pages()[path], encoding="utf-8")
        print(f"wrote {path.relative_to(DOCS.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
