"""Run, parse or look up what the documents contain: their examples, recipes, commands, links and names."""

from __future__ import annotations

import ast
import asyncio
import doctest
import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from helpers import guess_texts, tiny_llama, tiny_tokenizer
from turnstile.cli.main import cli
from turnstile.cli.main import run as run_command
from turnstile.config import load_recipe, make_recipe
from turnstile.envs.check import check_env
from turnstile.records.record import read_record
from turnstile.tasks.demonstration import call
from turnstile.tracking.jsonl import read_metrics
from turnstile.wiring.recipe_check import check_recipe

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "howto" / "examples"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
WALK_TEXTS = ["Commands: left | right", "left", "right", "Say left or right."]


def blocks(language: str) -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for found, text in FENCE.findall(page.read_text(encoding="utf-8")):
            if found == language:
                yield page, text


def lines() -> Iterator[tuple[Path, list[str]]]:
    """Every command of a page's shell blocks, as words."""
    for page, text in blocks("sh"):
        for line in text.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield page, words


def commands() -> Iterator[tuple[Path, list[str]]]:
    """Every `turnstile ...` of a page's shell blocks, as words."""
    yield from ((page, words[1:]) for page, words in lines() if words[0] == "turnstile")


def find(words: list[str]) -> tuple[click.Command, list[str]]:
    """Return the command that the words name, and the words after its name."""
    command: click.Command | None = cli
    while isinstance(command, click.Group) and words:
        command, words = command.get_command(click.Context(command), words[0]), words[1:]
    assert command is not None, f"there is no such command: {words}"
    return command, words


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny network that knows the words of the examples."""
    folder = tmp_path_factory.mktemp("model")
    walk = [f"Go to {place}. You are at {place}." for place in range(-6, 16)]
    words = tiny_tokenizer([*guess_texts(1, 7), *WALK_TEXTS, *walk])
    words.save_pretrained(folder)
    tiny_llama(len(words), hidden=32, layers=7).save_pretrained(folder)
    return str(folder)


def run_example(name: str, *arguments: str) -> dict[str, Any]:
    sys.argv = [name, *arguments]  # put back by the test's monkeypatch
    return runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["example"])
    monkeypatch.syspath_prepend(EXAMPLES)
    return tmp_path


@pytest.mark.slow
def test_the_first_sample_of_the_readme_learns(elsewhere: Path) -> None:
    """Run as written: the packaged model answers far more questions in the last three steps than in the first three."""
    (sample,) = [text for page, text in blocks("python") if page.name == "README.md" and "turnstile.train(" in text]
    exec(compile(sample, "README.md", "exec"), {"__name__": "__main__"})
    solved = [step["rate/resolution"] for step in read_metrics(elsewhere / "runs" / "quiz")]
    assert len(solved) == 12
    assert sum(solved[-3:]) / 3 > sum(solved[:3]) / 3 + 0.2


@pytest.mark.slow
def test_the_environment_of_ones_own_is_trained_in(elsewhere: Path, model: str, capsys: Any) -> None:
    example = run_example("own_environment.py", model)
    run = elsewhere / "runs" / "walk"
    assert "trained" in capsys.readouterr().out
    assert (run / "report.html").is_file()
    demos = list(read_record(run, phase="warmstart"))
    assert len(demos) == example["RECIPE"]["sft"]["demos"]
    assert all(entry.group.trajectories[0].signals["distance"] == 0 for entry in demos)
    assert {entry.step for entry in read_record(run, phase="train")} == {1, 2, 3, 4}


def test_the_environment_of_ones_own_keeps_its_promises() -> None:
    example = runpy.run_path(str(EXAMPLES / "own_environment.py"))
    task = next(task for task in example["TASKS"] if task.id == "walk-2-4")
    right = call("right")
    assert asyncio.run(check_env(example["Walk"], task, actions=[right, right])) == []


@pytest.mark.slow
def test_the_reward_of_ones_own_in_a_recipe(elsewhere: Path, model: str) -> None:
    done = run_command(
        ["train", str(EXAMPLES / "own_reward.toml"), f"model.id={model}", "sft.demos=4", "train.steps=1"]
    )
    assert done == 0
    (demo, *_) = read_record(elsewhere / "runs" / "own-reward", phase="warmstart")
    (score,) = demo.scores
    rounds = len(demo.group.trajectories[0].turns)
    assert score.outcome == {"agent": pytest.approx(1 - (rounds - 1) / 3 if score.gates["quick"] else 0.0)}
    assert set(score.granted) == {"listened"}


@pytest.mark.slow
def test_the_reward_of_ones_own_from_python(elsewhere: Path, model: str) -> None:
    run_example(
        "own_reward.py", str(ROOT / "recipes" / "guess.toml"), f"model.id={model}", "sft.demos=4",
        "train.steps=1", "rollout.tasks_per_step=2", "rollout.group_size=2", "eval.before=false",
    )  # fmt: skip
    (demo, *_) = read_record(elsewhere / "runs" / "guess", phase="warmstart")
    assert set(demo.scores[0].granted) == set()
    assert demo.scores[0].gates == {}


def test_the_loss_of_ones_own(elsewhere: Path, model: str, capsys: Any) -> None:
    run_example("own_loss.py")
    assert capsys.readouterr().out == "soft_clip breaks nothing\nagreed breaks nothing\n"
    shown = (EXAMPLES.parent / "losses.md").read_text(encoding="utf-8")
    code = (EXAMPLES / "own_loss.py").read_text(encoding="utf-8")
    assert all(text in code for page, text in blocks("python") if page.name == "losses.md")
    assert shown.count("```python") == 2
    changes = ["loss=own_loss:soft_clip", 'loss_multipliers=["own_loss:agreed"]', "sft.demos=0", "train.steps=1"]
    few = [
        "rollout.tasks_per_step=2",
        "rollout.group_size=2",
        "eval.before=false",
        "train.drop_zero_advantage_groups=false",
    ]
    recipe = str(ROOT / "recipes" / "guess.toml")
    assert run_command(["train", recipe, f"model.id={model}", *changes, *few, "--run", "own"]) == 0
    lines = (elsewhere / "runs" / "own" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[-1])["loss/agreed"] == pytest.approx(1.0)


@pytest.mark.slow
def test_the_estimator_of_ones_own(elsewhere: Path, model: str, capsys: Any) -> None:
    """Each command of the page does what it says."""
    page = EXAMPLES.parent / "own-estimator.md"
    shown = [text for of, text in blocks("python") if of == page]
    for name, text in zip(("own_estimator.py", "own_critic.py"), shown, strict=True):
        assert text in (EXAMPLES / name).read_text(encoding="utf-8")
    asked = [words for of, words in commands() if of == page]
    assert [words[0] for words in asked] == ["conform", "conform", "lab", "train", "rollout", "train"]
    for words in asked[:3]:
        assert run_command(words) == 0, capsys.readouterr().out
    few = [f"model.id={model}", "sft.demos=0", "train.steps=1", "rollout.tasks_per_step=2", "eval.before=false"]
    few += ["train.drop_zero_advantage_groups=false"]
    for words, run in ((asked[3], "guess"), (asked[5], "critic")):
        recipe, *changes = words[1:]
        assert run_command(["train", str(ROOT / recipe), *changes, *few, "--run", run]) == 0
    assert run_command(asked[4]) == 0
    last = json.loads((elsewhere / "runs" / "critic" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert last["critic/tasks"] == 2.0


def test_the_estimator_of_the_project_in_two_edits(tmp_path: Path) -> None:
    """CONTRIBUTING as written: with the file and the line alone, `conform` knows the new kind at each set of knobs."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Add an estimator")[2]
    file, line = (found for language, found in FENCE.findall(text) if language == "python")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (path,) = re.findall(r"`(src/turnstile/credit/\w+\.py)`", text)
    (tmp_path / path).write_text(file, encoding="utf-8")
    table = tmp_path / "src" / "turnstile" / "lookup.py"
    known = table.read_text(encoding="utf-8")
    assert known.count('    "credit": {\n') == 1
    table.write_text(known.replace('    "credit": {\n', f'    "credit": {{\n{line}'), encoding="utf-8")
    check = (
        "from turnstile.conform.verdicts import conform, ours\n"
        "from turnstile.lab.subjects import declared_subjects\n"
        "for subject in ours():\n"
        "    if 'above_median' in subject.name:\n"
        "        print(subject.name, *(each.standing for each in conform(subject)), sep=', ')\n"
        "print(*(each.label for each in declared_subjects('above_median')), sep=', ')\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", check],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.splitlines() == [
        "credit:above_median" + 7 * ", holds",
        "credit:above_median among=batch, holds, holds, declared, holds, holds, holds, holds",
        "above_median, above_median (among=batch)",
    ]


@pytest.mark.parametrize(
    ("page", "module", "count"),
    [
        ("README.md", "my_advantage", 1),
        ("docs/index.md", "my_advantage", 1),
        ("docs/howto/conform.md", "their_functions", 2),
    ],
)
def test_conform_prints_the_output_of_the_page(page: str, module: str, count: int, capsys: Any) -> None:
    """The page shows the function as its file has it, and the output of each command on it."""
    file = ROOT / page
    shown = [text for of, text in blocks("text") if of == file and text.startswith("1  ")]
    asked = [words for of, words in commands() if of == file and words[1:] and words[1].startswith(f"{module}:")]
    assert len(shown) == len(asked) == count
    for words, text in zip(asked, shown, strict=True):
        assert run_command(words) == 1
        assert "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines()) == text.rstrip()
    code = (EXAMPLES / f"{module}.py").read_text(encoding="utf-8")
    assert all(text in code for of, text in blocks("python") if of == file and "response_mask" in text)


def test_every_recipe_in_a_document_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = list(blocks("toml"))
    assert found
    for page, text in found:
        recipe = tomllib.loads(text)
        for section, key in (("tasks", "train"), ("tasks", "heldout"), ("sft", "conversations")):
            if file := recipe.get(section, {}).get(key):  # which the page's commands would have made
                Path(file).parent.mkdir(parents=True, exist_ok=True)
                Path(file).touch()
        check_recipe(make_recipe(recipe, where=page.name), env=True)


def test_every_command_in_a_document_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(commands())
    assert len(found) > 10
    monkeypatch.chdir(ROOT)
    for _, words in found:
        command, arguments = find(words)
        parameters = command.make_context(command.name, list(arguments)).params
        recipe = parameters.get("recipe") or parameters.get("target") or ""
        if recipe.startswith("recipes/"):
            load_recipe(recipe, parameters["overrides"])


def test_every_block_says_its_language() -> None:
    """A block without a language would escape the tests of this module."""
    known = {"sh", "console", "text", "python", "pycon", "toml", "json"}
    for page in PAGES:
        opening = re.findall(r"^ *```(.*)$", page.read_text(encoding="utf-8"), re.M)[::2]
        assert set(opening) <= known, page.name


def test_every_other_command_in_a_document_is_one() -> None:
    """Targets of the Makefile, and modules and scripts of Python, are there; other programs are few."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    seen = set()
    for page, words in lines():
        match words:
            case ["make", target, *_]:
                assert target in targets, f"{page.name}: {target}"
            case ["python", "-m", module, *_]:
                assert importlib.util.find_spec(module) is not None, f"{page.name}: {module}"
            case ["python", script, *_]:
                assert (ROOT / script).is_file(), f"{page.name}: {script}"
            case _:
                assert words[0] in OTHERS, f"{page.name}: {words}"
        seen.add(words[0])
    assert seen >= {"make", "python"}


OTHERS = {"turnstile", "cd", "scp", "ssh", ".", "tensorboard", "VLLM_SERVER_DEV_MODE=1"}


def test_every_command_in_a_sentence_is_one() -> None:
    found = [
        (page, words)
        for page in PAGES
        for words in re.findall(r"`turnstile ([^`]+)`", FENCE.sub("", page.read_text(encoding="utf-8")))
    ]
    assert len(found) > 50
    for page, text in found:
        command, words = find(text.split())
        options = {option for each in command.params for option in each.opts}
        unknown = {word for word in words if word.startswith("--")} - options
        assert not unknown, f"{page.name}: turnstile {text}"


def test_every_error_in_a_document_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(ROOT)
    found = [part for _, text in blocks("console") for part in re.split(r"^\$ ", text, flags=re.M) if part]
    assert found
    for part in found:
        line, _, printed = part.partition("\n")
        assert run_command(shlex.split(line)[1:]) != 0
        assert capsys.readouterr().err == printed


def test_every_link_leads_somewhere() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", text):
            if "://" not in target:
                file = page.parent / target if target else page
                assert file.exists(), f"{page.name}: {target}"
                assert not anchor or anchor in anchors(file), f"{page.name}: {target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_name_in_the_architecture_is_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > 50
    source = ROOT / "src" / "turnstile"
    for path, name in named:
        files = [file for file in (source / path, *source.glob(f"*/{path}")) if file.is_file()]
        assert files, path
        if name:
            tree = ast.parse(files[0].read_text(encoding="utf-8"))
            defined = {item.name for item in ast.walk(tree) if isinstance(item, DEFINITIONS)} | {"KINDS"}
            assert name in defined, f"{path}::{name}"


DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@pytest.mark.parametrize("page", sorted({page for page, _ in blocks("pycon")}), ids=lambda page: page.stem)
def test_the_numbers_in_a_document_are_right(page: Path) -> None:
    said: list[str] = []
    text = "\n".join(text for of, text in blocks("pycon") if of == page)
    example = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    doctest.DocTestRunner().run(example, out=said.append)
    assert not said, "".join(said)
