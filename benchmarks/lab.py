"""Which method pays for which problem: everything the lab measures, of every estimator and loss there is.

    python benchmarks/lab.py                     everything, in half an hour on one core
    python benchmarks/lab.py --only curves       one part: gradients, branched, sweeps, losses, curves, game or hacking
    python benchmarks/lab.py --only game         goes on with the runs that are missing, twelve seconds each
    python benchmarks/lab.py --tables            only writes the page of what is kept

What was measured is kept in docs/results/lab/, which is part of the project; the tables below the mark in
docs/results/lab.md and the plots beside it are made from that.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lab_game
from lab_page import plots, whole
from turnstile.batching import weights
from turnstile.credit.check import DECLARED
from turnstile.evaluation.lab.curves import Plan, race
from turnstile.evaluation.lab.hacking import hack
from turnstile.evaluation.lab.losses import every_loss, loss_bench, loss_subject, measure_loss, study_losses
from turnstile.evaluation.lab.processes import PROCESSES, make
from turnstile.evaluation.lab.study import Setting, study, sweeps
from turnstile.evaluation.lab.subjects import everyone, subject
from turnstile.evaluation.lab.world import list_world
from turnstile.lookup import KINDS

ROOT = Path(__file__).resolve().parent.parent
KEPT, PAGE = Path("docs/results/lab"), Path("docs/results/lab.md")
GROUPS, SEEDS, POLICIES = 512, 5, 3
SWEPT = ("rloo", "grpo", "turn_return", "turn_return (scale=none)", "gigpo", "reinforce_pp", "gae", "per_agent")
BRANCHING = ("rloo", "grpo", "branch", "tree", "tree (overall=0.0)")
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
    parser.add_argument("--tables", action="store_true", help="only write the page of what is kept")
    args = parser.parse_args()
    os.chdir(ROOT)
    KEPT.mkdir(parents=True, exist_ok=True)
    for name, part in PARTS.items():
        if not args.tables and (args.only is None or name in args.only):
            began = time.monotonic()
            body = {**part(), "seconds": round(time.monotonic() - began, 1)}
            (KEPT / f"{name}.json").write_text(_one_a_line(body), encoding="utf-8")
            print(f"{name}: {body['seconds']} s", flush=True)
    kept = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(KEPT.glob("*.json"))}
    for name, drawn in plots(kept).items():
        (KEPT / name).write_bytes(drawn)
    PAGE.write_text(whole(PAGE.read_text(encoding="utf-8"), kept), encoding="utf-8")


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


def game(have: Body | None = None) -> Body:
    """The number game, run by run; those that are kept are not run again."""
    file = KEPT / "game.json"
    runs = json.loads(file.read_text(encoding="utf-8"))["runs"] if file.is_file() else []

    def keep(runs: list[Body]) -> None:
        file.write_text(_one_a_line({"runs": runs}), encoding="utf-8")

    return {"runs": lab_game.play_out(runs, keep, seeds=SEEDS)}


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
    "game": game,
    "hacking": hacked,
}
SHARES = {
    "constant": lambda rows: weights.constant(rows, divisor=16.0),
    "token": weights.token,
    "turn": weights.turn,
    "trajectory": weights.trajectory,
}


if __name__ == "__main__":
    main()
