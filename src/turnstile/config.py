"""The recipe of a run: its schema, TOML files, dotted overrides, and errors that name the nearest known word.

`kind` names a function (see `lookup.KINDS`) and every other key of that section is one of its keyword arguments, so a
new algorithm adds no configuration class. Nothing here imports torch.
"""

from __future__ import annotations

import copy
import functools
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from turnstile.errors import ConfigError
from turnstile.hints import hint
from turnstile.lookup import resolve
from turnstile.validation import first_problem, format_place, wrong

Share = Annotated[float, Field(ge=0, lt=1)]
EndRule = Literal["grade", "zero", "half", "mask", "drop"]


def _tuples(fields: Mapping[str, FieldInfo], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data with lists converted to tuples for fields of tuple type, since TOML and JSON have only lists."""

    def takes_tuple(field: FieldInfo | None) -> bool:
        hint = None if field is None else field.annotation
        return any(get_origin(one) is tuple for one in (hint, *get_args(hint)))

    return {k: tuple(v) if isinstance(v, list) and takes_tuple(fields.get(k)) else v for k, v in data.items()}


class Section(BaseModel):
    """A part of a recipe that rejects unknown keys.

    If a table that names a function has no `kind`, its knobs are those of the default function: `credit = { scale =
    "none" }` configures `grpo`.
    """

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

    A string stands for a section with only a `kind`: `sandbox = "bubblewrap"`.
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

    def split(self, knob: str) -> tuple[Any, Kind]:
        """Return the value of one knob (None if it is not set), and the kind without that knob."""
        others = self.knobs
        found = others.pop(knob, None)
        return found, Kind.model_validate({"kind": self.kind, **others})


class ModelConfig(Section):
    """The policy's network, and which of its weights are trained."""

    id: str = "smollm2-135m"  # hub id, packaged name or folder (write folders with ./ in front)
    device: str = "auto"  # "auto" (CUDA if present), "cpu" or "cuda:N"
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"  # dtype of the weights; "auto" is float32
    train: Literal["all", "top", "lora"] = "all"  # all weights, the last layers, or LoRA adapters
    top_layers: int = Field(0, ge=0)  # with "top" and "lora": train only the last N layers (0: adapters on all)
    lora_rank: int = Field(16, ge=1)  # rank of the adapters
    lora_alpha: int = Field(32, ge=1)  # adapters are scaled by lora_alpha / lora_rank
    threads: int = Field(0, ge=0)  # CPU threads for torch (0: torch's default)


class EngineConfig(Kind):
    """The engine that samples: `transformers`, with the keys below, or `openai`, servers with knobs of their own."""

    kind: str = "transformers"  # "transformers" (in this process) or "openai" (servers)
    deterministic: bool = False  # bit-reproducible sampling; slower
    max_batch: int = Field(64, ge=1)  # requests sampled together in one forward pass
    memory_mb: int = Field(4096, ge=64)  # memory for cached keys and values
    reconnect_timeout: float = Field(300.0, ge=0)  # seconds to wait when no server can be reached
    speculative_tokens: int = Field(32, ge=0)  # tokens guessed ahead per pass from n-grams (0: off)
    pack_weights: bool = True  # CPU only: sample from reordered copies of the weights; faster, twice the memory

    @model_validator(mode="after")
    def _known(self) -> EngineConfig:
        if self.in_process and (extra := next(iter(self.knobs), None)):
            raise ValueError(f"unknown key {extra!r}; {hint(extra, type(self).model_fields)}")
        return self

    @property
    def in_process(self) -> bool:
        """Whether the model is sampled in this process."""
        return self.kind == "transformers"


class AgentConfig(Section):
    """Rendering of messages to token ids, and parsing of sampled text to messages."""

    renderer: Kind = Kind(kind="chat")  # messages to token ids
    parser: Kind = Kind(kind="hermes")  # sampled text to a message with tool calls


class SamplingConfig(Section):
    """Sampling in training. Evaluation uses the same settings, except for `eval.temperature`."""

    temperature: float = Field(1.0, ge=0)  # divides the logits, in the loss too
    top_k: int = Field(0, ge=0)  # sample from the k most likely tokens (0: off)
    top_p: float = Field(1.0, gt=0, le=1)  # sample from the smallest set of tokens with this probability mass (1: off)
    min_p: float = Field(0.0, ge=0, le=1)  # drop tokens less likely than min_p times the most likely one (0: off)
    max_tokens: int = Field(256, ge=1)  # sampled tokens per turn
    regex: str = ""  # regular expression that every turn must match (extra `grammar`)
    grammar: str = ""  # Lark grammar that every turn must match (extra `grammar`)


class TasksConfig(Section):
    """Training and held-out tasks."""

    train: str = ""  # JSON-lines file of training tasks
    heldout: str = ""  # JSON-lines file of held-out tasks; it shares no task with `train`
    limit: int = Field(0, ge=0)  # train on the first N tasks only (0: all)
    allow_failed: bool = False  # use tasks that `turnstile tasks check` rejected
    where: dict[str, Any] = Field(default_factory=dict)  # keep tasks whose data equals these values (numbers: at most)


class EpisodeConfig(Section):
    """Limits of an episode, and retries after failures."""

    turns: int = Field(8, ge=1)  # turns per episode
    tokens: int = Field(0, ge=0)  # sampled tokens per episode (0: no limit)
    context: int = Field(0, ge=0)  # tokens in the context (0: the model's window)
    seconds: float = Field(300.0, gt=0)  # wall-clock seconds per episode
    measure_seconds: float = Field(3600.0, gt=0)  # seconds for grading at the end; beyond them the attempt has failed
    unparsed: int = Field(0, ge=0)  # stop after N turns in a row that cannot be parsed (0: never)
    retries: int = Field(2, ge=0)  # attempts repeated after an infrastructure failure
    concurrent: int = Field(64, ge=1)  # episodes played at the same time


class RolloutConfig(Section):
    """Episodes of a training step."""

    tasks_per_step: int = Field(6, ge=1)  # groups per step, one for each task
    group_size: int = Field(8, ge=1)  # attempts per task, compared with each other
    max_staleness: int = Field(0, ge=0)  # steps that another process may play ahead of training (0: synchronous)
    straggler_factor: float = Field(0.0, ge=0)  # stop episodes at N times their task's longest so far (0: never)
    max_failures: int = Field(10, ge=0)  # attempts given up for errors in an environment's code before the run stops


class OnStopConfig(Section):
    """Rules by the reason why an episode stopped.

    A rule can `grade` the episode, score it `zero` or `half`, `mask` it from the gradient, or `drop` it from the
    statistics too.
    """

    submitted: EndRule = "grade"  # the agent submitted
    done: EndRule = "grade"  # the environment ended it
    turns: EndRule = "grade"  # no turns left
    context: EndRule = "grade"  # the context is full
    tokens: EndRule = "grade"  # the token budget is spent
    timeout: EndRule = "mask"  # out of time
    parse: EndRule = "grade"  # too many turns could not be parsed


class GateConfig(Section):
    """The threshold that a term must pass for rewards of lower levels to count (G-RA)."""

    value: float  # threshold
    compare: Literal["gt", "ge"] = "gt"  # greater than, or at least


class TermConfig(Kind):
    """One named reward. All other keys are knobs of its function."""

    name: str = ""  # default: the kind
    scope: Literal["", "episode", "turn"] = ""  # default: the function's own
    level: int = 0  # priority: gates of higher levels can withhold this term
    weight: float = 1.0  # multiplies the reward
    gate: GateConfig | None = None  # lower levels count only if this term passes it


class RewardsConfig(Section):
    """Reward terms and how they are combined."""

    compose: Literal["gated", "direct"] = "gated"  # "gated" (G-RA) or "direct" accumulation (D-RA)
    terms: tuple[TermConfig, ...] = (TermConfig(kind="signal", name="outcome", level=1),)  # default: the environment's


class JudgeConfig(Section):
    """The model that graders ask, on an OpenAI-compatible server or, without a `url`, loaded into this process."""

    model: str = ""  # as model.id; with a url the server's name for it (default: the only one there)
    url: str | tuple[str, ...] = ""  # like http://127.0.0.1:8000/v1; several serve the same model
    key: str = "OPENAI_API_KEY"  # environment variable that holds the server's key
    temperature: float = Field(0.0, ge=0)  # 0: greedy
    max_tokens: int = Field(512, ge=1)  # tokens per answer
    concurrent: int = Field(16, ge=1)  # questions asked at the same time
    timeout: float = Field(120.0, gt=0)  # seconds per answer
    retries: int = Field(4, ge=0)  # requests repeated when the server does not answer
    constrained: bool = False  # force a parsable answer: vLLM, turnstile serve, or here with the extra `grammar`
    chars: int = Field(20_000, ge=1000)  # characters of an episode to show; the middle of longer ones is cut

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses of the servers, if any."""
        return tuple(filter(None, (self.url,) if isinstance(self.url, str) else self.url))


class SftConfig(Section):
    """Supervised learning before RL, from oracle episodes, conversations, or both. Without either it is skipped."""

    demos: int = Field(0, ge=0)  # oracle episodes to play and learn from
    demonstrator: Kind = Kind(kind="swe")  # the oracle that plays them
    conversations: str = ""  # file of conversations: from `turnstile conversations import`, or in a format it reads
    too_long: Literal["drop", "cut"] = "drop"  # conversations beyond the context: drop them, or keep their first turns
    epochs: int = Field(1, ge=1)  # passes over the demonstrations
    batch: int = Field(8, ge=1)  # episodes per optimiser step
    lr: float = Field(4e-4, gt=0)  # learning rate
    warmup: int = Field(4, ge=0)  # optimiser steps of linear warmup
    key_weight: float = Field(1.0, gt=0)  # weight of tokens that decide an action (others: 1)

    @property
    def wanted(self) -> bool:
        """Whether there are demonstrations or conversations to learn from."""
        return bool(self.demos or self.conversations)


class TrainConfig(Section):
    """The update."""

    steps: int = Field(16, ge=0)  # training steps
    epochs: int = Field(1, ge=1)  # passes over a step's rows
    minibatches: int = Field(1, ge=1)  # optimiser steps per pass
    max_tokens_per_microbatch: int = Field(8192, ge=64)  # distinct tokens per forward pass; gradients accumulate
    checkpointing: bool = False  # recompute activations in the backward pass: less memory, more time
    lr: float = Field(1e-5, gt=0)  # learning rate of AdamW
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # learning-rate schedule after warmup
    warmup: int = Field(0, ge=0)  # optimiser steps of linear warmup
    betas: tuple[Share, Share] = (0.9, 0.999)  # AdamW's betas, each in [0, 1)
    weight_decay: float = Field(0.0, ge=0)  # AdamW's weight decay
    clip: float = Field(1.0, gt=0)  # maximum gradient norm
    drop_zero_advantage_groups: bool = True  # leave out groups without any advantage, in the loss's denominator too
    reference_every: int = Field(0, ge=0)  # steps after which the current policy becomes the reference (0: never)
    teacher: str = ""  # model for the loss `distill`: as model.id, with the same vocabulary
    checkpoint_every: int = Field(10, ge=0)  # steps between checkpoints (0: only the last)
    keep: int = Field(2, ge=1)  # newest checkpoints to keep
    keep_best: str = ""  # also keep the best checkpoint by this metric, like reward/total or heldout/resolution


class RehearsalConfig(Section):
    """Samples of the initial policy that every step also trains on, against forgetting. None without `tasks`."""

    tasks: int = Field(0, ge=0)  # training tasks to play before the first step (0: off)
    attempts: int = Field(1, ge=1)  # episodes per task
    least: float | None = None  # keep episodes with at least this outcome (default: all)
    batch: int = Field(8, ge=1)  # stored episodes per step
    loss: Kind = Kind(kind="forward_kl")  # loss on them, with a `coef` (default: 0.1)


class ReplayBufferConfig(Section):
    """Earlier attempts with a positive advantage that are trained on again, rescored by `recalibrated` each time."""

    size: int = Field(0, ge=0)  # attempts kept, oldest out first (0: off)
    batch: int = Field(8, ge=1)  # attempts taken per step
    uses: int = Field(2, ge=1)  # times that an attempt may be taken


class EvalConfig(Section):
    """Evaluation on held-out tasks."""

    tasks: int = Field(0, ge=0)  # held-out tasks (0: all)
    samples: int = Field(1, ge=1)  # episodes per task
    baseline_tasks: int = Field(0, ge=0)  # tasks for the untouched model, whose episodes are long (0: as `tasks`)
    before: bool = True  # evaluate before RL too: the untouched model, and after the warm start
    every: int = Field(0, ge=0)  # steps between evaluations during training (0: none)
    temperature: Annotated[float, Field(ge=0)] | None = None  # default: that of [sampling]
    policies: dict[str, Kind] = Field(default_factory=dict)  # name -> policy to compare with


class Recipe(Section):
    """Everything a run needs. See `recipes/` for examples and docs/configuration.md for all keys.

    A recipe file may begin with `base = "other.toml"`; it then inherits everything that it does not set itself.
    """

    name: str = "run"  # the run's folder is runs/NAME
    seed: int = Field(0, ge=0)  # seed of all random numbers
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    agent: AgentConfig = AgentConfig()
    sampling: SamplingConfig = SamplingConfig()
    sandbox: Kind = Kind(kind="local")  # where code runs
    env: Kind = Kind(kind="swe")  # what the agent acts in
    tasks: TasksConfig = TasksConfig()
    episode: EpisodeConfig = EpisodeConfig()
    rollout: RolloutConfig = RolloutConfig()
    on_stop: OnStopConfig = OnStopConfig()
    rewards: RewardsConfig = RewardsConfig()
    graders: tuple[Kind, ...] = ()  # examine finished episodes and write signals that rewards read
    judge: JudgeConfig = JudgeConfig()
    hint: Kind | None = None  # text that training prompts show besides the task, faded out over steps
    credit: Kind = Kind(kind="grpo")  # advantage estimator
    loss: Kind = Kind(kind="ppo")  # policy loss
    loss_multipliers: tuple[Kind, ...] = ()  # multiply each token's loss: off-policy corrections, token selection
    regularizers: tuple[Kind, ...] = ()  # further losses, each with a `coef`
    rehearsal: RehearsalConfig = RehearsalConfig()
    replay_buffer: ReplayBufferConfig = ReplayBufferConfig()
    loss_aggregation: Kind = Kind(kind="token")  # weights of tokens' losses: by token, turn, trajectory, or constant
    sft: SftConfig = SftConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    trackers: tuple[Kind, ...] = (Kind(kind="jsonl"), Kind(kind="console"))  # where metrics go


def load_recipe(path: str | Path, overrides: Sequence[str] = (), *, env: object = None) -> Recipe:
    """Return the recipe in a TOML file after applying overrides such as `a.b=value`. See `make_recipe`.

    Relative paths in a file are relative to its folder, and those in overrides to the current folder. Raises
    ConfigError with one line that says which key of which file is wrong and names the nearest known one.
    """
    return make_recipe(_read(Path(path)), overrides, where=str(path), folder=Path(path).parent, env=env)


def make_recipe(
    data: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    where: str = "recipe",
    folder: str | Path = ".",
    env: object = None,
) -> Recipe:
    """Return a recipe from plain data. Paths in the data are relative to `folder`.

    Overrides and errors are as in `load_recipe`. `base` names a recipe file that provides everything that the data does
    not set, and may itself have a `base`. Tables are merged key by key, except that lists and tables with a different
    `kind` replace the earlier value entirely. Without `rewards.terms` the recipe gets the `default_terms` of its
    environment, or of `env` in its place.
    """
    written = _with_bases(data, where, Path(folder))
    changed: dict[str, Any] = functools.reduce(_merge, (part for _, part in reversed(written)), {})
    for override in sorted(overrides, key=lambda text: not text.lstrip().startswith("env")):  # env may set terms
        if override.lstrip().startswith("rewards."):
            _take_default_terms(changed, env)
        keys = _apply(changed, override)
        _anchor(changed, Path(), [path for path in PATHS if path[: len(keys)] == keys])  # the paths that it has set
    _take_default_terms(changed, env)
    try:
        return Recipe.model_validate(changed)
    except ValidationError as error:
        place = error.errors()[0]["loc"]
        file, _ = max(written, key=lambda part: _depth(part[1], place))  # the first of equals, so the recipe itself
        raise ConfigError(f"{file}: {_explain(error, changed)}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {str(path)!r} is not TOML: {error}") from None
    except FileNotFoundError:
        raise ConfigError(f"recipe {str(path)!r} does not exist") from None
    except OSError as error:
        raise ConfigError(f"recipe {str(path)!r} cannot be read: {error.strerror}") from None


def _with_bases(data: Mapping[str, Any], where: str, folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the data followed by that of its bases, each as (file, its data with absolute paths)."""
    found: list[tuple[str, dict[str, Any]]] = []
    while True:
        own = copy.deepcopy(dict(data))
        base = own.pop("base", None)
        _anchor(own, folder, PATHS)
        found.append((where, own))
        if base is None:
            return found
        if not isinstance(base, str):
            raise ConfigError(f"{where}: base = {base!r} is not the path of a recipe")
        path = folder / Path(base).expanduser()
        files = [file for file, _ in found]
        if path.resolve() in [Path(file).resolve() for file in files]:
            raise ConfigError(f"{where}: base = {base!r} closes a circle: {' -> '.join([*files, str(path)])}")
        try:
            data, where, folder = _read(path), str(path), path.parent
        except ConfigError as error:
            raise ConfigError(f"{where}: base = {base!r}: {error}") from None


def _merge(below: Mapping[str, Any], above: Mapping[str, Any], place: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return `below` with the keys of `above` merged into it. `place` is the path of both tables in the recipe."""
    result = dict(below)
    for key, value in above.items():
        under, here = below.get(key), (*place, key)
        if isinstance(under, dict) and isinstance(value, str):
            value = {"kind": value}  # a string stands for a table with only a kind
        elif isinstance(under, str) and isinstance(value, dict):
            under = {"kind": under}
        result[key] = value
        if isinstance(under, dict) and isinstance(value, dict):
            kind = under.get("kind", _default_kind(here))
            if value.get("kind", kind) == kind:  # otherwise the knobs below belong to another function
                result[key] = _merge(under, value, here)
    return result


def _default_kind(place: Sequence[str]) -> str | None:
    """Return the default kind of the table at `place`, or None if it has none."""
    section = _section(place[:-1])
    field = None if section is None else section.model_fields.get(place[-1])
    return getattr(field and field.default, "kind", None)


def _depth(data: Any, place: Sequence[Any]) -> int:
    """Return how many leading keys of `place` exist in the data."""
    for depth, key in enumerate(place):
        inside = isinstance(data, list) and isinstance(key, int) and key < len(data)
        if not inside and not (isinstance(data, dict) and key in data):
            return depth
        data = data[key]
    return len(place)


def _take_default_terms(data: dict[str, Any], env: object) -> None:
    """Give a recipe without reward terms the defaults of its environment, if that has any and can be imported."""
    rewards, kind = data.get("rewards", {}), data.get("env", {})
    kind = kind.get("kind", _default_kind(("env",))) if isinstance(kind, dict) else kind
    if not isinstance(rewards, dict) or "terms" in rewards:
        return
    try:
        found = resolve("env", str(kind)) if env is None else getattr(env, "func", env)  # the class of a partial
    except ConfigError:
        return  # reported when the recipe is checked
    if terms := getattr(found, "default_terms", ()):
        data["rewards"] = {**rewards, "terms": copy.deepcopy(list(terms))}


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
"""The keys of a recipe that hold or may hold a path."""


NAMED = (("model", "id"), ("train", "teacher"))
"""Keys of `PATHS` whose values are names unless they look like a path."""


def _anchor(data: Mapping[str, Any], folder: Path, paths: Sequence[tuple[str, str]]) -> None:
    """Make the relative paths at the keys `paths` absolute, resolving them from `folder`."""
    for section, key in paths:
        part = data.get(section)
        if not isinstance(part, dict) or not isinstance(text := part.get(key), str) or not text:
            continue
        try:
            path = folder / Path(text).expanduser()
        except RuntimeError:
            raise ConfigError(f"{section}.{key} = {text!r}: there is no such user's home folder here") from None
        if (section, key) not in NAMED or text.startswith((".", "~")) or ("/" in text and path.is_dir()):
            part[key] = str(path.resolve())  # any other value is a name


def _apply(data: dict[str, Any], override: str) -> tuple[str, ...]:
    """Set one dotted key and return its parts. The value is parsed as TOML, or taken as a string if that fails."""
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
            if section is not None and issubclass(section, Kind):  # a string stands for a section with only a kind
                here[part] = {"kind": here[part]}
        here = here[_item(here, part, override)] if isinstance(here, list) else here.setdefault(part, {})
        if not isinstance(here, dict | list):
            raise ConfigError(f"override {override!r}: {part!r} is a value, not a section")
    here[_item(here, last, override) if isinstance(here, list) else last] = value
    return (*parents, last)


def _item(items: Sequence[Any], part: str, override: str) -> int:
    """Return the list index that a part of an override's key gives."""
    if not part.isdecimal() or int(part) >= len(items):
        known = f"0 to {len(items) - 1}" if items else "but it is empty"
        raise ConfigError(f"override {override!r}: {part!r} is no place in this list, which has {known}")
    return int(part)


def _explain(error: ValidationError, data: Mapping[str, Any]) -> str:
    """Return one line about the first problem."""
    place, problems, others = first_problem(error, data)
    path, kind = format_place(place) or "top level", problems[0]["type"]
    if kind == "extra_forbidden":
        section = _section(place[:-1])
        return f"unknown key {path!r}; {hint(str(place[-1]), section.model_fields if section else ())}"
    tail = f" (and {others} more problem{'s' * (others > 1)})" if others else ""
    if kind == "value_error":
        return f"{path}: {problems[0]['msg'].removeprefix('Value error, ')}{tail}"
    if kind.startswith("model") and (section := _section(place)):
        return (
            f"{path} = {problems[0]['input']!r} is not a section; its keys are {', '.join(section.model_fields)}{tail}"
        )
    return f"{path} {wrong(problems)}{tail}"


def _section(location: Sequence[Any]) -> type[BaseModel] | None:
    """Return the section class at a path of keys, or None if there is none."""
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
