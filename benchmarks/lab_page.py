"""The page of what the lab found, and the plots beside it; `benchmarks/lab.py` measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import lab_game
from turnstile.credit.base import learned_of
from turnstile.evaluation.lab.curves import Race, race_of
from turnstile.evaluation.lab.figures import draw_races, draw_study, draw_sweeps, to_png
from turnstile.evaluation.lab.judge import SIGNIFICANT
from turnstile.evaluation.lab.processes import PROCESSES
from turnstile.evaluation.lab.study import Line, line_of
from turnstile.evaluation.lab.table import Grid, details, directions, learning, number, progress, to_markdown
from turnstile.lookup import resolve

MARK = "<!-- below: written by benchmarks/lab.py -->"
DRAWN = ("rloo", "grpo", "reinforce", "turn_return", "gigpo", "salt", "empg", "per_agent", "reinforce_pp", "gae")
BEST = 3
Body = dict[str, Any]


def whole(text: str, kept: Mapping[str, Body]) -> str:
    """The page `text` with what stands below its mark made anew of what is kept."""
    return f"{text.partition(MARK)[0]}{MARK}\n\n" + "\n\n".join(part for part in page(kept) if part) + "\n"


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
    if {"gradients", "sweeps", "losses", "curves", "hacking"} <= set(kept):
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


def short(kept: Mapping[str, Body]) -> list[str]:
    """What is to be taken from it: each sentence only where the figures bear it out."""
    lines = lines_of(kept["gradients"])
    at = {(line.estimator, line.process, line.seed): line.figures for line in lines if line.figures}
    swept = {(knob, line.estimator, line.size if knob == "size" else line.knobs[knob]): line.figures
             for knob, found in sweeps_of(kept["sweeps"]).items() for line in found if line.figures}  # fmt: skip
    races = {(each.estimator, each.process): each for each in races_of(kept["curves"]) if not each.refused}

    def gain(name: str, process: str) -> float:
        return fmean(f.aligned for (label, where, _), f in at.items() if (label, where) == (name, process))

    found = []
    low, high = swept["size", "grpo", 2], swept["size", "grpo", 16]
    if low.biased and low.bias_scaled > 2 * high.bias_scaled and low.episodes < swept["size", "rloo", 2].episodes:
        found.append(
            "**The policy decides when to stop, small groups.** Dividing by the group's deviation turns the gradient: "
            f"a bias of {low.bias_scaled:.2f} of its length after the best scalar with groups of 2, "
            f"{high.bias_scaled:.2f} with groups of 16. It buys less noise ({low.episodes:.0f} episodes against "
            f"{swept['size', 'rloo', 2].episodes:.0f} of `rloo` with groups of 2), so it is a trade and no mistake."
        )
    index = at["turn_return (scale=none)", "stopping", 0]
    if index.biased and not at["turn_return (scale=none)", "delayed", 0].biased:
        found.append(
            "**Comparing turns at their index** is unbiased up to its length where all attempts are as long, and "
            f"biased where the policy stops itself ({index.bias_scaled:.3f} with groups of 8, "
            f"{swept['size', 'turn_return (scale=none)', 2].bias_scaled:.2f} with groups of 2)."
        )
    early, late, whole_ = (swept["delay", name, delay].episodes for name, delay in
                           (("turn_return (scale=none)", 0), ("turn_return (scale=none)", 5), ("rloo", 0)))  # fmt: skip
    if early < 0.8 * whole_ and late > 0.95 * whole_:
        found.append(
            f"**Rewards that come at once** pay for credit by turn: {early:.1f} episodes against {whole_:.1f} of "
            f"`rloo`. The later they come the less is left of it, and nothing where all comes at the end ({late:.1f})."
        )
    if gain("turn_return", "key_door") > gain("rloo", "key_door") + 0.1:
        found.append(
            "**Chance on the way drowns the outcome** (`key_door`): what gives a turn only what comes after it does "
            f"more with the same episodes, `turn_return` {gain('turn_return', 'key_door'):.2f} against "
            f"{gain('rloo', 'key_door'):.2f} of `rloo`, biased as its direction then is "
            f"({at['turn_return', 'key_door', 0].cosine:.2f})."
        )
    if ("gae", "stopping", 0) in at and not at["gae", "stopping", 0].biased:
        critic, plain = swept["horizon", "gae", 6].episodes, swept["horizon", "rloo", 6].episodes
        found.append(
            "**A critic that is right** keeps the direction and takes most noise off, the more the longer episodes "
            f"are: {critic:.1f} episodes against {plain:.1f} of `rloo` over six turns. The lab's critic is exact; "
            "what a learnt one is worth lies between."
        )
    spread = [gain(name, "lock") for name in ("rloo", "grpo", "turn_return", "salt")]
    if max(spread) - min(spread) < 0.03:
        found.append(
            "**An outcome at the end and nothing else** (`lock`, `walk`): group methods hardly differ "
            f"({min(spread):.2f} to {max(spread):.2f}); the unbiased `rloo` is as good as any."
        )
    learners = [each for each in races.values() if each.process == "two_seat" and each.interval[0] > 0]
    if learners and gain("rloo", "two_seat") == 0:
        names = ", ".join(f"`{each.estimator}` ({each.share:.2f})" for each in learners)
        found.append(
            f"**Two seats of a game whose outcomes cancel**: only {names} learn. What adds the seats up finds no "
            "gradient."
        )
    farmers = [each for each in races.values() if each.process == "misaligned" and each.share > 0.95]
    if farmers:
        names = " and ".join(f"`{each.estimator}` ({each.share:.2f})" for each in farmers)
        found.append(
            "**A step reward that can be farmed** (`misaligned`): areas there say who farms quickest, since farming is "
            f"what is rewarded: {names}. The remedy is the gate, below."
        )
    share, token = (kept["losses"]["weights"][name]["stopping"] for name in ("trajectory", "token"))
    if share["z_direction"] > SIGNIFICANT and token["cosine"] > share["cosine"]:
        found.append(
            "**Sharing a step by trajectory** (the mean over each response) turns the gradient where lengths differ: "
            f"a cosine of {share['cosine']:.2f} on `stopping`, and {token['cosine']:.3f} where tokens count the same."
        )
    if all(all(each["published"]) for each in kept["hacking"]["found"]):
        before, after = kept["hacking"]["found"][0]["outcome"]
        found.append(
            "**Gated accumulation** does what was published: added up directly the total rises and the outcome falls "
            f"({before:.2f} to {after:.2f}); behind the gate both rise."
        )
    return found


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
    return learned_of(resolve("credit", name.partition(" (")[0])) is not None


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
        (
            name,
            *(
                f"{number(figures['cosine'])}{'!' if figures['z_direction'] > SIGNIFICANT else ''}"
                for figures in by.values()
            ),
        )
        for name, by in body["weights"].items()
    ]
    head = ("weights", *next(iter(body["weights"].values())))
    return "\n\n".join(
        [
            "## Losses\n\nWith leave-one-out advantages. `+0.03` and `+0.1`: every logit has moved by so much since "
            "the policy played, and the truth is the gradient where it stands. The bounds of `gspo` are its paper's, "
            "for responses of thousands of tokens whose mean ratio hardly moves: on turns this short they cut nearly "
            "everything. `clip_cov` and `kl_cov` touch a fifth of all tokens here, in their paper one in thousands.",
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
