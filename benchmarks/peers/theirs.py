"""One measured step of TRL's GRPOTrainer at the game of `game.py`: a process of its own, started by `vs_trl.py` with
the Python of `.peers/trl` and Turnstile's sources on its path, of which it takes the game alone.

    PYTHONPATH=src:. .peers/trl/bin/python -m benchmarks.peers.theirs SHAPE MODEL SEED OUT

The first step, of one turn, warms up; the second is the one that counts. If that would take minutes, a generation and a
training pass over one batch warm up. Its settings are the fastest that it has here: float32, no gradient checkpointing,
no second forward pass for log-probabilities of before, no reference model.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peers.game import (
    ATTEMPTS,
    LEARNING_RATE,
    TEMPERATURE,
    TURN_TOKENS,
    WARM_UP_ROUNDS,
    Game,
    Shape,
    at_once,
)
from turnstile.envs.guess import guess_tasks
from turnstile.tasks.demonstration import call

ENDLESS = 10**6  # what ends an episode here is the trainer


class Clock:
    """Seconds by phase and counts of one step; phases may lie inside one another."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - began

    def forget(self) -> None:
        self.seconds.clear()
        self.counts.clear()


CLOCK = Clock()


class Environment:
    """The game as TRL takes an environment: its public methods are the tools."""

    def __init__(self) -> None:
        self._game = Game(rounds=ENDLESS)

    def reset(self, place: int, **_: Any) -> None:
        with CLOCK.timed("environment"):
            at_once(self._game.reset(TASKS[place]))

    def guess(self, number: int):
        """Guess a number from 100000 to 999999.

        Args:
            number: The number.
        """
        with CLOCK.timed("environment"):
            step = at_once(self._game.step(call("guess", number=number)))
            return step.messages[0].content

    def get_reward(self) -> float:
        return self._game.worth


class Trainer(GRPOTrainer):
    """The trainer as it is, with a watch on its phases."""

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        with CLOCK.timed("generate"):
            found = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        new = sum(len(ids) for ids in found[0])
        CLOCK.counts["turns"] += len(prompt_ids)
        CLOCK.counts["new tokens"] += new
        CLOCK.counts["computed tokens"] += new + sum(len(ids) for ids in prompt_ids)
        return found

    def _generate(self, prompts: Any) -> Any:
        with CLOCK.timed("rollout"):
            found = super()._generate(prompts)
        CLOCK.counts["episodes"] += len(prompts)
        CLOCK.counts["rows tokens"] += sum(len(ids) for part in found[:2] for ids in part)
        CLOCK.counts["prompt tokens"] = len(found[0][0])
        return found

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        with CLOCK.timed("generate and score"):
            found = super()._generate_and_score_completions(inputs)
        worth = found["advantages"].view(-1, ATTEMPTS)
        CLOCK.counts["flat groups"] += int((worth == 0).all(dim=1).sum())
        return found

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with CLOCK.timed("training step"):
            found = super().training_step(*args, **kwargs)
        self.on_step_end = time.perf_counter()
        return found


class Steps(TrainerCallback):
    """Times whole steps from the end of one to the end of the next, and lengthens the game after the warm-up."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.ended = 0.0
        self.report: dict[str, Any] = {}
        self.trainer: Trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            self.ended = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = time.perf_counter()
        if state.global_step < state.max_steps:
            self.trainer.max_tool_calling_iterations = self.shape.rounds
        else:
            self.report = self._report(now)
        CLOCK.forget()
        self.ended = time.perf_counter()

    def _report(self, now: float) -> dict[str, Any]:
        took = CLOCK.seconds
        optimizer = now - self.trainer.on_step_end  # clipping and the step itself, behind the last backward pass
        seconds = {
            "step": now - self.ended,
            "rollout": took["rollout"],
            "generate": took["generate"],
            "environment": took["environment"],
            "train": took["training step"] - took["generate and score"] + optimizer,
        }
        seconds["rest"] = seconds["step"] - seconds["generate"] - seconds["environment"] - seconds["train"]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        counts = {name: CLOCK.counts[name] for name in COUNTS}
        return {"seconds": seconds, **counts, "trained tokens": counts["rows tokens"], "peak MB": peak}


COUNTS = ("episodes", "turns", "prompt tokens", "new tokens", "computed tokens", "rows tokens", "flat groups")
TASKS = guess_tasks(64)


def main() -> None:
    shape, folder, seed, out = Shape(**json.loads(sys.argv[1])), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    TASKS[:] = guess_tasks(64, seed=seed)
    start = at_once(Game(rounds=1).reset(TASKS[0])).messages[0]
    rows = [{"prompt": [{"role": start.role, "content": start.content}], "place": i} for i in range(len(TASKS))]
    steps = Steps(shape)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(
            model=network(shape, folder),
            args=config(shape, seed, scratch),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(folder),
            environment_factory=Environment,
            callbacks=[steps],
            **adapters(shape),
        )
        steps.trainer = trainer
        if shape.long:
            warm_up(trainer.model, min(shape.rows, shape.episodes))
            trainer.max_tool_calling_iterations = shape.rounds
        trainer.train()
    out.write_text(json.dumps(steps.report), encoding="utf-8")


def warm_up(model: Any, rows: int) -> None:
    """What a first step makes slower: memory that is not there yet, kernels that are chosen."""
    ids = torch.randint(100, 10_000, (rows, 512))
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=True, pad_token_id=0)
    model.train()
    model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    model.zero_grad()


def config(shape: Shape, seed: int, folder: str) -> GRPOConfig:
    rows = min(shape.rows, shape.episodes)
    return GRPOConfig(
        output_dir=folder, seed=seed, use_cpu=True, bf16=False, report_to="none", save_strategy="no", logging_steps=1,
        disable_tqdm=True, max_steps=1 if shape.long else 2, per_device_train_batch_size=rows,
        gradient_accumulation_steps=shape.episodes // rows, num_generations=ATTEMPTS, learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant", gradient_checkpointing=False, beta=0.0, temperature=TEMPERATURE, top_p=1.0,
        top_k=0, max_completion_length=shape.context, generation_kwargs={"max_new_tokens": TURN_TOKENS},
        max_tool_calling_iterations=WARM_UP_ROUNDS, dataloader_pin_memory=False,
    )  # fmt: skip


def network(shape: Shape, folder: str) -> Any:
    """The same weights as ours, with the same parameters trained."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    if shape.train == "top":
        decoder = model.get_decoder()
        model.requires_grad_(False)
        for layer in decoder.layers[-shape.top_layers :]:
            layer.requires_grad_(True)
        decoder.norm.requires_grad_(True)
    return model


def adapters(shape: Shape) -> dict[str, Any]:
    if shape.train != "lora":
        return {}
    from peft import LoraConfig

    return {
        "peft_config": LoraConfig(
            r=shape.lora_rank, lora_alpha=2 * shape.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    }


if __name__ == "__main__":
    main()
