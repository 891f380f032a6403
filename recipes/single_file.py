"""The whole algorithm, top to bottom: an agent learns a game of many turns by reinforcement learning.

    python recipes/single_file.py [--seed 0] [--steps 150]

A tiny Llama with random weights has three guesses for seven numbers and is told "higher" or "lower". First it
copies games that show how to act (and guess blindly), then it is rewarded: it has to find out that listening pays.
Who does not listen wins at most 3 of 7 games, who halves what is left wins all.

Only torch and transformers are used, and the sections are the rooms of the library. Left out here, since they
change speed and safety and not the algorithm: kept keys and values, shared prefixes, checkpoints, the record.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

# --- envs: what the agent acts in -------------------------------------------------------------------------------------

LOW, HIGH, ROUNDS = 1, 7, 3
NOTHING, LOST, WON = -0.5, 0.0, 1.0  # outcomes: no guess at all, not found, found


@dataclass
class Game:
    """Guess the secret. `step` answers an action; `consistent` notes which guesses the answers so far allowed."""

    secret: int
    least: int = LOW
    most: int = HIGH
    guesses: int = 0
    used: int = 0
    won: bool = False
    consistent: list[bool] = field(default_factory=list)  # by turn

    def step(self, number: int | None) -> str:
        self.used += 1
        self.consistent.append(number is not None and self.least <= number <= self.most)
        if number is None:
            return "what?"
        self.guesses += 1
        if number == self.secret:
            self.won = True
            return "right"
        if number < self.secret:
            self.least = max(self.least, number + 1)
            return "higher"
        self.most = min(self.most, number - 1)
        return "lower"

    def over(self) -> bool:
        return self.won or self.used >= ROUNDS

    def outcome(self) -> float:
        return WON if self.won else LOST if self.guesses else NOTHING


# --- agents: between messages and tokens ------------------------------------------------------------------------------

WORDS = ["<pad>", "\n", "find", "guess", "higher", "lower", "right", "what?", *map(str, range(LOW, HIGH + 1))]
IDS = {word: index for index, word in enumerate(WORDS)}
PAD, END = IDS["<pad>"], IDS["\n"]


def encode(text: str) -> list[int]:
    return [IDS[word] for word in text.split(" ")]


def parse(ids: list[int]) -> int | None:
    guess, number, end = [*(WORDS[index] for index in ids), "", "", ""][:3]
    return int(number) if (guess, end) == ("guess", "\n") and number.isdigit() else None


# --- engines: sampling, with the log-probability of every token -------------------------------------------------------


@torch.no_grad()
def sample(model: LlamaForCausalLM, contexts: list[list[int]], limit: int = 3) -> list[tuple[list[int], list[float]]]:
    """One turn for each context: tokens up to a newline, and their log-probabilities as they were sampled: what the
    update compares the new policy with."""
    turns: list[tuple[list[int], list[float]]] = [([], []) for _ in contexts]
    for _ in range(limit):
        going = [i for i, (ids, _) in enumerate(turns) if END not in ids]
        rows = [contexts[i] + turns[i][0] for i in going]
        if not rows:
            break
        logits = model(pad(rows)).logits
        last = torch.stack([logits[k, len(row) - 1] for k, row in enumerate(rows)])
        logp = last.log_softmax(dim=-1)
        drawn = torch.multinomial(logp.exp(), 1)[:, 0]
        for k, i in enumerate(going):
            turns[i][0].append(int(drawn[k]))
            turns[i][1].append(float(logp[k, drawn[k]]))
    return turns


def pad(rows: list[list[int]]) -> Tensor:
    """[B, L], filled up on the right: with causal attention no token sees what comes after it."""
    length = max(map(len, rows))
    return torch.tensor([row + [PAD] * (length - len(row)) for row in rows])


# --- rollout: play ----------------------------------------------------------------------------------------------------


@dataclass
class Turn:
    """Only what a turn adds: what was shown since the last one, and what was sampled then."""

    context: list[int]
    ids: list[int]
    logprobs: list[float]


@dataclass
class Trajectory:
    turns: list[Turn]
    outcome: float
    steps: list[float]  # immediate rewards, by turn


def play(model: LlamaForCausalLM, secrets: list[int]) -> list[Trajectory]:
    """One episode for each secret, all at once: token ids in, token ids out, nothing is tokenised twice."""
    games = [Game(secret) for secret in secrets]
    held = [encode("find \n") for _ in games]
    added = [list(ids) for ids in held]
    turns: list[list[Turn]] = [[] for _ in games]
    while going := [i for i, game in enumerate(games) if not game.over()]:
        for i, (ids, logprobs) in zip(going, sample(model, [held[i] for i in going]), strict=True):
            turns[i].append(Turn(added[i], ids, logprobs))
            answer = encode(f"{games[i].step(parse(ids))} \n")
            added[i] = answer if END in ids else [END, *answer]  # the limit may have cut the newline off
            held[i] = held[i] + ids + added[i]
    return [
        Trajectory(own, game.outcome(), [STEP * ok for ok in game.consistent])
        for game, own in zip(games, turns, strict=True)
    ]


# --- rewards: gated accumulation (G-RA, arXiv 2508.10548) -------------------------------------------------------------

STEP = 0.125  # for a guess that the answers so far allow
GATE = LOST  # an outcome must lie above it


def gated(outcome: float, steps: list[float]) -> float:
    """Immediate rewards count only when the outcome earned them: else they are collected without doing the task."""
    return outcome + (sum(steps) if outcome > GATE else 0.0)


# --- credit: group-relative advantages (GRPO, arXiv 2402.03300) -------------------------------------------------------


def grpo(rewards: list[float]) -> list[float]:
    """Each attempt against the mean of its group: the group's other attempts are the baseline."""
    if max(rewards) - min(rewards) < 1e-8:
        return [0.0] * len(rewards)  # all alike: nothing to learn, and no noise either
    mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
    return [(reward - mean) / (deviation + 1e-6) for reward in rewards]


# --- batching: rows, with what is trained marked ----------------------------------------------------------------------


@dataclass
class Row:
    """A trajectory as one run of tokens. Prompt and observations are masked: the agent did not choose them."""

    ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    advantage: float


def row_of(trajectory: Trajectory, advantage: float) -> Row:
    row = Row([], [], [], advantage)
    for turn in trajectory.turns:
        row.ids += turn.context + turn.ids
        row.mask += [False] * len(turn.context) + [True] * len(turn.ids)
        row.logprobs += [0.0] * len(turn.context) + turn.logprobs
    return row


def rows_of(played: list[Trajectory], rewards: list[float], attempts: int) -> list[Row]:
    """The rows of every group that has something to learn from."""
    rows = []
    for g in range(0, len(played), attempts):
        credit = grpo(rewards[g : g + attempts])
        if any(credit):
            rows += [row_of(trajectory, a) for trajectory, a in zip(played[g : g + attempts], credit, strict=True)]
    return rows


# --- losses -----------------------------------------------------------------------------------------------------------

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # of log-probabilities, those recorded and advantages, each [N]


def ppo(logprobs: Tensor, old: Tensor, advantages: Tensor, clip: float = 0.2) -> Tensor:
    """-min(r A, clip(r) A) for each token (arXiv 1707.06347): no gain from moving further than the clip."""
    ratio = (logprobs - old).exp()
    return torch.maximum(-ratio * advantages, -ratio.clamp(1 - clip, 1 + clip) * advantages)


def sft(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """-A log pi for each token: with A = 1, learning by copying."""
    return -advantages * logprobs


# --- trainer: the update ----------------------------------------------------------------------------------------------


def total_loss(model: LlamaForCausalLM, rows: list[Row], loss: Loss) -> Tensor:
    """Every trained token counts the same, 1 / N of the step's, however they are spread over rows."""
    ids = pad([row.ids for row in rows])
    length = ids.shape[1] - 1

    def spread(values: list[list[float]]) -> Tensor:  # for tokens 1.., each predicted from the one before it
        return torch.tensor([row[1:] + [0.0] * (length + 1 - len(row)) for row in values])

    mask = spread([[float(one) for one in row.mask] for row in rows]).bool()
    old = spread([row.logprobs for row in rows])[mask]
    advantages = spread([[row.advantage] * len(row.ids) for row in rows])[mask]
    logp = model(ids[:, :-1]).logits.log_softmax(dim=-1).gather(2, ids[:, 1:, None])[:, :, 0][mask]
    return (loss(logp, old, advantages) * torch.full_like(old, 1.0 / len(old))).sum()


def update(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, rows: list[Row], loss: Loss) -> None:
    optimizer.zero_grad()
    total_loss(model, rows, loss).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if torch.isfinite(norm):
        optimizer.step()


def make_model(seed: int) -> LlamaForCausalLM:
    """About 80,000 random weights, large enough that a token's history shows in what comes out."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.15,
        pad_token_id=PAD, bos_token_id=None, eos_token_id=END,
    )  # fmt: skip
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    return model


def warm_start(model: LlamaForCausalLM, rng: random.Random, games: int = 128, batch: int = 8) -> None:
    """Copies games in which the numbers are drawn blindly: how to act, and nothing about how to win."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(games // batch):
        rows = []
        for _ in range(batch):
            game, turns, shown = Game(rng.randint(LOW, HIGH)), [], encode("find \n")
            while not game.over():
                number = rng.randint(LOW, HIGH)
                ids = encode(f"guess {number} \n")
                turns.append(Turn(shown, ids, [0.0] * len(ids)))
                shown = encode(f"{game.step(number)} \n")
            rows.append(row_of(Trajectory(turns, 0.0, []), 1.0))
        update(model, optimizer, rows, sft)


def won(played: list[Trajectory]) -> float:
    return statistics.fmean(trajectory.outcome == WON for trajectory in played)


def train(seed: int, steps: int, attempts: int = 8) -> tuple[float, float]:
    """Warm start, then RL with two groups for each secret; returns the share of games won before and after RL."""
    model = make_model(seed)
    warm_start(model, random.Random(seed))
    secrets = list(range(LOW, HIGH + 1))
    before = won(play(model, secrets * 40))
    print(f"after copying: {before:.2f} of the games won")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for step in range(1, steps + 1):
        played = play(model, [secret for secret in secrets * 2 for _ in range(attempts)])
        rewards = [gated(trajectory.outcome, trajectory.steps) for trajectory in played]
        if rows := rows_of(played, rewards, attempts):
            update(model, optimizer, rows, ppo)
        if step % 10 == 0:
            print(f"step {step:3}: reward {statistics.fmean(rewards):5.2f}, won {won(played):.2f}")
    after = won(play(model, secrets * 40))
    print(f"after RL: {after:.2f} of the games won; who does not listen wins {ROUNDS / len(secrets):.2f} at most")
    return before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=150)
    torch.set_num_threads(1)  # so small a network is quickest on one core
    train(**vars(parser.parse_args()))
