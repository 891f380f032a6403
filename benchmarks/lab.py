"""Which method pays for which problem: everything the lab measures, of every estimator and loss there is.

    python benchmarks/lab.py                     everything, in half an hour on one core
    python benchmarks/lab.py --only curves       one part: gradients, branched, sweeps, losses, curves, game or hacking
    python benchmarks/lab.py --only game         goes on with the runs that are missing, twelve seconds each
    python benchmarks/lab.py --add               only estimators that the kept gradients, branches and curves lack
    python benchmarks/lab.py --tables            only writes the page of what is kept

What was measured is kept in docs/results/lab/, which is part of the project; the tables below the mark in
docs/results/lab.md and the plots beside it are made from that.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lab_game
from lab_page import plots, whole
from turnstile.batching import weights
from turnstile.credit.check import DECLARED
from turnstile.evaluation.lab.curves import Plan, race
from turnstile.evaluation.lab.hacking import hack
from turnstile.evaluation.lab.losses import every_loss, loss_bench, loss_subject, measure_loss, study_losses
from turnstile.evaluation.lab.measure import Subject
from turnstile.evaluation.lab.processes import PROCESSES, make
from turnstile.evaluation.lab.study import Setting, study, sweeps
from turnstile.evaluation.lab.subjects import everyone, subject
from turnstile.evaluation.lab.world import list_world
from turnstile.lookup import KINDS

ROOT = Path(__file__).resolve().parent.parent
KEPT, PAGE = Path("docs/results/lab"), Path("docs/results/lab.md")
GROUPS, SEEDS, POLICIES = 512, 5, 3
SWEPT = ("rloo", "grpo", "turn_return", "turn_return (scale=none)", "gigpo", "reinforce_pp", "gae", "per_agent")
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
    parser.add_argument("--tables", action="store_true", help="only write the page of what is kept")
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
            print(f"{name}: {body['seconds']} s", flush=True)
    kept = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(KEPT.glob("*.json"))}
    for name, drawn in plots(kept).items():
        (KEPT / name).write_bytes(drawn)
    PAGE.write_text(whole(PAGE.read_text(encoding="utf-8"), kept), encoding="utf-8")


def gradients(have: Body | None) -> Body:
    settings = [Setting(process=make(name), groups=GROUPS, seed=seed) for name in PROCESSES for seed in range(POLICIES)]
    return {"lines": lines_of(everyone(), settings, have)}


def lines_of(subjects: Sequence[Subject], settings: Sequence[Setting], have: Body | None) -> list[Body]:
    """Every subject in every setting, setting by setting; those of which `have` holds lines are taken from there, since
    what else was measured changes no figure."""
    kept = [] if have is None else [line for line in have["lines"] if line["estimator"] in {s.label for s in subjects}]
    known = {line["estimator"] for line in kept}
    fresh = [line.to_json() for line in study([each for each in subjects if each.label not in known], settings)]
    settled = {(setting.process.name, setting.seed): place for place, setting in enumerate(settings)}
    order = {each.label: place for place, each in enumerate(subjects)}
    return sorted(kept + fresh, key=lambda line: (settled[line["process"], line["seed"]], order[line["estimator"]]))


def branched(have: Body | None) -> Body:
    """Estimators that know of branches, and two that do not."""
    subjects = [each for each in everyone() if each.label in BRANCHING]
    settings = [
        Setting(process=make(name), groups=GROUPS, seed=seed, branched=True)
        for name in ("delayed", "lock", "walk")
        for seed in range(POLICIES)
    ]
    return {"lines": lines_of(subjects, settings, have)}


def swept(_: Body | None) -> Body:
    subjects = [each for each in everyone() if each.label in SWEPT]
    return {
        "sweeps": {
            knob: [line.to_json() for line in study(subjects, found)] for knob, found in sweeps(groups=GROUPS).items()
        }
    }


def losses(_: Body | None) -> Body:
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


def curves(have: Body | None) -> Body:
    """One set of knobs of each kind, the first that it declares."""
    first = {each.kind: each.knobs for each in reversed(DECLARED)}
    subjects = [subject(kind, first.get(kind)) for kind in KINDS["credit"]]
    order = {each.label: place for place, each in enumerate(subjects)}
    kept = [] if have is None else [each for each in have["races"] if each["estimator"] in order]
    known = {each["estimator"] for each in kept}
    worlds = [list_world(make(name)) for name in PROCESSES]
    fresh = race([each for each in subjects if each.label not in known], worlds, Plan(), seeds=SEEDS)
    races = kept + [each.to_json() for each in fresh]
    processes = list(PROCESSES)
    return {"races": sorted(races, key=lambda each: (processes.index(each["process"]), order[each["estimator"]]))}


def game(_: Body | None) -> Body:
    """The number game, run by run; those that are kept are not run again."""
    file = KEPT / "game.json"
    runs = json.loads(file.read_text(encoding="utf-8"))["runs"] if file.is_file() else []

    def keep(runs: list[Body]) -> None:
        file.write_text(_one_a_line({"runs": runs}), encoding="utf-8")

    return {"runs": lab_game.play_out(runs, keep, seeds=SEEDS)}


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
    "losses": losses,
    "curves": curves,
    "game": game,
    "hacking": hacked,
}
"""Each is given what is kept of it where that is to be added to."""
ADDING = (gradients, branched, curves)
SHARES = {
    "constant": lambda rows: weights.constant(rows, divisor=16.0),
    "token": weights.token,
    "turn": weights.turn,
    "trajectory": weights.trajectory,
}


if __name__ == "__main__":
    main()
