"""The data types of Turnstile.

All are frozen, keyword-only and slotted; arrays are numpy and never written to after construction. Letters used
throughout the project: G attempts in a group, K turns in a trajectory, n new (sampled) tokens of a turn, c context
tokens of a turn, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]
Bool = NDArray[np.bool_]
JSON = Any
"""A value that `json.dumps` accepts."""


class Stop(StrEnum):
    """The reason why an episode ended. `ERROR` is an infrastructure failure, never trained on or scored as zero."""

    SUBMITTED = "submitted"  # the agent submitted its work
    DONE = "done"  # the environment reached a terminal state
    TURNS = "turns"  # turn limit
    CONTEXT = "context"  # the context window is full
    TOKENS = "tokens"  # the episode's budget of sampled tokens is used up
    TIMEOUT = "timeout"  # the episode's wall clock ran out
    PARSE = "parse"  # too many turns in a row without a parsable action
    ERROR = "error"  # infrastructure failed


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One call of a tool, as the model wrote it."""

    id: str
    name: str
    arguments: Mapping[str, JSON]


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolSpec:
    """A tool that the environment offers; `schema` is the JSON schema of its arguments."""

    name: str
    description: str
    schema: Mapping[str, JSON]


Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message of a conversation, independent of any template."""

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One problem. `data` is what its environment needs, as JSON; `seed` determines the environment's randomness."""

    id: str
    env: str
    prompt: str = ""
    data: Mapping[str, JSON] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are sampled. A model's own defaults are ignored, so a method that is off here is off.

    `seed` determines the random numbers of one request: token i depends only on (seed, i). With `regex` or `grammar`
    (Lark), only tokens that can still lead to a match are sampled.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    seed: int = 0
    regex: str = ""
    grammar: str = ""


Finish = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """The sampled tokens of one turn, exactly as sampled.

    `logprobs` are those of the distribution sampled from, after temperature and truncation but without a regex or
    grammar, because the trainer does not know these and must compute the same values. `versions` is the weight version
    of each token; `entropies` are in nats. `forced` marks tokens that were the only ones a regex or a grammar allowed;
    they were not chosen and are not trained.
    """

    token_ids: I32  # [n]
    logprobs: F32  # [n]
    versions: I32  # [n]
    sampling: Sampling
    finish: Finish
    seconds: float
    entropies: F32 | None = None  # [n]
    forced: Bool | None = None  # [n], with a regex or a grammar

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        for name in ("logprobs", "versions", "entropies", "forced"):
            values = getattr(self, name)
            if values is not None and len(values) != n:
                raise ValueError(f"completion of {n} tokens has {len(values)} {name}")

    @property
    def chosen(self) -> Bool:
        """Mask of the tokens that the policy chose, which are all but the forced ones, bool[n]."""
        return np.ones(len(self.token_ids), dtype=np.bool_) if self.forced is None else ~self.forced


class Stage(StrEnum):
    """How far a turn has progressed.

    The last turn of an episode may be incomplete, if the time limit passed or infrastructure failed while the
    environment was acting.
    """

    SAMPLED = "sampled"  # its tokens are sampled
    DELIVERED = "delivered"  # the environment has the action
    COMPLETED = "completed"  # the environment has answered


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One turn: what was shown since the last one, what was sampled, and the environment's answer.

    A turn stores only the tokens that it ADDS. With `fresh=True` the context was rewritten and `context_ids` is the
    whole prompt. `rewards` holds the step rewards that the environment itself gave, by term, `signals` what it
    recorded, `agent` the name of the acting agent, and `trainable` whether its tokens may be trained on.
    """

    context_ids: I32  # [c]
    completion: Completion
    message: Message
    observation: tuple[Message, ...] = ()
    fresh: bool = False
    rewards: Mapping[str, float] = field(default_factory=dict)
    signals: Mapping[str, JSON] = field(default_factory=dict)
    state_key: str = ""
    agent: str = "agent"
    trainable: bool = True
    seconds: float = 0.0  # time in the environment, if it answered
    stage: Stage = Stage.COMPLETED


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One attempt at a task.

    `opening` and `tools` are what the environment began with, and `hint` is what the prompt showed after them.
    `signals` are what `Env.measure` recorded at the end and graders added, `rates` says which of `Env.rates` it
    reached, and `error` is the text of the error that ended it.
    """

    task_id: str
    group: str
    attempt: int
    turns: tuple[Turn, ...]
    stop: Stop
    signals: Mapping[str, JSON] = field(default_factory=dict)
    rates: Mapping[str, bool] = field(default_factory=dict)
    opening: tuple[Message, ...] = ()
    tools: tuple[ToolSpec, ...] = ()
    hint: str = ""
    parent: tuple[int, int, int] | None = None  # (attempt, turn, token) from which this one branched off
    error: str | None = None
    times: Mapping[str, float] = field(default_factory=dict)  # seconds by phase

    @property
    def key(self) -> tuple[str, int]:
        """(group, attempt)."""
        return (self.group, self.attempt)

    @property
    def without_open_turn(self) -> Trajectory:
        """This trajectory without its last turn if the environment did not answer that; otherwise itself."""
        if not self.turns or self.turns[-1].stage is Stage.COMPLETED:
            return self
        return replace(self, turns=self.turns[:-1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The attempts at one task, which are compared with each other."""

    id: str
    task: Task
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """The rewards of one trajectory.

    `outcome` is the terminal reward by agent, or None if infrastructure failed. `turn` is the composed step reward r_t
    of each turn after gating, and `total` is outcome + sum of `turn`. `granted` and `withheld` give each step term's
    reward by turn, split by whether it was withheld. `gates` says which gates were open, and `withheld_by` which closed
    gates or stop rule (`on_stop.STOP`) withheld a term; `rewards/resolver.py` gives this turn by turn. `in_baseline`
    and `in_gradient` say whether the trajectory counts in its group's statistics and in the update; they differ for
    stop reasons that the recipe masks.
    """

    outcome: Mapping[str, float] | None
    turn: F32  # [K]
    total: float
    granted: Mapping[str, F32] = field(default_factory=dict)  # term -> [K]
    withheld: Mapping[str, F32] = field(default_factory=dict)  # term -> [K]
    gates: Mapping[str, bool] = field(default_factory=dict)
    withheld_by: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # term -> closed gates above it, stop rules
    in_baseline: bool = True
    in_gradient: bool = True

    def outcome_of(self, agent: str = "agent") -> float:
        """Return the terminal reward of one agent, or NaN if infrastructure failed."""
        return float("nan") if self.outcome is None else float(self.outcome.get(agent, 0.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One training row: a sequence of tokens that the model processes as a whole, made of one or more turns.

    A trajectory is one row unless its context was rewritten (`Turn.fresh`), which starts a new row. Arrays are [L].
    `turn_ids` is the index of the turn to which a token belongs, or -1 for prompt and observation tokens. `extras`
    holds further per-token arrays by name (ref_logprobs, proximal_logprobs, teacher_logprobs, values, returns).
    """

    token_ids: I32
    loss_mask: Bool
    logprobs: F32
    advantages: F32
    turn_ids: I32
    versions: I32
    origin: tuple[str, int]  # (group, attempt)
    temperature: float = 1.0  # sampling temperature, which the trainer applies too
    extras: Mapping[str, F32] = field(default_factory=dict)

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        for name in ("loss_mask", "logprobs", "advantages", "turn_ids", "versions"):
            if len(getattr(self, name)) != length:
                raise ValueError(f"row of {length} tokens has {len(getattr(self, name))} {name}")
        for name, values in self.extras.items():
            if len(values) != length:
                raise ValueError(f"row of {length} tokens has {len(values)} {name}")
