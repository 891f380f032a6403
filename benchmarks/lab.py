"""Which method pays for which problem: everything the lab measures, of every estimator and loss there is.

    python benchmarks/lab.py                     everything, in some minutes on one core
    python benchmarks/lab.py --only curves       one part: gradients, branched, sweeps, losses, curves or hacking
    python benchmarks/lab.py --tables            only writes the page of what is kept

What was measured is kept in docs/results/lab/, which is part of the project; the tables below the mark in
docs/results/lab.md and the plots beside it are made from that.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from turnstile.batching import weights
from turnstile.credit.check import DECLARED
from turnstile.evaluation.lab.curves import Plan, Race, race, race_of
from turnstile.evaluation.lab.figures import draw_races, draw_study, draw_sweeps, to_png
from turnstile.evaluation.lab.hacking import hack
from turnstile.evaluation.lab.losses import every_loss, loss_bench, loss_subject, measure_loss, study_losses
from turnstile.evaluation.lab.processes import PROCESSES, make
from turnstile.evaluation.lab.study import Line, Setting, line_of, study, sweeps
from turnstile.evaluation.lab.subjects import everyone, subject
from turnstile.evaluation.lab.table import Grid, details, directions, learning, number, progress, to_markdown
from turnstile.evaluation.lab.world import list_world
from turnstile.lookup import KINDS

ROOT = Path(__file__).resolve().parent.parent
KEPT, PAGE = Path("docs/results/lab"), Path("docs/results/lab.md")
MARK = "<!-- below: written by benchmarks/lab.py -->"
GROUPS, SEEDS, POLICIES = 512, 5, 3
SWEPT = ("rloo", "grpo", "turn_return", "turn_return (scale=none)", "gigpo", "reinforce_pp", "igpo", "per_agent")
DRAWN = ("rloo", "grpo", "reinforce", "turn_return", "gigpo", "salt", "empg", "per_agent", "reinforce_pp", "igpo")
BRANCHING = ("rloo", "grpo", "branch", "tree", "tree (overall=0.0)")
BEST = 3
Body = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), help="parts to measure")
    parser.add_argument("--tables", action="store_true", help="only write the page of what is kept")
    args = parser.parse_args()
    os.chdir(ROOT)
    KEPT.mkdir(parents=True, exist_ok=True)
    for name, part in PARTS.items():
        if not args.tables and (args.only is None or name in args.only):
            began = time.monotonic()
            body = {**part(), "seconds": round(time.monotonic() - began, 1)}
            (KEPT / f"{name}.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
            print(f"{name}: {body['seconds']} s", flush=True)
    kept = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(KEPT.glob("*.json"))}
    for name, drawn in plots(kept).items():
        (KEPT / name).write_bytes(drawn)
    PAGE.write_text(whole(PAGE.read_text(encoding="utf-8"), kept), encoding="utf-8")


def whole(text: str, kept: Mapping[str, Body]) -> str:
    """The page `text` with what stands below its mark made anew of what is kept."""
    return f"{text.partition(MARK)[0]}{MARK}\n\n" + "\n\n".join(part for part in page(kept) if part) + "\n"


def gradients() -> Body:
    settings = [Setting(process=make(name), groups=GROUPS, seed=seed) for name in PROCESSES for seed in range(POLICIES)]
    return {"lines": [line.to_json() for line in study(everyone(), settings)]}


def branched() -> Body:
    """Estimators that know of branches, and two that do not."""
    subjects = [each for each in everyone() if each.label in BRANCHING]
    settings = [
        Setting(process=make(name), groups=GROUPS, seed=seed, branched=True)
        for name in ("delayed", "lock", "walk")
        for seed in range(POLICIES)
    ]
    return {"lines": [line.to_json() for line in study(subjects, settings)]}


def swept() -> Body:
    subjects = [each for each in everyone() if each.label in SWEPT]
    return {
        "sweeps": {
            knob: [line.to_json() for line in study(subjects, found)] for knob, found in sweeps(groups=GROUPS).items()
        }
    }


def losses() -> Body:
    settings = [Setting(process=make(name), groups=GROUPS // 2) for name in ("stopping", "walk", "key_door")]
    lines = study_losses(every_loss(), settings)
    shares = {
        name: {
            setting.process.name: shown(measure_loss(loss_subject("reinforce"), loss_bench(setting, weights=of)))
            for setting in settings
        }
        for name, of in SHARES.items()
    }
    return {"lines": [line.to_json() for line in lines], "weights": shares}


def shown(figures: Any) -> Body:
    return {name: getattr(figures, name) for name in ("cosine", "bias_scaled", "z_direction", "aligned")}


def curves() -> Body:
    """One set of knobs of each kind, the first that it declares."""
    first = {each.kind: each.knobs for each in reversed(DECLARED)}
    subjects = [subject(kind, first.get(kind)) for kind in KINDS["credit"]]
    worlds = [list_world(make(name)) for name in PROCESSES]
    return {"races": [each.to_json() for each in race(subjects, worlds, Plan(), seeds=SEEDS)]}


def hacked() -> Body:
    world, plan = list_world(make("misaligned")), Plan(steps=150, size=8)
    found = [(kind, each) for kind in ("grpo", "rloo") for each in hack(subject(kind), world, plan, seeds=SEEDS)]
    return {
        "found": [
            {
                "estimator": kind,
                **{name: getattr(each, name) for name in ("composition", "total", "outcome", "published")},
            }
            for kind, each in found
        ]
    }


PARTS: dict[str, Callable[[], Body]] = {
    "gradients": gradients,
    "branched": branched,
    "sweeps": swept,
    "losses": losses,
    "curves": curves,
    "hacking": hacked,
}
SHARES = {
    "constant": lambda rows: weights.constant(rows, divisor=16.0),
    "token": weights.token,
    "turn": weights.turn,
    "trajectory": weights.trajectory,
}


def plots(kept: Mapping[str, Body]) -> dict[str, bytes]:
    found = {}
    if "gradients" in kept:
        found["progress.png"] = to_png(draw_study(lines_of(kept["gradients"])), dpi=100)
    if "sweeps" in kept:
        found["sweeps.png"] = to_png(draw_sweeps(sweeps_of(kept["sweeps"])), dpi=100)
    if "curves" in kept:
        races = [each for each in races_of(kept["curves"]) if each.estimator in DRAWN]
        found["curves.png"] = to_png(draw_races(races), dpi=100)
    return found


def lines_of(body: Body) -> list[Line]:
    return [line_of(each) for each in body["lines"]]


def sweeps_of(body: Body) -> dict[str, list[Line]]:
    return {knob: [line_of(each) for each in found] for knob, found in body["sweeps"].items()}


def races_of(body: Body) -> list[Race]:
    return [race_of(each) for each in body["races"]]


def page(kept: Mapping[str, Body]) -> list[str]:
    """The parts of the page, in its order."""
    parts: list[str] = []
    if "gradients" in kept and "curves" in kept:
        parts.append(pays(lines_of(kept["gradients"]), races_of(kept["curves"])))
    if "gradients" in kept:
        lines = lines_of(kept["gradients"])
        parts += [biases(lines), section(directions(lines)), section(progress(lines)), "![](lab/progress.png)"]
    if "curves" in kept:
        parts += [section(learning(races_of(kept["curves"]))), "![](lab/curves.png)"]
    if "branched" in kept:
        lines = lines_of(kept["branched"])
        text = (
            "## Groups that branch\n\nHalf of the attempts branch from the others at a turn drawn for each. An attempt "
            "shares its first turns with its branch, so a mean that holds the branch is no baseline for those."
        )
        parts += [text, section(directions(lines), 3, note=False), section(progress(lines), 3, note=False)]
    if "sweeps" in kept:
        parts += [sweep_tables(sweeps_of(kept["sweeps"])), "![](lab/sweeps.png)"]
    if "losses" in kept:
        parts += [loss_tables(kept["losses"])]
    if "hacking" in kept:
        parts.append(hacking_table(kept["hacking"]["found"]))
    if "gradients" in kept:
        lines = lines_of(kept["gradients"])
        parts += ["## Every figure\n\n" + details(lines, next(iter(PROCESSES))).note]
        parts += [section(details(lines, name), 3, note=False) for name in PROCESSES]
    return parts


def section(grid: Grid, level: int = 2, *, note: bool = True) -> str:
    return f"{'#' * level} {grid.title}\n\n{grid.note + chr(10) * 2 if note else ''}{to_markdown(grid)}"


def pays(lines: Sequence[Line], races: Sequence[Race]) -> str:
    """By process, the kinds that do most with 64 episodes, at their best knobs, and those that learn quickest."""
    rows = []
    for process in PROCESSES:
        means = progress_of(lines, process)
        best: dict[str, tuple[float, str]] = {}
        for (kind, name), found in means.items():
            if fmean(found) > max(0.0, best.get(kind, (0.0, ""))[0]):
                text = f"`{name}` {number(fmean(found), 2)} ({number(min(found), 2)} to {number(max(found), 2)})"
                best[kind] = (fmean(found), text)
        plain = means.get(("rloo", "rloo"), [0.0])
        raced = sorted(
            (each for each in races if each.process == process and not each.refused and each.share > 0),
            key=lambda each: -each.share,
        )
        level = [each for each in raced if each.interval[1] >= raced[0].interval[0]]
        rows.append(
            (
                process,
                "<br>".join(text for _, text in sorted(best.values(), reverse=True)[:BEST]),
                number(fmean(plain), 2),
                "<br>".join(f"`{each.estimator}` {each.share:.2f}" for each in raced[:BEST]),
                f"{len(level)} of {len(raced)}",
            )
        )
    head = ("problem", "most progress of 64 episodes", "`rloo`", "learn quickest", "not told apart from the quickest")
    return (
        "## What pays where\n\nProgress: the mean over three policies, and from the lowest to the highest, of each "
        "kind at its best knobs. Learning: the area under the curve over the exact gradient's; as many kinds as the "
        "last column says have an interval that reaches into the quickest one's.\n\n"
        + to_markdown(Grid(title="", columns=head, rows=tuple(rows), note=""))
    )


def progress_of(lines: Sequence[Line], process: str) -> dict[tuple[str, str], list[float]]:
    """(kind, label) -> the progress at each policy."""
    found: dict[tuple[str, str], list[float]] = {}
    for line in lines:
        if line.process == process and line.figures is not None:
            found.setdefault((line.kind, line.estimator), []).append(line.figures.aligned)
    return found


def biases(lines: Sequence[Line]) -> str:
    """The biases that theory predicts, as measured."""
    found = {(line.estimator, line.process): line.figures for line in lines if line.seed == 0}
    size = lines[0].size
    claims = (
        ("a mean without the own reward is unbiased", "rloo", "stopping", "length 1, scaled 0"),
        ("a mean that holds the own reward shortens", "grpo (scale=none)", "stopping", f"length {1 - 1 / size:.3f}"),
        ("dividing by the deviation, rewards of 0 and 1", "grpo", "walk", "scaled 0"),
        ("dividing by the deviation, an easy and a hard task", "grpo", "lock", "scaled above 0"),
        ("dividing by the deviation, other rewards", "grpo", "stopping", "scaled above 0"),
        ("turns compared at their index, all as long", "turn_return (scale=none)", "delayed", "scaled 0"),
        ("turns compared at their index, the policy stops", "turn_return (scale=none)", "stopping", "scaled above 0"),
        ("discounting late rewards", "turn_return (gamma=0.9)", "misaligned", "scaled above 0"),
    )
    rows = [
        (
            claim,
            f"`{name}`",
            process,
            wanted,
            number(f.length),
            number(f.bias_scaled),
            number(min(f.z_direction, 99), 1),
        )
        for claim, name, process, wanted in claims
        if (f := found.get((name, process))) is not None
    ]
    head = ("what theory says", "estimator", "process", "expected", "length", "scaled", "z dir")
    return "## Known biases\n\n" + to_markdown(Grid(title="", columns=head, rows=tuple(rows), note=""))


def sweep_tables(found: Mapping[str, Sequence[Line]]) -> str:
    parts = ["## Against group size, horizon and delay\n\nBias after the best scalar, and the episodes that make the "
             "noise as large as the gradient. Size: `stopping`. Horizon and delay: `delayed`."]  # fmt: skip
    for knob, lines in found.items():
        values = list(dict.fromkeys(line.size if knob == "size" else line.knobs[knob] for line in lines))
        rows = []
        for name in dict.fromkeys(line.estimator for line in lines):
            own = {line.size if knob == "size" else line.knobs[knob]: line.figures for line in lines
                   if line.estimator == name}  # fmt: skip
            cells = [f"{number(f.bias_scaled)}{'!' if f.biased else ''}, {number(f.episodes, 1)}" if f else "-"
                     for f in (own.get(value) for value in values)]  # fmt: skip
            rows.append((name, *cells))
        head = (knob, *map(str, values))
        parts.append(to_markdown(Grid(title="", columns=head, rows=tuple(rows), note="")))
    return "\n\n".join(parts)


def loss_tables(body: Body) -> str:
    lines = [line for line in lines_of(body) if line.figures]
    aside = dict.fromkeys(f"`{each['estimator']}`" for each in body["lines"] if each["figures"] is None)
    rows = [
        (name, *(f"{number(figures['cosine'])}{'!' if figures['z_direction'] > 4 else ''}" for figures in by.values()))
        for name, by in body["weights"].items()
    ]
    head = ("weights", *next(iter(body["weights"].values())))
    return "\n\n".join(
        [
            "## Losses\n\nWith leave-one-out advantages. `+0.03` and `+0.1`: every logit has moved by so much since "
            "the policy played, and the truth is the gradient where it stands.",
            section(replace(directions(lines), title="Direction of losses"), 3, note=False),
            section(replace(progress(lines), title="Progress of losses"), 3, note=False),
            f"Not following the advantages, or in want of what the lab has not: {', '.join(aside) or 'none'}.",
            "### Direction of weights\n\nPlain policy gradient with each way of sharing a step among its tokens; "
            "`constant` is what the exact gradient does.",
            to_markdown(Grid(title="", columns=head, rows=tuple(rows), note="")),
        ]
    )


def hacking_table(found: Sequence[Body]) -> str:
    rows = [
        (
            each["estimator"],
            each["composition"],
            "{:.2f} to {:.2f}".format(*each["total"]),
            "{:.2f} to {:.2f}".format(*each["outcome"]),
            f"{sum(each['published'])} of {len(each['published'])}",
        )
        for each in found
    ]
    shown = all(all(each["published"]) for each in found)
    verdict = "appears in every seed" if shown else "does not appear in every seed"
    head = ("estimator", "accumulation", "total", "outcome", "seeds as published")
    return (
        "## Gated against direct accumulation\n\nOn `misaligned`, whose step reward can be farmed. The published "
        f"signature (direct: the total up, the outcome down; gated: both up) {verdict}.\n\n"
        + to_markdown(Grid(title="", columns=head, rows=tuple(rows), note=""))
    )


if __name__ == "__main__":
    main()
