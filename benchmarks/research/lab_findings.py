"""The findings of the lab: the first part of its page."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from benchmarks.research.lab_tables import Body, lines_of, races_of, sweeps_of
from turnstile.lab.judge import SIGNIFICANT
from turnstile.lab.study import line_of


def findings(kept: Mapping[str, Body]) -> list[str]:
    """Return the findings that the figures support."""
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
            "**Small groups, where the policy decides when to stop.** Dividing by the group's standard deviation "
            f"changes the direction of the gradient. The bias is {low.bias_scaled:.2f} of the gradient's length with "
            "groups of 2, and "
            f"{high.bias_scaled:.2f} with groups of 16. It also reduces noise ({low.episodes:.0f} episodes against "
            f"{swept['size', 'rloo', 2].episodes:.0f} of `rloo` with groups of 2), so it is a trade-off."
        )
    index = at["turn_return (scale=none)", "stopping", 0]
    if index.biased and not at["turn_return (scale=none)", "delayed", 0].biased:
        found.append(
            "**Comparing turns at their index** keeps the direction if all attempts have the same length, but is "
            f"biased if the policy decides when to stop ({index.bias_scaled:.3f} with groups of 8, "
            f"{swept['size', 'turn_return (scale=none)', 2].bias_scaled:.2f} with groups of 2)."
        )
    early, late, whole_ = (swept["delay", name, delay].episodes for name, delay in
                           (("turn_return (scale=none)", 0), ("turn_return (scale=none)", 5), ("rloo", 0)))  # fmt: skip
    if early < 0.8 * whole_ and late > 0.95 * whole_:
        found.append(
            f"**Immediate rewards** make turn-level credit worthwhile: {early:.1f} episodes against {whole_:.1f} of "
            "`rloo`. The advantage shrinks with the delay, and vanishes if all rewards come at the end "
            f"({late:.1f})."
        )
    if gain("turn_return", "key_door") > gain("rloo", "key_door") + 0.1:
        found.append(
            "**Random step rewards that drown the outcome** (`key_door`): estimators that credit a turn only with "
            "later rewards make more progress with the same number of episodes (`turn_return` "
            f"{gain('turn_return', 'key_door'):.2f} against {gain('rloo', 'key_door'):.2f} of `rloo`), although "
            f"their direction is biased (cosine {at['turn_return', 'key_door', 0].cosine:.2f})."
        )
    if ("gae", "stopping", 0) in at and not at["gae", "stopping", 0].biased:
        critic, plain = swept["horizon", "gae", 6].episodes, swept["horizon", "rloo", 6].episodes
        found.append(
            "**An exact critic** keeps the direction and removes most of the noise, especially in longer episodes: "
            f"{critic:.1f} episodes against {plain:.1f} of `rloo` over six turns. The gain of a learned critic is "
            "somewhere between the two."
        )
    spread = [gain(name, "lock") for name in ("rloo", "grpo", "turn_return", "salt")]
    if max(spread) - min(spread) < 0.03:
        found.append(
            f"**A reward only at the end** (`lock`, `walk`): group methods hardly differ ({min(spread):.2f} to "
            f"{max(spread):.2f}). The unbiased `rloo` is as good as any of them."
        )
    learners = [each for each in races.values() if each.process == "two_seat" and each.interval[0] > 0]
    if learners and gain("rloo", "two_seat") == 0:
        names = ", ".join(f"`{each.estimator}` ({each.share:.2f})" for each in learners)
        found.append(
            f"**Two players whose outcomes cancel** (`two_seat`): only {names} learn. Estimators that add both "
            "outcomes get a gradient of zero."
        )
    farmers = [each for each in races.values() if each.process == "misaligned" and each.share > 0.95]
    if farmers:
        names = " and ".join(f"`{each.estimator}` ({each.share:.2f})" for each in farmers)
        found.append(
            "**A step reward that can be farmed** (`misaligned`): farming is rewarded in this process, so the area "
            f"under the curve measures how fast an estimator learns to farm: {names}. A gate prevents this (see "
            "below)."
        )
    share, token = (kept["losses"]["weights"][name]["stopping"] for name in ("trajectory", "token"))
    if share["z_direction"] > SIGNIFICANT and token["cosine"] > share["cosine"]:
        found.append(
            "**Loss aggregation by trajectory** (the mean over each response) changes the direction if lengths "
            f"differ. The cosine is {share['cosine']:.2f} on `stopping`, against {token['cosine']:.3f} if all tokens "
            "have equal weight."
        )
    whole = {(each["kind"], each["process"]): line_of(each).figures for each in kept["losses"]["whole"]}
    bonus = {process: whole["entropy", process] for process in ("stopping", "walk")}
    if all(f is not None and f.biased and f.cosine < 0.5 for f in bonus.values()):
        cosines = ", ".join(f"{f.cosine:.2f} on `{process}`" for process, f in bonus.items() if f)
        found.append(
            "**An entropy bonus on each token** has the exact gradient of these tokens' entropy, but not of the "
            "episode's entropy, since a token also changes which states follow. Its cosine with the latter is "
            f"{cosines}. For divergences from a similar policy the two gradients hardly differ."
        )
    off = {each["estimator"]: line_of(each).figures for each in kept["factors"]["lines"]
           if each["process"] == "stopping" and each["drift"] == 0.3}  # fmt: skip
    bare, token, whole_ratio = off["no factor"], off["tis"], off["mis"]
    if bare and token and whole_ratio and bare.bias > token.bias > whole_ratio.bias:
        found.append(
            "**A sampler whose logits differ by 0.3** (`stopping`): without correction, the bias is "
            f"{bare.bias:.2f} of the gradient's length. It is {token.bias:.2f} with `tis` and {whole_ratio.bias:.2f} "
            "with `mis` over trajectories. The respective numbers of episodes with which the noise is as large as "
            "the "
            f"gradient are {bare.episodes:.0f}, "
            f"{token.episodes:.0f} and {whole_ratio.episodes:.0f}."
        )
    gate = {(each["process"], each["shape"]): each for each in kept["shaping"]["found"]}
    free, shut = gate["walk", "potential"], gate["walk", "gated"]
    if free["figures"]["rloo"]["cosine"] > 0.999 and shut["figures"]["rloo"]["cosine"] < -0.999:
        found.append(
            "**Potential-based shaping belongs above every gate.** There it changes neither the best policy nor the "
            "gradient. Behind the outcome's gate, it reverses the gradient of `walk`."
        )
    if all(all(each["published"]) for each in kept["hacking"]["found"]):
        before, after = kept["hacking"]["found"][0]["outcome"]
        found.append(
            "**Gated accumulation** behaves as published. With direct accumulation, the total rises and the outcome "
            f"falls ({before:.2f} to {after:.2f}). With the gate, both rise."
        )
    return found
