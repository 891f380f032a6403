"""Tables of the lab's page: sweeps, losses, factors, accumulation and shaping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.research.lab_kept import UNSWEPT, Body, lines_of, section, sweeps_of
from turnstile.lab.judge import SIGNIFICANT, Figures
from turnstile.lab.regularisers import REGULARISERS, VALUE
from turnstile.lab.study import Line, line_of
from turnstile.lab.table import Grid, directions, mark, number, progress, to_markdown

SWEEPS_NOTE = (
    "Bias after the best scalar, and the episodes that make the noise as large as the gradient; ! and o as under "
    "Direction. Size: `stopping`. Horizon and delay: `delayed`. Each kind at the first knobs that it declares, but "
    f"{', '.join(f'`{kind}`' for kind in UNSWEPT)}: in attempts that do not branch from one another there is nothing "
    "for these to compare. What follows the outcome alone (o) has an objective of its own on both processes, so its "
    "bias there is a distance between objectives; where everything is paid at the end (delay 5) the two are one."
)
LOSS_SWEEPS_NOTE = (
    "With leave-one-out advantages; losses where every logit has moved by {moved:g} since the policy played, factors "
    "where those of the sampler are off the trainer's by {off:g}. A delay changes nothing here: such advantages are of "
    "whole attempts. Regularisers and `value` have no group to depend on."
)


def sweep_tables(found: Mapping[str, Sequence[Line]]) -> str:
    return "\n\n".join(["## Against group size, horizon and delay", SWEEPS_NOTE, *sweep_grids(found)])


def loss_sweep_tables(body: Body) -> str:
    note = LOSS_SWEEPS_NOTE.format(moved=body["moved"], off=body["off"])
    return "\n\n".join(["### Losses and factors against group size and horizon", note, *sweep_grids(sweeps_of(body))])


def sweep_grids(found: Mapping[str, Sequence[Line]]) -> list[str]:
    parts = []
    for knob, lines in found.items():
        values = list(dict.fromkeys(line.size if knob == "size" else line.knobs[knob] for line in lines))
        rows = []
        for name in dict.fromkeys(line.estimator for line in lines):
            own = {line.size if knob == "size" else line.knobs[knob]: line.figures for line in lines
                   if line.estimator == name}  # fmt: skip
            rows.append((name, *(swept_cell(own.get(value)) for value in values)))
        head = (knob, *map(str, values))
        parts.append(to_markdown(Grid(title="", columns=head, rows=tuple(rows), note="")))
    return parts


def swept_cell(f: Figures | None) -> str:
    """Its bias with the mark of its direction, and its noise."""
    return f"{number(f.bias_scaled)}{mark([f])}, {number(f.episodes, 1)}" if f else "-"


def loss_tables(body: Body) -> str:
    every = lines_of(body)
    aside = [line for line in every if line.kind in {*REGULARISERS, VALUE}]
    lines = [line for line in every if line not in aside]
    whole_episodes = [line_of(each) for each in body["whole"]]
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
            "![](lab/losses.png)",
            "### Regularisers and the value loss\n\nWhat follows no advantage, against the exact gradient of what it "
            "regularises (the divergence, the entropy, the distance to the band), summed over the tokens that the "
            "policy came by when it played: a uniform reference, a teacher one step along the gradient, feedback under "
            "which another policy speaks, and a past entropy of four fifths. `value` learns from returns to go, and "
            "its truth is the distance to the exact value.",
            section(replace(directions(aside), title="Direction of regularisers"), 4, note=False),
            section(replace(progress(aside), title="Progress of regularisers"), 4, note=False),
            "#### Against whole episodes\n\nThe regularised objective of an episode, E[return - coef * sum of the "
            "regulariser over its tokens], has a second part that no loss of tokens has: a token answers for the "
            "states it leads to. The cosine of each regulariser's mean to both parts together; to have the second, "
            "put the divergence among the rewards.",
            to_markdown(directions(whole_episodes)),
            "### Direction of weights\n\nPlain policy gradient with each way of sharing a step among its tokens; "
            "`constant` is what the exact gradient does.",
            to_markdown(Grid(title="", columns=head, rows=tuple(rows), note="")),
        ]
    )


def factor_tables(lines: Sequence[Line]) -> str:
    """What each factor does to bias and noise where the sampler is off the trainer."""
    found = {(line.estimator, line.column): line.figures for line in lines}
    columns = tuple(dict.fromkeys(line.column for line in lines))

    def cell(name: str, column: str) -> str:
        f = found.get((name, column))
        return f"{number(f.bias)}, {number(f.episodes, 1)}" if f else "-"

    rows = [(name, *(cell(name, column) for column in columns)) for name in dict.fromkeys(x.estimator for x in lines)]
    return "\n\n".join(
        [
            "## Factors\n\nPlain policy gradient with leave-one-out advantages of episodes that a sampler played "
            "whose logits are off the trainer's by `+0.1` or `+0.3`, as an engine of another precision or older "
            "weights is; the truth is the gradient of the trainer's policy. `tis` and `icepop` correct token by token, "
            "which leaves out that earlier tokens led to other states; `mis` over trajectories corrects for that too, "
            "for those whose ratio is below its cap, and is the noisier the more the ratios spread. "
            "`high_entropy_only` corrects nothing: a fifth of the tokens learns.",
            section(replace(directions(lines), title="Direction with factors"), 3, note=False),
            "### Bias and noise with factors\n\n|mean - exact| as a share of |exact|, and the episodes that make the "
            "noise as large as the gradient.",
            to_markdown(Grid(title="", columns=("factor", *columns), rows=tuple(rows), note="")),
            "![](lab/factors.png)",
        ]
    )


SHAPES = {
    "none": "none",
    "potential": "at the highest level",
    "gated": "behind the outcome's gate",
}


def shaping_table(found: Sequence[Body]) -> str:
    labels = list(found[0]["figures"])
    rows = []
    for each in found:
        low, high = each["added"]
        cells = [f"{f['length']:.2f}, {shaped_cosine(f)}, {f['episodes']:.1f}" for f in each["figures"].values()]
        span = number(low, 2) if low == high else f"{number(low, 2)} to {number(high, 2)}"
        rows.append((each["process"], SHAPES[each["shape"]], span, number(each["best"], 2), *cells))
    head = ("process", "potential", "adds to an episode", "best policy comes to", *labels)
    return (
        "## Potential-based shaping\n\nThe reward `potential` beside outcome and step rewards (`lock`: right digits so "
        "far; `walk`: the place; `key_door`: having the key). At the highest level it adds the same to every episode: "
        "the best policy stays, and every estimator that was unbiased still is, against the gradient of the return "
        "without it. Behind the gate of the outcome it is paid for some episodes alone: on `walk`, which begins with a "
        "potential of 2, the best policy is then to fail, and on all three what compares turns is turned. The policy "
        "that is best with the reward is judged without it. Of each estimator length, cosine (! surely biased) and the "
        "episodes that make the noise as large as the gradient.\n\n"
        + to_markdown(Grid(title="", columns=head, rows=tuple(rows), note=""))
    )


def shaped_cosine(f: Body) -> str:
    return f"{number(f['cosine'])}{'!' if f['z_direction'] > SIGNIFICANT or f['length'] < 0 else ''}"


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
