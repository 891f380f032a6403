"""The lab's page: findings and small tables, with a link to each whole table as CSV; and the plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from benchmarks.research.lab_findings import findings
from benchmarks.research.lab_tables import Body, lines_of, only, plain, races_of, sweeps_of, tables
from turnstile.lab.curves import Race
from turnstile.lab.figures import draw_races, draw_study, draw_sweeps, to_png
from turnstile.lab.processes import PROCESSES
from turnstile.lab.study import Line
from turnstile.lab.table import DETAILS_NOTE, number, to_markdown
from turnstile.lookup import part_of, resolve

MARK = "<!-- below: generated, do not edit -->"
DRAWN = ("rloo", "grpo", "reinforce", "turn_return", "gigpo", "salt", "empg", "per_agent", "reinforce_pp", "gae")
"""Estimators of the plots and of the small tables."""
SWEPT = ("rloo", "grpo", "turn_return (scale=none)", "gae")
LOSSES = ("ppo", "reinforce", "cispo", "gmpo", "gspo", "kl_cov (share=0.2)")
BEST = 3


def whole(text: str, kept: Mapping[str, Body]) -> str:
    """Return the page `text` with everything below its mark made anew from `kept`."""
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
    """Return the parts of the page, in order."""
    grids, parts, noted = tables(kept), [], set()
    if {"gradients", "sweeps", "losses", "factors", "curves", "hacking", "shaping"} <= set(kept):
        parts.append("## In short\n\n" + "\n".join(f"- {line}" for line in findings(kept)))
    if "gradients" in kept and "curves" in kept:
        parts.append(pays(lines_of(kept["gradients"]), races_of(kept["curves"])))
    if "gradients" in kept:
        parts.append(biases(lines_of(kept["gradients"])))
    for title, text, shown, plot, names in SECTIONS:
        found = [name for name in names if name in grids]
        if found:
            grid = grids[found[0]]
            links = ", ".join(f"[{name}.csv](lab/{name}.csv)" for name in found)
            note = grid.note if grid.note not in noted else "Cells read as in the first table of directions."
            noted.add(grid.note)
            parts += [f"## {title}", " ".join(part for part in (text, note) if part)]
            parts.append(to_markdown(only(grid, shown) if shown else grid))
            parts += [f"![](lab/{plot})" if plot else "", f"All rows: {links}."]
    return parts


SECTIONS: tuple[tuple[str, str, Sequence[str], str, tuple[str, ...]], ...] = (
    (
        "Is the direction right?",
        "The table shows ten estimators. The files contain every estimator with every set of parameters.",
        DRAWN,
        "",
        ("direction", "figures"),
    ),
    ("How far does one step get?", "", DRAWN, "progress.png", ("progress",)),
    ("How fast does training learn?", "", DRAWN, "curves.png", ("learning",)),
    (
        "Does a network learn the number game?",
        "",
        (),
        "",
        ("game",),
    ),
    (
        "Groups that branch",
        "Half of the attempts branch from the others, each at a random turn. Such an attempt shares its first turns "
        "with its parent, so a mean that includes the parent is not a valid baseline for these turns. `vine` leaves "
        "the parent out, but it credits a shared turn only once, so late turns have more weight. `train=roots` "
        "credits no branches, except those that started again from the beginning because their parent ended before "
        "the branching turn.",
        (),
        "",
        ("branched_direction", "branched_progress"),
    ),
    (
        "Group size, horizon and delay",
        "Each cell gives the bias after the best rescaling, and the number of episodes with which the noise is as "
        "large as the gradient. The marks ! and o have the same meaning as in the direction table. The group size "
        "is varied on `stopping`, the horizon and the delay on `delayed`. There, estimators that use the outcome "
        "alone (o) have a different objective, so their bias is a distance between objectives. With a delay of 5 "
        "all rewards are paid at the end, and the two objectives agree.",
        SWEPT,
        "sweeps.png",
        ("sweeps_size", "sweeps_horizon", "sweeps_delay", "loss_sweeps_size", "loss_sweeps_horizon"),
    ),
    (
        "Losses",
        "All losses use leave-one-out advantages. In the columns `+0.03` and `+0.1`, every logit has changed by "
        "that amount since the rollout, and the exact gradient is that of the current policy. The clipping bounds "
        "of `gspo` are those of its paper. They are meant for responses of thousands of tokens, whose mean ratio "
        "hardly changes; on turns this short they clip nearly everything. `clip_cov` and `kl_cov` affect a fifth of "
        "all tokens here, but only one in thousands in their paper.",
        LOSSES,
        "losses.png",
        ("losses_direction", "losses_progress"),
    ),
    (
        "Regularisers",
        "The regularised objective of an episode is E[return - coef * sum of the regulariser over its tokens]. Its "
        "gradient has a second term that no per-token loss captures, because a token also changes which states "
        "follow. The table gives the cosine between each regulariser's mean gradient and the sum of both terms. To "
        "include the second term in training, add the divergence to the rewards. The other files compare with the "
        "first term alone. It is the exact gradient of the divergence, the entropy or the distance to the band, "
        "summed over the tokens of the rollout. `value` is trained on returns to go, and its gradient is compared "
        "with that of the distance to the exact value.",
        (),
        "",
        ("regularisers_whole", "regularisers_direction", "regularisers_progress"),
    ),
    (
        "Loss aggregation",
        "Each cell gives the cosine between the plain policy gradient, with one way to weight the tokens of a step, "
        "and the exact gradient. The exact gradient weights tokens as `constant` does.",
        (),
        "",
        ("aggregation",),
    ),
    (
        "Loss multipliers",
        "The sampler's logits differ from the trainer's by `+0.1` or `+0.3`, as they would with another precision "
        "or with older weights. Each cell gives |mean - exact| as a fraction of |exact|, and the number of episodes "
        "with which the noise is as large as the gradient. `tis` and `icepop` correct each token separately and "
        "ignore that earlier tokens changed the states. `mis` over trajectories corrects for this too, as long as "
        "the ratio is below its cap, but its noise grows with the spread of the ratios. `high_entropy_only` does "
        "not correct anything. It trains a fifth of the tokens.",
        (),
        "factors.png",
        ("factors", "factors_direction"),
    ),
    (
        "Gated against direct accumulation",
        "These runs use `misaligned`, whose step reward can be farmed. In the published result, the total rises and "
        "the outcome falls with direct accumulation, and both rise with a gate.",
        (),
        "",
        ("hacking",),
    ),
    (
        "Potential-based shaping",
        "The reward `potential` is added to outcome and step rewards. The potential is the number of correct digits "
        "so far (`lock`), the position (`walk`), or whether the agent has the key (`key_door`). At the highest "
        "level it adds the same amount to every episode. The best policy stays the best, and unbiased estimators "
        "stay unbiased with respect to the gradient of the return without shaping. Behind the gate of the outcome, "
        "only some episodes receive it. On `walk`, which starts with a potential of 2, the best policy is then to "
        "fail. On all three processes, the gradients of the estimators that compare turns change direction. Each "
        "estimator's column gives the length, the cosine (! is significantly biased), and the number of episodes "
        "with which the noise is as large as the gradient.",
        (),
        "",
        ("shaping",),
    ),
)
"""Title, text, the rows shown (all by default), plot, and tables: the first is shown, all are linked."""


def pays(lines: Sequence[Line], races: Sequence[Race]) -> str:
    """By process, the kinds that progress most with 64 episodes at their best knobs, and those that learn fastest."""
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
        leave_one_out = means.get(("rloo", "rloo"), [0.0])
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
                number(fmean(leave_one_out), 2),
                max(critics.values(), default=(0.0, "none"))[1],
                "<br>".join(f"`{each.estimator}` {each.share:.2f}" for each in raced[:BEST]),
                f"{len(level)} of {len(raced)}",
            )
        )
    head = (
        "problem",
        "most progress with 64 episodes",
        "`rloo`",
        "with an exact critic",
        "fastest learners",
        "not significantly slower than the fastest",
    )
    return (
        "## Which method for which problem?\n\nProgress is the mean over three policies (with the lowest and the "
        "highest value), for each kind with its best parameters. Learning is the area under the learning curve "
        "divided by that of the exact gradient. The last column counts the kinds whose 95 % interval overlaps that "
        "of the fastest. Estimators with an exact critic have a separate column, since no real run has an exact "
        "critic.\n\n" + to_markdown(plain("", head, rows))
    )


def has_critic(name: str) -> bool:
    """Whether the estimator of that kind or label uses a critic."""
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
        ("a mean without the attempt's own reward is unbiased", "rloo", "stopping", "length 1, scaled 0"),
        ("a mean with the own reward shortens", "grpo (scale=none)", "stopping", f"length {1 - 1 / size:.3f}"),
        ("dividing by the deviation, rewards of 0 and 1", "grpo", "walk", "scaled 0"),
        ("dividing by the deviation, an easy and a hard task", "grpo", "lock", "scaled above 0"),
        ("dividing by the deviation, other rewards", "grpo", "stopping", "scaled above 0"),
        ("comparing turns at their index, equal lengths", "turn_return (scale=none)", "delayed", "scaled 0"),
        ("comparing turns at their index, the policy stops", "turn_return (scale=none)", "stopping", "scaled above 0"),
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
    head = ("theory", "estimator", "process", "expected", "length", "scaled", "z dir")
    return f"## Known biases\n\n{DETAILS_NOTE}\n\n" + to_markdown(plain("", head, rows))
