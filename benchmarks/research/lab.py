"""Which method pays for which problem: everything the lab measures, of every estimator and loss there is.

    python -m benchmarks.research.lab                 everything, in about an hour on one core
    python -m benchmarks.research.lab --only curves   one part (--help names them)
    python -m benchmarks.research.lab --add           only estimators that the kept figures and curves lack
    python -m benchmarks.research.lab --tables        only writes the page and its tables

What takes long (gradients, branched, sweeps, curves, game) is kept piece by piece beside the results, in a file that
ends in .partial; a command that was stopped goes on from there.

Measurements are kept as JSON in docs/results/lab/. Every table (as CSV), the plots and the part of docs/results/lab.md
below its mark are made from them.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.research import lab_game
from benchmarks.research.lab_page import plots, whole
from benchmarks.research.lab_tables import UNSWEPT, tables, to_csv
from turnstile.batching import weights
from turnstile.credit.check import DECLARED
from turnstile.lab.curves import Plan, race
from turnstile.lab.hacking import hack
from turnstile.lab.loss_study import every_factor, measure_loss, study_factors, study_losses, study_whole
from turnstile.lab.losses import LossSubject, declared_losses, every_loss, loss_bench, loss_subject
from turnstile.lab.measure import Subject
from turnstile.lab.processes import PROCESSES, make
from turnstile.lab.regularisers import REGULARISERS, VALUE
from turnstile.lab.shaping import study_shapes
from turnstile.lab.study import Line, Setting, study, sweeps
from turnstile.lab.subjects import everyone, subject
from turnstile.lab.world import list_world
from turnstile.lookup import KINDS

ROOT = Path(__file__).resolve().parents[2]
KEPT, PAGE = Path("docs/results/lab"), Path("docs/results/lab.md")
GROUPS, SEEDS, POLICIES = 512, 5, 3
MOVED, OFF = 0.03, 0.3
SWEPT = ("turn_return (scale=none)",)
BRANCHING = ("rloo", "grpo", "branch", "tree", "tree (overall=0.0)", "vine", "vine (train=roots)")
Body = dict[str, Any]


def _one_a_line(body: Body) -> str:
    """A file of lists as JSON, one item a line, so that a change of one figure is a change of one line."""
    parts = (
        f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, items)) + "\n]"
        if isinstance(items, list)
        else f"{json.dumps(name)}: {json.dumps(items)}"
        for name, items in body.items()
    )
    return "{" + ",\n".join(parts) + "}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), help="parts to measure")
    parser.add_argument("--add", action="store_true", help="measure only estimators of which nothing is kept yet")
    parser.add_argument("--tables", action="store_true", help="only write the page, its tables and plots")
    args = parser.parse_args()
    os.chdir(ROOT)
    KEPT.mkdir(parents=True, exist_ok=True)
    for name, part in PARTS.items():
        if not args.tables and (args.only is None or name in args.only):
            began, file = time.monotonic(), KEPT / f"{name}.json"
            if not args.add:
                body = {**part(None), "seconds": round(time.monotonic() - began, 1)}
            elif part in ADDING:
                have = json.loads(file.read_text(encoding="utf-8"))
                body = {**part(have), "seconds": round(have["seconds"] + time.monotonic() - began, 1)}
            else:
                continue
            file.write_text(_one_a_line(body), encoding="utf-8")
            (KEPT / f"{name}.partial").unlink(missing_ok=True)
            print(f"{name}: {body['seconds']} s", flush=True)
    kept = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(KEPT.glob("*.json"))}
    for name, drawn in plots(kept).items():
        (KEPT / name).write_bytes(drawn)
    for name, grid in tables(kept).items():
        (KEPT / f"{name}.csv").write_text(to_csv(grid), encoding="utf-8")
    PAGE.write_text(whole(PAGE.read_text(encoding="utf-8"), kept), encoding="utf-8")


class Kept:
    """What is measured of a part, item by item: what lies in its file from an earlier, unfinished run of the command
    is not measured again."""

    def __init__(self, name: str) -> None:
        self.file = KEPT / f"{name}.partial"
        self.items: list[Body] = json.loads(self.file.read_text("utf-8"))["items"] if self.file.is_file() else []

    def put(self, items: Sequence[Body]) -> None:
        self.items += items
        scratch = self.file.with_suffix(".writing")
        scratch.write_text(_one_a_line({"items": self.items}), encoding="utf-8")
        scratch.replace(self.file)


def gradients(have: Body | None) -> Body:
    settings = [Setting(process=make(name), groups=GROUPS, seed=seed) for name in PROCESSES for seed in range(POLICIES)]
    return {"lines": lines_of("gradients", everyone(), settings, have)}


def lines_of(
    name: str,
    subjects: Sequence[Any],
    settings: Sequence[Setting],
    have: Body | None,
    measured: Callable[[Sequence[Any], Sequence[Setting]], list[Line]] = study,
) -> list[Body]:
    """Every subject in every setting, setting by setting. Those of which `have` or an unfinished run holds lines are
    taken from there, since what else was measured changes no figure."""
    kept = Kept(name)
    known = {_key(line): line for line in [*(have["lines"] if have else []), *kept.items]}
    found = []
    for setting in settings:
        asked = {each.label: _key_of(setting, each) for each in subjects}
        missing = [each for each in subjects if asked[each.label] not in known]
        if missing:
            fresh = [line.to_json() for line in measured(missing, [setting])]
            known |= {_key(line): line for line in fresh}
            kept.put(fresh)
        found += [known[key] for key in asked.values()]
    return found


def _key(line: Body) -> str:
    names = ("estimator", "process", "knobs", "size", "groups", "seed", "branched")
    return json.dumps([line[name] for name in names])


def _key_of(setting: Setting, subject: Subject | LossSubject) -> str:
    process = setting.process
    knobs = dict(process.knobs)
    return json.dumps(
        [subject.label, process.name, knobs, setting.size, setting.groups, setting.seed, setting.branched]
    )


def branched(have: Body | None) -> Body:
    """Estimators that know of branches, and two that do not."""
    subjects = [each for each in everyone() if each.label in BRANCHING]
    settings = [
        Setting(process=make(name), groups=GROUPS, seed=seed, branched=True)
        for name in ("delayed", "lock", "walk")
        for seed in range(POLICIES)
    ]
    return {"lines": lines_of("branched", subjects, settings, have)}


def swept(have: Body | None) -> Body:
    """One set of knobs of each kind that compares independent attempts, and those that the page speaks of."""
    known = {"lines": [line for lines in have["sweeps"].values() for line in lines]} if have else None
    labels = {each.label for each in kinds()} | set(SWEPT)
    subjects = [each for each in everyone() if each.label in labels and each.name not in UNSWEPT]
    lines = {knob: lines_of("sweeps", subjects, found, known) for knob, found in sweeps(groups=GROUPS).items()}
    return {"sweeps": lines}


def loss_swept(_: Body | None) -> Body:
    """Each loss that follows advantages, and each factor, at one distance from the policy that played."""
    first = [declared_losses(kind)[0] for kind in KINDS["loss"] if kind not in {*REGULARISERS, VALUE}]
    weighted = [each for each in every_factor() if not each.knobs]
    found = {}
    for knob, settings in sweeps(groups=GROUPS // 2).items():
        if knob != "delay":
            lines = lines_of("loss_sweeps", first, settings, None, partial(study_losses, drifts=(MOVED,)))
            found[knob] = lines + lines_of("loss_sweeps", weighted, settings, None, partial(study_factors, gaps=(OFF,)))
    return {"sweeps": found, "moved": MOVED, "off": OFF}


def losses(_: Body | None) -> Body:
    settings = [Setting(process=make(name), groups=GROUPS // 2) for name in ("stopping", "walk", "key_door")]
    subjects = every_loss()
    lines, whole_episodes = study_losses(subjects, settings), study_whole(subjects, settings)
    shares = {
        name: {
            setting.process.name: shown(measure_loss(loss_subject("reinforce"), loss_bench(setting, weights=of)))
            for setting in settings
        }
        for name, of in SHARES.items()
    }
    return {
        "lines": [line.to_json() for line in lines],
        "whole": [line.to_json() for line in whole_episodes],
        "weights": shares,
    }


def factors(_: Body | None) -> Body:
    settings = [Setting(process=make(name), groups=GROUPS) for name in ("stopping", "walk", "key_door")]
    return {"lines": [line.to_json() for line in study_factors(every_factor(), settings)]}


def shown(figures: Any) -> Body:
    return {name: getattr(figures, name) for name in ("cosine", "bias_scaled", "z_direction", "aligned")}


def curves(have: Body | None) -> Body:
    """Every estimator on every process, race by race."""
    subjects, kept = kinds(), Kept("curves")
    known = {(each["process"], each["estimator"]): each for each in [*(have["races"] if have else []), *kept.items]}
    for name in PROCESSES:
        missing = [each for each in subjects if (name, each.label) not in known]
        if missing:
            race(missing, [list_world(make(name))], Plan(), seeds=SEEDS, done=lambda found: kept.put([found.to_json()]))
    known |= {(each["process"], each["estimator"]): each for each in kept.items}
    return {"races": [known[name, each.label] for name in PROCESSES for each in subjects]}


def kinds() -> list[Subject]:
    """One set of knobs of each kind, the first that it declares."""
    first = {each.kind: each.knobs for each in reversed(DECLARED)}
    return [subject(kind, first.get(kind)) for kind in KINDS["credit"]]


def game(_: Body | None) -> Body:
    """The number game, run by run."""
    kept = Kept("game")
    return {"runs": lab_game.play_out(kept.items, lambda run: kept.put([run]), seeds=SEEDS)}


def shapes(_: Body | None) -> Body:
    """What potential-based shaping does to estimators by attempt and by turn."""
    subjects = [subject("rloo"), subject("turn_return", {"scale": "none"}), subject("reinforce_pp")]
    return {
        "found": [
            {
                "process": name,
                **{what: getattr(each, what) for what in ("shape", "added", "best")},
                "figures": {
                    label: {**shown(f), "length": f.length, "episodes": f.episodes} for label, f in each.figures
                },
            }
            for name in ("lock", "walk", "key_door")
            for each in study_shapes(list_world(make(name)), subjects, groups=GROUPS)
        ]
    }


def hacked(_: Body | None) -> Body:
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


PARTS: dict[str, Callable[[Body | None], Body]] = {
    "gradients": gradients,
    "branched": branched,
    "sweeps": swept,
    "loss_sweeps": loss_swept,
    "losses": losses,
    "factors": factors,
    "curves": curves,
    "game": game,
    "hacking": hacked,
    "shaping": shapes,
}
"""Each is given its kept results if they are to be added to."""
ADDING = (gradients, branched, swept, curves)
SHARES = {
    "constant": lambda rows: weights.constant(rows, divisor=16.0),
    "token": weights.token,
    "turn": weights.turn,
    "trajectory": weights.trajectory,
}


if __name__ == "__main__":
    main()
