"""Values of a peer's function beside ours, on the same made-up attempts in float64."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.peers.functions import HORIZON, Case
from turnstile.conform.padded import PaddedEstimator, roles
from turnstile.conform.padded_losses import Rows, pad_rows, sample_rows, slopes
from turnstile.credit.samples import sample_group, sample_score, sample_values
from turnstile.credit.stats import F64
from turnstile.lookup import resolve
from turnstile.losses.check import sample_batch, select
from turnstile.types import Score, Trajectory


def gap(case: Case, *, under: tuple[str, ...] = (), seed: int = 0) -> float:
    """The largest difference between a peer's values and ours: of advantages, or of a loss's gradient by any token,
    then relative to the largest. `under`: conditions, see `UNDER`."""
    wanted = roles(case.function)
    if "rewards" in wanted.values():
        theirs, ours = advantages(case, under, seed)
        unit = 1.0
    else:
        theirs, ours = of_loss(case, wanted, under, seed)
        unit = float(np.abs(theirs).max())
    if "factor" in under:
        ours = ours * float(theirs @ ours) / float(ours @ ours)
    return float(np.abs(ours - theirs).max()) / unit


def advantages(case: Case, under: tuple[str, ...], seed: int) -> tuple[F64, F64]:
    """The peer's advantages and ours, of every token one after the other."""
    rng = np.random.default_rng(seed)
    lengths = ((1, 1, 1, 1),) * 2 if "one_turn" in under else ((3, 2, 4, 3), (2, 3, 3, 4))
    groups = [sample_group(rng, f"g{g}", turns) for g, turns in enumerate(lengths)]
    if "one_turn" in under:
        groups = [replace(g, trajectories=tuple(_unanswered(t) for t in g.trajectories)) for g in groups]
    step = 0.0 if "outcome_only" in under else 1.0

    def score(turns: int) -> Score:
        return sample_score(float(rng.normal()), (step * rng.normal(size=turns)).astype(np.float32))

    scores = [[score(len(t.turns)) for t in group.trajectories] for group in groups]
    aux = {"values": sample_values(groups)}
    theirs = PaddedEstimator(case.function, dtype=torch.float64)(groups, scores, aux)
    ours, _ = resolve("credit", case.ours)(groups, scores, aux, {}, **case.knobs)
    return _flat(theirs), _flat(ours)


def _unanswered(trajectory: Trajectory) -> Trajectory:
    """The attempt without what was observed after its last action."""
    (turn,) = trajectory.turns
    return replace(trajectory, turns=(replace(turn, observation=()),), parent=None)


def _flat(found: Sequence[Sequence[Any]]) -> F64:
    return np.concatenate([values for turns in found for values in turns]).astype(np.float64)


def of_loss(case: Case, wanted: Mapping[str, str], under: tuple[str, ...], seed: int) -> tuple[F64, F64]:
    """The gradient of the peer's loss and of ours by every token, or the loss of every token ("value")."""
    rows = sample_rows(seed)
    arrays = dict(rows.arrays)
    if "on_policy" in under:
        arrays["old"] = arrays["logprobs"]
    if "one_advantage" in under:
        arrays["advantages"] = [[np.full_like(turn, row[0][0]) for turn in row] for row in arrays["advantages"]]
    rows = replace(rows, arrays=arrays)
    by = "logprobs" if "logprobs" in wanted.values() else "predictions"
    if "value" in under:
        laid, places = pad_rows(rows)
        loss = case.function(**{name: laid[role] for name, role in wanted.items()})
        theirs = [[loss[r, begin:end] for begin, end in turns] for r, turns in enumerate(places)]
        return _flat(theirs), our_loss(case, rows, by)[0]
    return _flat(slopes(case.function, wanted, by, rows).actions), our_loss(case, rows, by)[1]


def our_loss(case: Case, rows: Rows, by: str) -> tuple[F64, F64]:
    """Our loss of the same tokens, and the gradient of sum(weights * loss), both f64[N]."""
    flat = {name: torch.from_numpy(_flat(values)) for name, values in rows.arrays.items()}
    lengths = [sum(turns) for turns in rows.shape]
    count = sum(lengths)
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    shares = {
        "token": torch.full((count,), 1 / count, dtype=torch.float64),
        "row": torch.tensor([1 / (len(lengths) * lengths[r]) for r in row], dtype=torch.float64),
        "constant": torch.full((count,), 1 / (len(lengths) * HORIZON), dtype=torch.float64),
        "sum": torch.ones(count, dtype=torch.float64),
    }
    whole, _ = sample_batch()
    batch = replace(
        select(whole, torch.zeros(count, dtype=torch.int64)),
        row=row, trajectory=row, group=row // 2, attempt=row % 2,
        turn=torch.tensor([k for turns in rows.shape for k, n in enumerate(turns) for _ in range(n)]),
        logprobs=flat["old"], advantages=flat["advantages"], weights=shares[case.weights],
        extras={"ref_logprobs": flat["reference"], "values": flat["values"], "returns": flat["returns"]},
    )  # fmt: skip
    leaf = flat[by].clone().requires_grad_()
    loss, _ = functools.partial(resolve("loss", case.ours), **case.knobs)(leaf, batch)
    (found,) = torch.autograd.grad((loss * batch.weights).sum(), leaf)
    return loss.detach().numpy(), found.numpy()
