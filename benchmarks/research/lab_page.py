"""The page of what the lab found, and the plots beside it; `lab.py` measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from benchmarks.research import lab_game
from benchmarks.research.lab_kept import Body, lines_of, races_of, section, sweeps_of
from benchmarks.research.lab_short import short
from benchmarks.research.lab_tables import (
    factor_tables,
    hacking_table,
    loss_sweep_tables,
    loss_tables,
    shaping_table,
    sweep_tables,
)
from turnstile.lab.curves import Race
from turnstile.lab.figures import draw_races, draw_study, draw_sweeps, to_png
from turnstile.lab.processes import PROCESSES
from turnstile.lab.study import Line
from turnstile.lab.table import Grid, details, directions, learning, number, progress, to_markdown
from turnstile.lookup import part_of, resolve

MARK = "<!-- below: generated, do not edit -->"
DRAWN = ("rloo", "grpo", "reinforce", "turn_return", "gigpo", "salt", "empg", "per_agent", "reinforce_pp", "gae")
BEST = 3


def whole(text: str, kept: Mapping[str, Body]) -> str:
    """The page `text` with what stands below its mark made anew of what is kept."""
    return f"{text.partition(MARK)[0]}{MARK}\n\n" + "\n\n".join(part for part in page(kept) if part) + "\n"


def plots(kept: Mapping[str, Body]) -> dict[str, bytes]:
    found = {}
    if "gradients" in kept:
        found["progress.png"] = to_png(draw_study(lines_of(kept["gradients"])), dpi=100)
    if "sweeps" in kept:
        chosen = {
            knob: [line for line in lines if line.estimator in (*DRAWN, "turn_return (scale=none)")]
            for knob, lines in sweeps_of(kept["sweeps"]).items()
        }
        found["sweeps.png"] = to_png(draw_sweeps(chosen), dpi=100)
    for name in ("losses", "factors"):
        if name in kept:
            found[f"{name}.png"] = to_png(draw_study(lines_of(kept[name])), dpi=80)
    if "curves" in kept:
        races = [each for each in races_of(kept["curves"]) if each.estimator in DRAWN]
        found["curves.png"] = to_png(draw_races(races), dpi=100)
    return found


def page(kept: Mapping[str, Body]) -> list[str]:
    """The parts of the page, in its order."""
    parts: list[str] = []
    if {"gradients", "sweeps", "losses", "factors", "curves", "hacking", "shaping"} <= set(kept):
        parts.append("## In short\n\n" + "\n".join(f"- {line}" for line in short(kept)))
    if "gradients" in kept and "curves" in kept:
        parts.append(pays(lines_of(kept["gradients"]), races_of(kept["curves"])))
    if "gradients" in kept:
        lines = lines_of(kept["gradients"])
        parts += [biases(lines), section(directions(lines)), section(progress(lines)), "![](lab/progress.png)"]
    if "curves" in kept:
        parts += [section(learning(races_of(kept["curves"]))), "![](lab/curves.png)"]
    if "game" in kept:
        parts.append(section(lab_game.table(kept["game"]["runs"])))
    if "branched" in kept:
        lines = lines_of(kept["branched"])
        text = (
            "## Groups that branch\n\nHalf of the attempts branch from the others at a turn drawn for each. An attempt "
            "shares its first turns with its branch, so a mean that holds the branch is no baseline for those. `vine` "
            "has none that does, but gives shared turns their credit once, so late ones weigh more; "
            "`train=roots` gives none to branches, but for those that began anew because their parent had ended before "
            "they could leave it."
        )
        parts += [text, section(directions(lines), 3, note=False), section(progress(lines), 3, note=False)]
    if "sweeps" in kept:
        parts += [sweep_tables(sweeps_of(kept["sweeps"])), "![](lab/sweeps.png)"]
    if "loss_sweeps" in kept:
        parts.append(loss_sweep_tables(kept["loss_sweeps"]))
    if "losses" in kept:
        parts += [loss_tables(kept["losses"])]
    if "factors" in kept:
        parts.append(factor_tables(lines_of(kept["factors"])))
    if "hacking" in kept:
        parts.append(hacking_table(kept["hacking"]["found"]))
    if "shaping" in kept:
        parts.append(shaping_table(kept["shaping"]["found"]))
    if "gradients" in kept:
        lines = lines_of(kept["gradients"])
        parts += ["## Every figure\n\n" + details(lines, next(iter(PROCESSES))).note]
        parts += [section(details(lines, name), 3, note=False) for name in PROCESSES]
    return parts


def pays(lines: Sequence[Line], races: Sequence[Race]) -> str:
    """By process, the kinds that do most with 64 episodes, at their best knobs, and those that learn quickest."""
    rows = []
    for process in PROCESSES:
        means = progress_of(lines, process)
        best: dict[str, tuple[float, str]] = {}
        critics: dict[str, tuple[float, str]] = {}
        for (kind, name), found in means.items():
            among = critics if has_critic(kind) else best
            if fmean(found) > max(0.0, among.get(kind, (0.0, ""))[0]):
                text = f"`{name}` {number(fmean(found), 2)} ({number(min(found), 2)} to {number(max(found), 2)})"
                among[kind] = (fmean(found), text)
        plain = means.get(("rloo", "rloo"), [0.0])
        raced = sorted(
            (
                each
                for each in races
                if each.process == process and each.areas and each.share > 0 and not has_critic(each.estimator)
            ),
            key=lambda each: -each.share,
        )
        level = [each for each in raced if each.interval[1] >= raced[0].interval[0]]
        rows.append(
            (
                process,
                "<br>".join(text for _, text in sorted(best.values(), reverse=True)[:BEST]),
                number(fmean(plain), 2),
                max(critics.values(), default=(0.0, "none"))[1],
                "<br>".join(f"`{each.estimator}` {each.share:.2f}" for each in raced[:BEST]),
                f"{len(level)} of {len(raced)}",
            )
        )
    head = (
        "problem",
        "most progress of 64 episodes",
        "`rloo`",
        "with an exact critic",
        "learn quickest",
        "not told apart from the quickest",
    )
    return (
        "## What pays where\n\nProgress: the mean over three policies, and from the lowest to the highest, of each "
        "kind at its best knobs. Learning: the area under the curve over the exact gradient's; as many kinds as the "
        "last column says have an interval that reaches into the quickest one's. What has an exact critic stands "
        "apart, since no run has one.\n\n" + to_markdown(Grid(title="", columns=head, rows=tuple(rows), note=""))
    )


def has_critic(name: str) -> bool:
    """Whether the estimator of that kind or label takes the word of a critic."""
    return part_of(resolve("credit", name.partition(" (")[0])) is not None


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
