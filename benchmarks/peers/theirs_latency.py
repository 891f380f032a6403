"""Seconds of a rollout of TRL whose tool sleeps; started by `latency.py` with the Python of `.peers/trl`.

    PYTHONPATH=src:. .peers/trl/bin/python -m benchmarks.peers.theirs_latency SHAPE MODEL SLEEP OUT

The turns are scripted: what is measured is the trainer's own loop of tool calls, and the tool.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer

from benchmarks.peers.game import Shape
from benchmarks.peers.theirs import config

SLEEP = float(sys.argv[3])


def wait(number: int):
    """Wait.

    Args:
        number: How often.
    """
    time.sleep(SLEEP)
    return "done"


class Scripted(GRPOTrainer):
    """Every turn calls the tool."""

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        said = '<tool_call>\n{"name": "wait", "arguments": {"number": 1}}\n</tool_call><|im_end|>'
        ids = self.processing_class.encode(said, add_special_tokens=False)
        return [list(ids) for _ in prompt_ids], None


def main() -> None:
    shape, folder, out = Shape(**json.loads(sys.argv[1])), sys.argv[2], Path(sys.argv[4])
    prompt = [{"role": "user", "content": "Wait."}]
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Scripted(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype="float32"),
            args=config(shape, 0, scratch),
            train_dataset=Dataset.from_list([{"prompt": prompt}] * 8),
            processing_class=AutoTokenizer.from_pretrained(folder),
            tools=[wait],
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
        )
        trainer.max_tool_calling_iterations = shape.rounds
        trainer._sync_tool_dicts = [{"wait": wait}] * shape.episodes
        trainer._async_tool_dicts = [{}] * shape.episodes
        began = time.perf_counter()
        found = trainer._generate([list(prompt) for _ in range(shape.episodes)])
        took = time.perf_counter() - began
    calls = sum(message["role"] == "tool" for episode in found[3] for message in episode)
    assert calls == shape.episodes * shape.rounds, calls
    out.write_text(json.dumps({"seconds": took}), encoding="utf-8")


if __name__ == "__main__":
    main()
