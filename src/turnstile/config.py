"""A run is one TOML file: its schema, dotted overrides, and errors that name the nearest known word.

`kind` names a function (see `lookup.KINDS`) and every other key of that section is one of its keyword
arguments, so an algorithm adds no configuration class. Nothing here imports torch.
"""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from turnstile.errors import ConfigError
from turnstile.hints import hint
from turnstile.lookup import nearest

Share = Annotated[float, Field(ge=0, lt=1)]
EndRule = Literal["grade", "zero", "half", "mask", "drop"]


def _tuples(fields: Mapping[str, FieldInfo], data: Mapping[str, Any]) -> dict[str, Any]:
    """The data with lists as tuples where a field takes those: TOML and JSON have lists alone."""

    def takes_tuple(field: FieldInfo | None) -> bool:
        hint = None if field is None else field.annotation
        return any(get_origin(one) is tuple for one in (hint, *get_args(hint)))

    return {k: tuple(v) if isinstance(v, list) and takes_tuple(fields.get(k)) else v for k, v in data.items()}


class Section(BaseModel):
    """A part of a recipe whose keys are all known here. Where one names a function, knobs alone are those of its
    default: `credit = { scale = "none" }` is of `grpo`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _default_kinds(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        lacking = {
            name: {"kind": field.default.kind, **data[name]}
            for name, field in cls.model_fields.items()
            if isinstance(field.default, Kind) and isinstance(data.get(name), Mapping) and "kind" not in data[name]
        }
        return _tuples(cls.model_fields, {**data, **lacking})


class Kind(BaseModel):
    """A part of a recipe that names a function; its other keys are that function's keyword arguments.

    The name alone stands for a section without other keys: `sandbox = "bubblewrap"`.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)
    kind: str

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, data: Any) -> Any:
        return {"kind": data} if isinstance(data, str) else data

    @property
    def knobs(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class ModelConfig(Section):
    id: str = "smollm2-135m"  # hub id, packaged name, or a folder, best written with ./ before it
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    train: Literal["all", "top", "lora"] = "all"
    top_layers: int = Field(0, ge=0)  # with "top" and "lora": only the last so many layers learn (0: all adapters)
    lora_rank: int = Field(16, ge=1)
    lora_alpha: int = Field(32, ge=1)
    threads: int = Field(0, ge=0)  # 0: as many as torch finds


class EngineConfig(Kind):
    """What samples: `transformers`, in this process, with the keys below; or `openai`, a server, with its own knobs."""

    kind: str = "transformers"
    deterministic: bool = False  # every pass takes max_batch tokens, each by itself: runs repeat bit by bit, slower
    max_batch: int = Field(64, ge=1)  # requests that get a token in one pass
    memory_mb: int = Field(4096, ge=64)  # for keys and values
    reconnect_timeout: float = Field(300.0, ge=0)  # seconds that training waits for a server when all are gone
    speculative_tokens: int = Field(32, ge=0)  # tokens guessed ahead, and kept where they are drawn: fewer passes
    pack_weights: bool = True  # on a CPU, sample from reordered copies of the weights: faster, for their memory again

    @model_validator(mode="after")
    def _known(self) -> EngineConfig:
        if self.in_process and (extra := next(iter(self.knobs), None)):
            raise ValueError(f"unknown key {extra!r}; {hint(extra, type(self).model_fields)}")
        return self

    @property
    def in_process(self) -> bool:
        """Whether the model is sampled from here."""
        return self.kind == "transformers"


class AgentConfig(Section):
    renderer: Kind = Kind(kind="chat")
    parser: Kind = Kind(kind="hermes")


class SamplingConfig(Section):
    temperature: float = Field(1.0, ge=0)  # logits are divided by it, in training too (0: the likeliest token)
    top_k: int = Field(0, ge=0)  # of the likeliest so many (0: of all)
    top_p: float = Field(1.0, gt=0, le=1)  # of what is left the likeliest that together have this mass (1: of all)
    min_p: float = Field(0.0, ge=0, le=1)  # of what is left those with this share of the likeliest's (0: of all)
    max_tokens: int = Field(256, ge=1)  # of a turn
    regex: str = ""  # that every turn must match (the extra `grammar`)
    grammar: str = ""  # the same as a grammar in Lark's notation


class TasksConfig(Section):
    train: str = ""  # a file of JSON lines
    heldout: str = ""
    limit: int = Field(0, ge=0)  # train on the first so many tasks only (0: all)
    allow_failed: bool = False  # use tasks that `turnstile tasks check` failed all the same
    where: dict[str, Any] = Field(default_factory=dict)  # keep tasks whose data has these values, or at most them


class EpisodeConfig(Section):
    turns: int = Field(8, ge=1)
    tokens: int = Field(0, ge=0)  # sampled tokens an episode may spend (0: no limit)
    context: int = Field(0, ge=0)  # tokens an episode may hold (0: the model's own window)
    seconds: float = Field(300.0, gt=0)  # wall clock
    measure_seconds: float = Field(3600.0, gt=0)  # for measuring it at the end; past them it counts as failed
    unparsed: int = Field(0, ge=0)  # stop after so many unreadable turns in a row (0: never)
    retries: int = Field(2, ge=0)  # after infrastructure errors
    concurrent: int = Field(64, ge=1)  # episodes at once


class RolloutConfig(Section):
    tasks_per_step: int = Field(6, ge=1)
    group_size: int = Field(8, ge=1)  # episodes of each task, which are compared with each other
    max_staleness: int = Field(
        0, ge=0
    )  # steps that episodes are played ahead of training, in another process (0: in turn)
    straggler_factor: float = Field(0.0, ge=0)  # stop an episode at so many times its task's longest so far (0: never)
    max_failures: int = Field(10, ge=0)  # attempts given up for faults in an environment's code before one is raised


class OnStopConfig(Section):
    """What becomes of an episode by how it ended: graded, scored 0 or half, masked from the gradient, dropped."""

    submitted: EndRule = "grade"
    done: EndRule = "grade"
    turns: EndRule = "grade"
    context: EndRule = "grade"
    tokens: EndRule = "grade"
    timeout: EndRule = "mask"
    parse: EndRule = "grade"


class GateConfig(Section):
    value: float
    compare: Literal["gt", "ge"] = "gt"


class TermConfig(Kind):
    """One named reward; keys besides these are knobs of its function."""

    name: str = ""  # default: the kind
    scope: Literal["", "episode", "turn"] = ""  # default: what the function declares
    level: int = 0
    weight: float = 1.0
    gate: GateConfig | None = None


class RewardsConfig(Section):
    compose: Literal["gated", "direct"] = "gated"
    terms: tuple[TermConfig, ...] = (TermConfig(kind="signal", name="outcome", level=1),)


class JudgeConfig(Section):
    """The model that graders ask: behind an OpenAI-compatible server, or without a `url` loaded into this process."""

    model: str = ""  # as model.id; with a url the server's name for it (default: the only one there)
    url: str | tuple[str, ...] = ""  # like http://127.0.0.1:8000/v1; several serve the same model
    key: str = "OPENAI_API_KEY"  # the environment variable with the server's key
    temperature: float = Field(0.0, ge=0)
    max_tokens: int = Field(512, ge=1)
    concurrent: int = Field(16, ge=1)  # questions asked at once
    timeout: float = Field(120.0, gt=0)  # seconds for an answer
    retries: int = Field(4, ge=0)  # where the server does not answer
    tries: int = Field(2, ge=1)  # until an answer can be read
    constrained: bool = False  # no answer but one that can be read: vLLM, turnstile serve, here the extra `grammar`
    chars: int = Field(20_000, ge=1000)  # of an episode that are shown, less of its middle

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses, if there are any."""
        return tuple(filter(None, (self.url,) if isinstance(self.url, str) else self.url))


class SftConfig(Section):
    """Supervised learning before RL: of oracle episodes, of conversations, or of both. Without either there is none."""

    demos: int = Field(0, ge=0)  # oracle episodes
    demonstrator: Kind = Kind(kind="swe")
    conversations: str = (
        ""  # a file of them, as `turnstile conversations import` writes it, or in any format that it reads
    )
    too_long: Literal["drop", "cut"] = "drop"  # conversations that the context cannot hold, or only their first turns
    epochs: int = Field(1, ge=1)
    batch: int = Field(8, ge=1)
    lr: float = Field(4e-4, gt=0)
    warmup: int = Field(4, ge=0)
    key_weight: float = Field(1.0, gt=0)  # of the tokens that decide an action, against 1 for the others

    @property
    def wanted(self) -> bool:
        """Whether there is anything to learn from."""
        return bool(self.demos or self.conversations)


class TrainConfig(Section):
    steps: int = Field(16, ge=0)
    epochs: int = Field(1, ge=1)  # passes over a step's rows
    minibatches: int = Field(1, ge=1)  # optimiser steps a pass
    max_tokens_per_microbatch: int = Field(
        8192, ge=64
    )  # unique tokens computed at once; gradients accumulate over the rest
    checkpointing: bool = False  # of each layer keep only what goes in, and compute it again: less memory, more time
    lr: float = Field(1e-5, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = Field(0, ge=0)  # optimiser steps
    betas: tuple[Share, Share] = (0.9, 0.999)  # of AdamW, each at least 0 and below 1
    weight_decay: float = Field(0.0, ge=0)
    clip: float = Field(1.0, gt=0)  # of the gradient's norm
    drop_zero_advantage_groups: bool = (
        True  # groups whose advantages are all zero are not trained, nor do they take weight
    )
    reference: bool = False  # give losses the starting policy's log-probabilities (a loss that needs them gets them)
    reference_every: int = Field(0, ge=0)  # steps after which that policy becomes the current one (0: never)
    teacher: str = ""  # the model that the loss `distill` learns from: as model.id, with the same vocabulary
    checkpoint_every: int = Field(10, ge=0)
    keep: int = Field(2, ge=1)  # checkpoints: the last so many
    keep_best: str = ""  # and the one that was highest in this metric, like reward/total or heldout/resolution


class CriticConfig(Section):
    """The value head that estimators like `gae` learn from, and the heads of `utterance_critic` and
    `progress_attribution`; the others have none."""

    lr: float = Field(1e-3, gt=0)
    epochs: int = Field(8, ge=1)  # steps of its optimiser for each step of the run
    clip: float = Field(0.0, ge=0)  # of the loss `value`: how far from the old one a value still gains (0: anywhere)
    tau: float = Field(0.1, gt=0, le=1)  # of `utterance_critic`: how far its slow copies go after each of those steps


class ImplicitConfig(Section):
    """The process reward that `implicit_step` learns; the others have none."""

    objective: Literal["cross_entropy", "dpo"] = "cross_entropy"  # of outcomes within [0, 1], or between attempts
    reference: Literal["start", "old"] = "start"  # the policy that RL began with, or the one of before the step
    beta: float = Field(0.05, gt=0)  # a reward is beta times a log-ratio
    lr: float = Field(1e-6, gt=0)
    epochs: int = Field(1, ge=1)  # steps of its optimiser for each step of the run


class FeedbackConfig(Section):
    """What the loss `self_distill` tells the policy of an attempt, before asking it again how likely each token is."""

    show: tuple[str, ...] = ()  # signals of the episode
    last: bool = True  # what was seen at its end
    solution: bool = True  # the attempt of its group that earned most, if that is more
    chars: int = Field(4000, ge=200)  # of it all


class RehearsalConfig(Section):
    """Samples of the policy that RL begins with, kept and learned from again at every step, against forgetting. Without
    tasks there are none."""

    tasks: int = Field(0, ge=0)  # of training, played before the first step
    attempts: int = Field(1, ge=1)  # episodes a task
    least: float | None = None  # keep the episodes whose outcome is at least that (default: all)
    batch: int = Field(8, ge=1)  # of them at each step
    loss: Kind = Kind(kind="forward_kl")
    coef: float = Field(0.1, gt=0)


class ReplayBufferConfig(Section):
    """Attempts of earlier steps that had a positive advantage and are trained on again, as `recalibrated` judges them
    by then."""

    size: int = Field(0, ge=0)  # attempts kept, the oldest go first (0: no buffer)
    batch: int = Field(8, ge=1)  # of them at each step
    uses: int = Field(2, ge=1)  # how often one is taken from it


class EvalConfig(Section):
    tasks: int = Field(0, ge=0)  # held-out tasks (0: all)
    samples: int = Field(1, ge=1)
    baseline_tasks: int = Field(0, ge=0)  # for the untouched model, whose episodes are long (0: as many)
    before: bool = True  # evaluate the model as it comes and after its warm start too, not only at the end
    every: int = Field(0, ge=0)  # steps between evaluations while training (0: none)
    temperature: Annotated[float, Field(ge=0)] | None = None  # default: that of [sampling]
    policies: dict[str, Kind] = Field(default_factory=dict)  # name -> policy, to compare with


class Recipe(Section):
    """Everything a run needs. See `recipes/` for examples and docs/configuration.md for the whole list."""

    name: str = "run"
    seed: int = Field(0, ge=0)
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    agent: AgentConfig = AgentConfig()
    sampling: SamplingConfig = SamplingConfig()
    sandbox: Kind = Kind(kind="local")
    env: Kind = Kind(kind="swe")
    tasks: TasksConfig = TasksConfig()
    episode: EpisodeConfig = EpisodeConfig()
    rollout: RolloutConfig = RolloutConfig()
    on_stop: OnStopConfig = OnStopConfig()
    rewards: RewardsConfig = RewardsConfig()
    graders: tuple[Kind, ...] = ()  # what looks at played episodes and writes signals for rewards to read
    judge: JudgeConfig = JudgeConfig()
    hint: Kind | None = None  # what the prompts of training show besides the task, less and less
    credit: Kind = Kind(kind="grpo")
    loss: Kind = Kind(kind="ppo")
    loss_multipliers: tuple[Kind, ...] = ()  # of each token's loss: off-policy corrections, which tokens learn
    regularizers: tuple[Kind, ...] = ()  # further losses, each with a `coef`
    critic: CriticConfig = CriticConfig()
    implicit: ImplicitConfig = ImplicitConfig()
    feedback: FeedbackConfig = FeedbackConfig()
    rehearsal: RehearsalConfig = RehearsalConfig()
    replay_buffer: ReplayBufferConfig = ReplayBufferConfig()
    loss_aggregation: Kind = Kind(kind="token")
    sft: SftConfig = SftConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    trackers: tuple[Kind, ...] = (Kind(kind="jsonl"), Kind(kind="console"))


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a TOML file, with `a.b=value` overrides applied. Relative paths start where they are
    written: those in the file at its folder, those in overrides at the current folder.

    Raises ConfigError with one line that says which key of which file is wrong and names the nearest known.
    """
    path = Path(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {str(path)!r} is not TOML: {error}") from None
    except FileNotFoundError:
        raise ConfigError(f"recipe {str(path)!r} does not exist") from None
    except OSError as error:
        raise ConfigError(f"recipe {str(path)!r} cannot be read: {error.strerror}") from None
    return make_recipe(data, overrides, where=str(path), folder=path.parent)


def make_recipe(
    data: Mapping[str, Any], overrides: Sequence[str] = (), *, where: str = "recipe", folder: str | Path = "."
) -> Recipe:
    """A recipe from plain data, whose relative paths start at `folder`; overrides and errors as in `load_recipe`."""
    changed = copy.deepcopy(dict(data))
    _anchor(changed, Path(folder), PATHS)
    for override in overrides:
        keys = _apply(changed, override)
        _anchor(changed, Path(), [path for path in PATHS if path[: len(keys)] == keys])  # those it has set
    try:
        return Recipe.model_validate(changed)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_explain(error)}") from None


PATHS = (
    ("tasks", "train"),
    ("tasks", "heldout"),
    ("model", "id"),
    ("train", "teacher"),
    ("sft", "conversations"),
    ("sandbox", "token_file"),
    ("sandbox", "dockerfile"),
    ("sandbox", "rootfs"),
)
"""The keys of a recipe that hold a path, or may."""


NAMED = (("model", "id"), ("train", "teacher"))
"""Those of them that are names unless they look like a path."""


def _anchor(data: Mapping[str, Any], folder: Path, paths: Sequence[tuple[str, str]]) -> None:
    """Makes those of `paths` that are relative absolute, starting at `folder`."""
    for section, key in paths:
        part = data.get(section)
        if not isinstance(part, dict) or not isinstance(text := part.get(key), str) or not text:
            continue
        try:
            path = folder / Path(text).expanduser()
        except RuntimeError:
            raise ConfigError(f"{section}.{key} = {text!r}: there is no such user's home folder here") from None
        if (section, key) not in NAMED or text.startswith((".", "~")) or ("/" in text and path.is_dir()):
            part[key] = str(path.resolve())  # any other is a name


def _apply(data: dict[str, Any], override: str) -> tuple[str, ...]:
    """Sets one dotted key and returns its parts. Values are TOML; what is not TOML is a string."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"override {override!r}: write it as section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    here: Any = data
    *parents, last = key.strip().split(".")
    for depth, part in enumerate(parents, 1):
        if isinstance(here, dict) and isinstance(here.get(part), str):
            section = _section(parents[:depth])
            if section is not None and issubclass(section, Kind):  # the name alone stands for a section
                here[part] = {"kind": here[part]}
        here = here[_item(here, part, override)] if isinstance(here, list) else here.setdefault(part, {})
        if not isinstance(here, dict | list):
            raise ConfigError(f"override {override!r}: {part!r} is a value, not a section")
    here[_item(here, last, override) if isinstance(here, list) else last] = value
    return (*parents, last)


def _item(items: Sequence[Any], part: str, override: str) -> int:
    """The place in a list that a part of an override's key names."""
    if not part.isdecimal() or int(part) >= len(items):
        known = f"0 to {len(items) - 1}" if items else "but it is empty"
        raise ConfigError(f"override {override!r}: {part!r} is no place in this list, which has {known}")
    return int(part)


def _explain(error: ValidationError) -> str:
    """The first problem, in one line."""
    first = error.errors()[0]
    path = _place(first["loc"])
    if first["type"] == "extra_forbidden":
        section = _section(first["loc"][:-1])
        known = section.model_fields if section else ()
        return f"unknown key {path!r}; {hint(str(first['loc'][-1]), known)}"
    places = {_place(each["loc"]) for each in error.errors()} - {path}
    tail = f" (and {len(places)} more problem{'s' * (len(places) > 1)})" if places else ""
    if first["type"] == "missing":
        return f"{path or 'top level'} is missing{tail}"
    if first["type"] == "value_error":
        return f"{path or 'top level'}: {str(first['msg']).removeprefix('Value error, ')}{tail}"
    if first["type"].startswith("model") and (section := _section(first["loc"])):
        return f"{path} = {first['input']!r} is not a section; its keys are {', '.join(section.model_fields)}{tail}"
    return f"{path or 'top level'} = {first['input']!r} {_wrong(first)}{tail}"


_WRONG = {
    "int": "is not a whole number",
    "float": "is not a number",
    "finite_number": "is not a finite number",
    "bool": "is not true or false",
    "string": "is not a text",
    "tuple": "is not a list",
    "greater_than_equal": "must be at least {ge:g}",
    "greater_than": "must be above {gt:g}",
    "less_than_equal": "must be at most {le:g}",
    "less_than": "must be below {lt:g}",
    "too_short": "must be a list of {min_length}",
    "too_long": "must be a list of {max_length}",
    "model": "is not a section",
    "dict": "is not a table",
}
"""What the kinds of problems that a schema finds begin with -> in words."""


def _wrong(problem: Mapping[str, Any]) -> str:
    """What a value is not, or must be."""
    kind, about = str(problem["type"]), problem.get("ctx", {})
    if kind == "literal_error":
        known = re.findall(r"'([^']*)'", str(about["expected"]))
        return f"is not known; {nearest(str(problem['input']), known)}"
    words = next((words for name, words in _WRONG.items() if kind.startswith(name)), None)
    return words.format(**about) if words else f"cannot be read: {problem['msg']}"


def _place(location: Sequence[Any]) -> str:
    """rewards.terms[1].gate"""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")


def _section(location: Sequence[Any]) -> type[BaseModel] | None:
    """The section class at a path of keys."""
    here: Any = Recipe
    for part in location:
        if isinstance(part, int):
            continue
        field = here.model_fields.get(str(part)) if isinstance(here, type) and issubclass(here, BaseModel) else None
        if field is None:
            return None
        here = field.annotation
        for argument in getattr(here, "__args__", ()):
            if isinstance(argument, type) and issubclass(argument, BaseModel):
                here = argument
    return here if isinstance(here, type) and issubclass(here, BaseModel) else None
