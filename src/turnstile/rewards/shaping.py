"""Rewards that are derived from other numbers in a way that cannot be exploited."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from turnstile.errors import ConfigError
from turnstile.rewards.recorded import episode_number, episode_signal, turn_number, turn_signal
from turnstile.types import F32, Stop, Task, Trajectory


def potential(
    task: Task, trajectory: Trajectory, *, name: str = "", signal: str = "", gamma: float = 1.0, start: float = 0.0
) -> F32:
    """Return gamma Phi(s') - Phi(s) for each turn, f32[K] (Ng, Harada, Russell 1999).

    Phi(s') is the number that each turn recorded as `signal` (default: the term's name), and `start` is Phi of the
    first state. Phi is 0 at every end, even if a limit stopped the episode, so that no policy gains by stopping in a
    good state. The best policy is then the same with and without this reward, provided that `gamma` is that of the
    returns and that no gate withholds the reward; therefore give the term the highest level. Raises ConfigError if a
    turn lacks the signal.
    """
    after = np.array([turn_number(turn, signal or name, "potential") for turn in trajectory.turns], np.float64)
    if not len(after):
        return np.zeros(0, dtype=np.float32)
    before = np.concatenate([[start], after[:-1]])
    after[-1] = 0.0
    return np.asarray(gamma * after - before, dtype=np.float32)


def bounded(
    task: Task,
    trajectory: Trajectory,
    *,
    name: str = "",
    signal: str = "",
    form: Literal["delta", "clip"] = "delta",
    eta: float = 0.0,
) -> F32:
    """Return a process reward p_t whose sum does not grow with more steps, f32[K] (arXiv 2410.15115).

    With `delta`, r_t = p_t - p_{t+1}, r_{K-1} = p_{K-1}, and 0 for the last turn, which the outcome judges. The rewards
    from a turn t before the last then add up to p_t, however many turns follow. With `clip`, r_t = min(p_t - eta, 0),
    so that a turn can only cost. p_t is the number that each turn recorded as `signal` (default: the term's name).
    Raises ConfigError if a turn lacks it.
    """
    if form not in ("delta", "clip"):
        raise ConfigError(f"reward 'bounded': form = {form!r} is not known; known: delta, clip")
    found = np.array([turn_number(turn, signal or name, "bounded") for turn in trajectory.turns], np.float32)
    if form == "clip":
        return np.asarray(np.minimum(found - eta, 0.0), dtype=np.float32)
    found[-1:] = 0.0
    return np.asarray(found - np.append(found[1:], np.float32(0.0)), dtype=np.float32)


def centred(
    task: Task, trajectory: Trajectory, *, name: str = "outcome", signal: str = "", reference: str = "reference"
) -> float | None:
    """Return 1 / (1 + exp(-(r - r_ref))), averaged over the reference rewards (PAR, arXiv 2502.18770).

    r is the episode's `signal` (default: the term's name). r_ref is its signal `reference`, one number or several: the
    rewards of a reference policy's answers to the task. The reward rises fastest around the reference and is bounded,
    so a reward model's errors far from it are worth little. None if infrastructure failed or one of the signals is
    None. Raises ConfigError if a signal is missing.
    """
    if trajectory.stop is Stop.ERROR:
        return None
    value = episode_number(trajectory, signal or name, "centred")
    against = episode_signal(trajectory, reference, "centred")
    if value is None or against is None:
        return None
    rewards = against if isinstance(against, list | tuple) else [against]
    if not rewards or not all(isinstance(reward, int | float) and math.isfinite(reward) for reward in rewards):
        raise ConfigError(f"reward 'centred': the signal {reference!r} holds no reference rewards, but {against!r:.80}")
    return float(np.mean(0.5 * (1.0 + np.tanh((value - np.array(rewards, np.float64)) / 2))))


def information_gain(task: Task, trajectory: Trajectory, *, last: bool = False) -> F32:
    """Return p_t - p_{t-1} for each turn, f32[K], where p_t is the probability of the answer after turn t (IGPO).

    arXiv 2510.14967: the policy's p_t is exp of the mean log-probability of the answer's tokens. p_0, ..., p_K, before
    the first turn and after each turn, are the episode's signal answer_probabilities, written by the grader
    `answer_probabilities` or the environment. The last turn, whose answer the outcome judges, gets 0 unless `last`. A
    turn also gets 0 if the probability before or after it is None, and every turn does if the signal is None. Raises
    ConfigError if the signal is missing, or is not K + 1 numbers in [0, 1].
    """
    found = episode_signal(trajectory, "answer_probabilities", "information_gain", grader="answer_probabilities")
    turns = len(trajectory.turns)
    if found is None:
        return np.zeros(turns, dtype=np.float32)
    try:
        missing = np.array([value is None for value in found], bool)
        after = np.asarray(found, dtype=np.float64)
    except (TypeError, ValueError):
        after = missing = np.zeros(0, bool)
    if after.shape != (turns + 1,) or missing.all() or not (missing | (after >= 0.0) & (after <= 1.0)).all():
        raise ConfigError(
            f"reward 'information_gain' wants {turns + 1} probabilities for the {turns} turns of task {task.id!r}, got "
            f"answer_probabilities = {found!r}"
        )
    gained = np.nan_to_num(np.diff(after))
    if not last:
        gained[-1:] = 0.0
    return gained.astype(np.float32)


def self_correction(task: Task, trajectory: Trajectory, *, signal: str, bonus: float = 1.0) -> float:
    """Return `bonus` if the agent's verdict went from wrong to right, -`bonus` if from right to wrong, else 0.

    The first and the last verdict are compared (after SCoRe, arXiv 2409.12917). A verdict is a turn's `signal`, true or
    false. Turns without one (None) are skipped, and so is a last turn that the environment did not answer. Raises
    ConfigError if another turn did not record the signal.
    """
    recorded = [turn_signal(turn, signal, "self_correction") for turn in trajectory.without_open_turn.turns]
    verdicts = [value for value in recorded if value is not None]
    return bonus * (float(bool(verdicts[-1])) - float(bool(verdicts[0]))) if verdicts else 0.0
