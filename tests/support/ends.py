"""Where runs of the guessing game ended, compared to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from turnstile.records.codec import encode
from turnstile.records.record import read_record
from turnstile.runs.run_folder import read_results

OF_THE_ENGINE = (
    "tokens/requested",
    "tokens/computed",
    "tokens/saved",
    "tokens/sampled",
    "tokens/recomputed",
    "engine/evicted",
)
"""What a process did itself, which is less where a part was done before."""


def metrics(run: Path, *, engine: bool = True) -> list[dict[str, Any]]:
    """What was logged, but for what clocks said; without `engine` also but for what this process sampled."""
    left_out = {"time", "tokens/per_second", *(() if engine else OF_THE_ENGINE)}
    return [
        {name: value for name, value in json.loads(line).items() if name not in left_out and "seconds/" not in name}
        for line in (run / "metrics.jsonl").read_text().splitlines()
    ]


def numbers(file: Path) -> Any:
    """What is in it; the file itself also shows which strings were one object when it was pickled."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.tolist()
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    return plain(torch.load(file, weights_only=True))


def record(run: Path) -> list[Any]:
    """The recorded episodes, but for what clocks said."""

    def timeless(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: timeless(item) for key, item in value.items() if key not in ("seconds", "times")}
        return [timeless(item) for item in value] if isinstance(value, list) else value

    return [timeless(encode(entry)) for entry in read_record(run)]


def said(run: Path) -> list[str]:
    return [json.loads(line)["message"] for line in (run / "messages.jsonl").read_text().splitlines()]


def same_end(run: Path, undisturbed: Path) -> None:
    """To the last bit: weights, optimiser, everything else in the last checkpoint, records and results."""
    last = Path("checkpoints", max(path.name for path in (undisturbed / "checkpoints").glob("step-*")))
    for file in ("model/model.safetensors", "state.json"):
        assert (run / last / file).read_bytes() == (undisturbed / last / file).read_bytes(), file
    learned = ["learned.pt"] if (undisturbed / last / "learned.pt").exists() else []
    for file in ("optimizer.pt", *learned):
        assert numbers(run / last / file) == numbers(undisturbed / last / file), file
    assert metrics(run, engine=False) == metrics(undisturbed, engine=False)
    assert read_results(run) == read_results(undisturbed)
    assert record(run) == record(undisturbed)
