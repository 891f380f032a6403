"""What this machine makes of the model without any framework, at the sizes of one case: the rates from which the step
time of `vs_trl.py`'s ceiling follows.

    python -m benchmarks.peers.bare SHAPE MODEL SEED OUT

Decoding and prefilling are a forward pass written by hand (`decode.py`), training is a plain loop over rows of the
length of an episode: forward, cross-entropy of the share of tokens that is learnt, backward; then clipping and AdamW.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks.peers.game import LEARNING_RATE, Shape
from benchmarks.speed.decode import by_hand
from turnstile.models.adapt import choose_trainable
from turnstile.models.load import load_model

PROMPT, TURN, ANSWER = 237, 33, 23  # tokens of the game's parts
DECODED = 24
ROWS_TOKENS = 2048  # trained at once


def main() -> None:
    shape, model, seed, out = Shape(**json.loads(sys.argv[1])), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    torch.manual_seed(seed)
    out.write_text(json.dumps({"rates": rates(shape, model)}), encoding="utf-8")


def rates(shape: Shape, name: str) -> dict[str, float]:
    """Tokens a second of decoding, prefilling and training, and the seconds of an optimiser's step."""
    model: Any = load_model(name)
    decode = by_hand(model, packed=False)
    turns = shape.rounds + 1
    length = PROMPT + turns * TURN + shape.rounds * ANSWER
    halfway = (PROMPT + length) // 2
    last = torch.randint(100, 10_000, (shape.episodes, 1))
    alone = best(lambda: decode(last, 1, after=halfway))
    decoded = best(lambda: decode(last, 1 + DECODED, after=halfway)) - alone
    prompt = torch.randint(100, 10_000, (1, PROMPT))
    prefilled = best(lambda: decode(prompt, 1))
    parameters = choose_trainable(model, shape.train, top_layers=shape.top, lora_rank=shape.lora_rank)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, foreach=True)
    rows = torch.randint(100, 10_000, (max(1, ROWS_TOKENS // length), length))
    learnt = turns * TURN

    def train() -> None:
        hidden = model.get_decoder()(input_ids=rows, use_cache=False).last_hidden_state[:, -learnt:]
        logits = model.get_output_embeddings()(hidden).flatten(0, 1)
        cross_entropy(logits, rows[:, -learnt:].flatten()).backward()

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    trained = best(train)
    return {
        "decode": shape.episodes * DECODED / decoded,
        "prefill": PROMPT / prefilled,
        "train": rows.numel() / trained,
        "optimizer seconds": best(step),
    }


def best(work: Callable[[], None]) -> float:
    """The shorter of two goes after one that warms up."""
    took = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return min(took[1:])


if __name__ == "__main__":
    main()
