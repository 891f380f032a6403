from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from turnstile.config import Kind, Recipe, load_recipe, make_recipe
from turnstile.errors import ConfigError

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.toml"))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "mine"\n[model]\nid = "tiny"\n[tasks]\ntrain = "data/train.jsonl"\n'
        '[credit]\nkind = "grpo"\nscale = "none"\n'
        '[rewards]\nterms = [{ kind = "signal", name = "won", level = 1, gate = { value = 0.5 } }]\n'
    )
    return path


def fails(path: Path, *overrides: str) -> str:
    """The one line a user reads."""
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_recipe_fills_in_defaults_and_keeps_knobs(recipe: Path) -> None:
    found = load_recipe(recipe)
    assert (found.name, found.model.id, found.rollout.group_size) == ("mine", "tiny", 8)
    assert (found.credit.kind, found.credit.knobs) == ("grpo", {"scale": "none"})
    (term,) = found.rewards.terms
    assert (term.name, term.level, term.gate and term.gate.value, term.knobs) == ("won", 1, 0.5, {})


def test_paths_start_where_they_are_written(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = recipe.parent / "elsewhere"
    (here / "models" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(here)
    found = load_recipe("../mine.toml", ["tasks.heldout=../h.jsonl", "model.id=models/tiny"])
    assert found.tasks.train == str(recipe.parent / "data" / "train.jsonl")
    assert found.tasks.heldout == str(recipe.parent / "h.jsonl")
    assert found.model.id == str(here / "models" / "tiny")
    whole = load_recipe(recipe, ['tasks={ train = "t.jsonl" }', "model.id=./none"])
    assert (whole.tasks.train, whole.tasks.heldout) == (str(here / "t.jsonl"), "")
    assert whole.model.id == str(here / "none")
    assert make_recipe({"tasks": {"train": "t.jsonl"}}).tasks.train == str(here / "t.jsonl")


def test_names_of_models_and_what_is_not_set_are_no_paths(recipe: Path) -> None:
    assert load_recipe(recipe).tasks.heldout == ""
    assert load_recipe(recipe, ["model.id=org/name"]).model.id == "org/name"
    (recipe.parent / "tiny").mkdir()
    assert load_recipe(recipe).model.id == "tiny"


def test_a_name_in_a_recipe_is_no_folder_of_the_one_who_runs_it(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where it is written does a name with a slash become the path of a folder."""
    recipe.write_text('[model]\nid = "org/name"\n')
    (tmp_path / "here" / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    for overrides in ([], ["train.steps=1"], ["model.device=cpu"]):
        assert load_recipe(recipe, overrides).model.id == "org/name"
    for override in ("model.id=org/name", "model={ id = 'org/name' }"):
        assert load_recipe(recipe, [override]).model.id == str(tmp_path / "here" / "org" / "name")


def test_plain_data_is_not_changed() -> None:
    data = {"tasks": {"train": "t.jsonl"}}
    make_recipe(data, ["tasks.heldout=h.jsonl"])
    assert data == {"tasks": {"train": "t.jsonl"}}


def test_a_kind_without_knobs_is_its_name(recipe: Path) -> None:
    found = load_recipe(recipe, ["sandbox=bubblewrap", 'trackers=["jsonl"]', "eval.policies={ a = 'swe_oracle' }"])
    assert found.sandbox == Kind(kind="bubblewrap")
    assert found.trackers == (Kind(kind="jsonl"),)
    assert found.eval.policies == {"a": Kind(kind="swe_oracle")}


def test_overrides_are_toml_or_else_text(recipe: Path) -> None:
    found = load_recipe(
        recipe,
        ["train.steps=3", "model.id=org/name", "credit.scale='group'", "sandbox.kind=local", "rewards.terms.0.level=2"],
    )
    assert (found.train.steps, found.model.id, found.credit.knobs) == (3, "org/name", {"scale": "group"})
    assert found.rewards.terms[0].level == 2


def test_an_override_is_seen_by_what_reads_the_recipe_again(recipe: Path) -> None:
    found = load_recipe(recipe, ["train.lr=1e-3", "sampling.temperature=0.7"])
    assert make_recipe(found.model_dump(mode="json")) == found


def test_an_unknown_key_names_the_nearest(recipe: Path) -> None:
    assert fails(recipe, "train.stepps=3").endswith("unknown key 'train.stepps'; did you mean 'steps'?")
    assert fails(recipe, "trian.steps=3").endswith("unknown key 'trian'; did you mean 'train'?")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.steps=-1", "train.steps = -1 must be at least 0"),
        ("train.steps=many", "train.steps = 'many' is not a whole number"),
        ("on_stop.turns=burn", "on_stop.turns = 'burn' is not known; known: drop, grade, half, mask, zero"),
        ("sampling.top_p=0", "sampling.top_p"),
        ("train.steps", "write it as section.key=value"),
        ("=3", "write it as section.key=value"),
        ("tasks.train=~nosuchuser/x", "tasks.train = '~nosuchuser/x': there is no such user's home folder"),
        ("model.id.name=x", "'id' is a value, not a section"),
        ('rewards.terms=[{ name = "a" }]', "rewards.terms[0].kind is missing"),
        ("rewards.terms.0.gate.value=high", "rewards.terms[0].gate.value = 'high' is not a number"),
        ("rewards.terms.1.level=1", "'1' is no place in this list, which has 0 to 0"),
        ("rewards.terms.first.level=1", "'first' is no place in this list"),
        ("rewards.terms.0.gate.vlaue=1", "unknown key 'rewards.terms[0].gate.vlaue'; did you mean 'value'?"),
    ],
)
def test_a_wrong_value_says_where_and_what(recipe: Path, override: str, said: str) -> None:
    assert said in fails(recipe, override)


def test_knobs_alone_are_those_of_the_default_kind(recipe: Path) -> None:
    found = make_recipe(
        {"credit": {"scale": "none"}}, ["loss.clip_high=0.3", "agent.parser.x=1", "rehearsal.loss.cap=2"]
    )
    assert (found.credit.kind, found.credit.knobs) == ("grpo", {"scale": "none"})
    assert (found.loss.kind, found.loss.knobs) == ("ppo", {"clip_high": 0.3})
    assert (found.agent.parser.kind, found.rehearsal.loss.kind) == ("hermes", "forward_kl")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "does not exist" in fails(tmp_path / "none.toml")
    assert "cannot be read: Is a directory" in fails(tmp_path)
    broken = tmp_path / "broken.toml"
    broken.write_text("[train\n")
    assert "is not TOML" in fails(broken)
    broken.write_bytes(b"\xff\xfe")
    assert "is not TOML" in fails(broken)


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text)


def test_a_base_gives_what_a_recipe_does_not_say(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    write(
        tmp_path / "below",
        first='name = "first"\nseed = 1\n[tasks]\ntrain = "t.jsonl"\n[train]\nsteps = 3\nlr=0.5\nbetas = [0.1, 0.2]\n',
        second='base = "first.toml"\nname = "second"\n[train]\nsteps = 4\n',
    )
    write(tmp_path, third='base = "below/second.toml"\n[train]\nbetas = [0.3, 0.4]\n[tasks]\nheldout = "h.jsonl"\n')
    found = load_recipe(tmp_path / "third.toml", ["train.steps=5"])
    assert (found.name, found.seed) == ("second", 1)
    assert (found.train.steps, found.train.lr, found.train.betas) == (5, 0.5, (0.3, 0.4))  # a list is replaced whole
    assert found.tasks.train == str(tmp_path / "below" / "t.jsonl")
    assert found.tasks.heldout == str(tmp_path / "h.jsonl")
    assert make_recipe({"base": "third.toml", "name": "fourth"}, folder=tmp_path).train.lr == 0.5


@pytest.mark.parametrize(
    ("below", "above", "kind", "knobs"),
    [
        ('{ kind = "gae", lam = 0.5 }', '{ kind = "gae", gamma = 0.9 }', "gae", {"lam": 0.5, "gamma": 0.9}),
        ('{ kind = "gae", lam = 0.5 }', "{ gamma = 0.9 }", "gae", {"lam": 0.5, "gamma": 0.9}),
        ('{ kind = "gae", lam = 0.5 }', '{ kind = "rloo" }', "rloo", {}),
        ('{ kind = "gae", lam = 0.5 }', '"rloo"', "rloo", {}),
        ('{ kind = "gae", lam = 0.5 }', '"gae"', "gae", {"lam": 0.5}),
        ('"gae"', "{ gamma = 0.9 }", "gae", {"gamma": 0.9}),
        ('{ scale = "none" }', '{ kind = "grpo", eps = 0.1 }', "grpo", {"scale": "none", "eps": 0.1}),
        ('{ scale = "none" }', '{ kind = "rloo" }', "rloo", {}),
    ],
)
def test_a_table_of_another_kind_replaces_the_whole(
    tmp_path: Path, below: str, above: str, kind: str, knobs: dict[str, Any]
) -> None:
    write(tmp_path, low=f"credit = {below}\n", high=f'base = "low.toml"\ncredit = {above}\n')
    found = load_recipe(tmp_path / "high.toml").credit
    assert (found.kind, found.knobs) == (kind, knobs)


def test_an_error_names_the_file_in_which_the_wrong_key_is(tmp_path: Path) -> None:
    write(
        tmp_path,
        low="[train]\nsteps = 3\nepocs = 2\n",
        high='base = "low.toml"\n[train]\nlr = -1.0\n',
        fine='base = "low.toml"\n',
    )
    assert fails(tmp_path / "fine.toml") == f"{tmp_path}/low.toml: unknown key 'train.epocs'; did you mean 'epochs'?"
    assert fails(tmp_path / "high.toml").startswith(f"{tmp_path}/high.toml: train.lr = -1.0 must be above 0")


def test_a_base_that_cannot_be_had(tmp_path: Path) -> None:
    write(
        tmp_path,
        a='base = "b.toml"\n',
        b='base = "a.toml"\n',
        c='base = "none.toml"\n',
        d="base = 3\n",
        e="base = 'f.toml'",
        f="[train",
    )
    circle = " -> ".join(f"{tmp_path}/{name}.toml" for name in "aba")
    assert fails(tmp_path / "a.toml") == f"{tmp_path}/b.toml: base = 'a.toml' closes a circle: {circle}"
    missing = f"recipe '{tmp_path}/none.toml' does not exist"
    assert fails(tmp_path / "c.toml") == f"{tmp_path}/c.toml: base = 'none.toml': {missing}"
    assert fails(tmp_path / "d.toml") == f"{tmp_path}/d.toml: base = 3 is not the path of a recipe"
    assert "f.toml' is not TOML" in fails(tmp_path / "e.toml")


class Rewarded:
    default_terms = ({"kind": "exact", "level": 2},)


def kinds(recipe: Recipe) -> list[str]:
    return [term.kind for term in recipe.rewards.terms]


def test_a_recipe_without_reward_terms_has_those_of_its_environment(recipe: Path) -> None:
    swe = ["outcome_class", "command_succeeded"]
    assert kinds(make_recipe({})) == kinds(make_recipe({"rewards": {"compose": "direct"}})) == swe
    assert kinds(make_recipe({"env": "guess"})) == ["signal"]
    assert kinds(make_recipe({"env": f"{__name__}:Rewarded"})) == ["exact"]
    assert kinds(make_recipe({}, env=Rewarded)) == kinds(make_recipe({}, env=functools.partial(Rewarded))) == ["exact"]
    assert make_recipe({}, env=object).rewards == Recipe().rewards
    assert make_recipe({"env": "none.such:Env"}).rewards == Recipe().rewards
    assert kinds(load_recipe(recipe)) == ["signal"]  # its own replace them all
    changed = make_recipe({}, ["rewards.terms.1.weight=0.3", "rewards.compose=direct"])
    assert (changed.rewards.compose, [term.weight for term in changed.rewards.terms]) == ("direct", [1.0, 0.3])
    assert kinds(make_recipe({}, ["rewards.terms.0.level=3", "env=guess"])) == ["signal"]
    assert kinds(make_recipe({}, ["rewards.terms=[{ kind = 'exact' }]"])) == ["exact"]
    assert Rewarded.default_terms == ({"kind": "exact", "level": 2},)


def test_several_problems_are_counted_in_one_line(recipe: Path) -> None:
    assert fails(recipe, "train.steps=-1", "rollout.tasks_per_step=0").endswith("(and 1 more problem)")


def test_a_recipe_does_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Recipe().name = "other"  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        Kind(kind="a").kind = "b"  # type: ignore[misc]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_that_ship_are_valid_and_short(path: Path) -> None:
    recipe = load_recipe(path)
    assert Path(recipe.tasks.train).is_file() or not recipe.tasks.train
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) <= 30


def test_a_token_file_is_looked_for_where_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = {"sandbox": {"kind": "remote", "token_file": "token"}}
    assert make_recipe(data, folder="there").sandbox.knobs["token_file"] == str(tmp_path / "there" / "token")
    found = make_recipe(data, ["sandbox.token_file=token"], folder="there")
    assert found.sandbox.knobs["token_file"] == str(tmp_path / "token")


def keys_of(section: type[BaseModel], before: str = "") -> Iterator[str]:
    """Every key of a section and of those below it, by its dotted path."""
    for name, field in section.model_fields.items():
        types = (field.annotation, *get_args(field.annotation))
        below = [each for each in types if isinstance(each, type) and issubclass(each, BaseModel) and each is not Kind]
        yield from keys_of(below[0], f"{before}{name}.") if below else [f"{before}{name}"]


def test_there_are_few_keys() -> None:
    found = list(keys_of(Recipe))
    assert {"name", "train.lr", "engine.max_batch", "rewards.terms.gate.value", "credit"} <= set(found)
    assert len(found) <= 120
