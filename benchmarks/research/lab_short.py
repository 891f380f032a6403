"""What is to be taken from the lab: the first part of its page."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from benchmarks.research.lab_kept import Body, lines_of, races_of, sweeps_of
from turnstile.lab.judge import SIGNIFICANT
from turnstile.lab.study import line_of


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
    whole = {(each["kind"], each["process"]): line_of(each).figures for each in kept["losses"]["whole"]}
    bonus = {process: whole["entropy", process] for process in ("stopping", "walk")}
    if all(f is not None and f.biased and f.cosine < 0.5 for f in bonus.values()):
        told = ", ".join(f"{f.cosine:.2f} on `{process}`" for process, f in bonus.items() if f)
        found.append(
            "**A bonus for each token's entropy** is exact for the tokens that were said, and not for episodes, in "
            f"which a token leads to others with an entropy of their own: a cosine of {told} to the gradient of the "
            "whole episode's. Divergences from a near policy hardly differ in that."
        )
    off = {each["estimator"]: line_of(each).figures for each in kept["factors"]["lines"]
           if each["process"] == "stopping" and each["drift"] == 0.3}  # fmt: skip
    bare, token, whole_ratio = off["no factor"], off["tis"], off["mis"]
    if bare and token and whole_ratio and bare.bias > token.bias > whole_ratio.bias:
        found.append(
            "**A sampler whose logits are off by 0.3** (`stopping`): uncorrected the gradient is off by "
            f"{bare.bias:.2f} of its length, with `tis` by {token.bias:.2f}, with `mis` over trajectories by "
            f"{whole_ratio.bias:.2f}, at {bare.episodes:.0f}, {token.episodes:.0f} and {whole_ratio.episodes:.0f} "
            "episodes."
        )
    gate = {(each["process"], each["shape"]): each for each in kept["shaping"]["found"]}
    free, shut = gate["walk", "potential"], gate["walk", "gated"]
    if free["figures"]["rloo"]["cosine"] > 0.999 and shut["figures"]["rloo"]["cosine"] < -0.999:
        found.append(
            "**Potential-based shaping belongs above every gate**: there it leaves the best policy and the gradient as "
            "they are; behind the outcome's gate it turns the gradient of `walk` straight round."
        )
    if all(all(each["published"]) for each in kept["hacking"]["found"]):
        before, after = kept["hacking"]["found"][0]["outcome"]
        found.append(
            "**Gated accumulation** does what was published: added up directly the total rises and the outcome falls "
            f"({before:.2f} to {after:.2f}); behind the gate both rise."
        )
    return found
