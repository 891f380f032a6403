"""Evaluation over a real socket, and a run whose rewards a judge gives; judged again when the judge is gone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import guess_run
import turnstile
from modelserver import MODELS, bare_server, in_thread
from networks import network
from turnstile.agents.base import Scaffold
from turnstile.agents.parsing.lines import LineParser
from turnstile.agents.renderer import LinesRenderer
from turnstile.cli.main import run as run_command
from turnstile.config import Recipe, make_recipe
from turnstile.errors import ConfigError, EngineError
from turnstile.evaluation.rescore import rescore
from turnstile.gateway.server import EngineServer
from turnstile.records.record import read_record
from turnstile.runs.evaluate import evaluate
from turnstile.runs.run_folder import open_run, read_recipe
from turnstile.wiring.agent import make_agent
from turnstile.wiring.learning import make_learner
from turnstile.wiring.world import make_scorer


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    body = guess_run.recipe(tmp_path_factory.mktemp("inputs"), steps=2, epochs=1, minibatches=1).model_dump(mode="json")
    return make_recipe(body, ["sft.demos=0", "eval.before=false", "eval.every=0", "credit=grpo"])


def changed(recipe: Recipe, *overrides: str) -> Recipe:
    return make_recipe(recipe.model_dump(mode="json"), overrides)


@pytest.fixture(scope="module")
def served(recipe: Recipe) -> Iterator[str]:
    """The recipe's model behind this project's server."""
    agent = make_agent(recipe)
    server = EngineServer(
        agent.engine,
        model="guesser",
        scaffold=Scaffold(LinesRenderer(agent.tokenizer), LineParser()),
        tokenizer=agent.tokenizer,
        context=256,
    )
    with in_thread(lambda: server.listening("127.0.0.1", 0)) as url:
        yield url


def test_a_family_that_only_servers_sample_from_is_loaded_all_the_same(recipe: Recipe, tmp_path: Path) -> None:
    """What trains it goes row by row; only who asks for this process's engine is refused."""
    network("gemma2", head_dim=8, sliding_window=4).save_pretrained(tmp_path)
    agent = make_agent(recipe)
    agent.tokenizer.save_pretrained(tmp_path)
    other = make_agent(changed(recipe, f'model.id="{tmp_path}"'))
    assert not make_learner(recipe, other).shares
    with pytest.raises(ConfigError, match="model family 'gemma2' has layers that are not plain causal attention"):
        _ = other.engine


def sampled(run: Path) -> list[Any]:
    entries = read_record(run, phase="eval")
    return [[turn.completion.token_ids.tolist() for turn in one.turns] for e in entries for one in e.group.trajectories]


def test_over_a_server_the_same_episodes_are_played_as_in_process(recipe: Recipe, served: str, tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    for run in (near, far):
        open_run(run, recipe, fresh=False)
    evaluate(recipe, run=near, model=recipe.model.id, samples=2)
    found = evaluate(changed(recipe, "engine.kind=openai", f'engine.url="{served}"'), run=far, samples=2)
    assert list(found) == ["server"]
    assert sampled(far) == sampled(near) != []


def test_several_servers_are_one(recipe: Recipe, served: str, tmp_path: Path) -> None:
    gone = served.replace("127.0.0.1", "127.0.0.9")
    both = changed(recipe, "engine.kind=openai", f'engine.url=["{gone}", "{served}"]', "engine.model=guesser",
                   "engine.retries=0")  # fmt: skip
    found = evaluate(both, samples=1)
    assert [result.outcome is not None for result in found["guesser"]] == [True, True]


async def halves(request: web.Request) -> web.StreamResponse:
    """A model that plays the guessing game well, and knows its conversation alone."""
    messages = (await request.json())["messages"]
    low, high = map(int, re.findall(r"from (\d+) to (\d+)", messages[0]["content"])[0])
    for said, answer in zip(messages[1::2], messages[2::2], strict=True):
        number = int(said["content"].split()[-1])
        low, high = (number + 1, high) if answer["content"] == "higher" else (low, number - 1)
    choice = {"message": {"content": f"guess {(low + high) // 2}"}, "finish_reason": "stop"}
    return web.json_response({"choices": [choice]})


def test_a_server_of_messages_plays_without_a_tokenizer(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    open_run(run, recipe, fresh=False)
    with in_thread(lambda: bare_server({"/v1/models": MODELS, "/v1/chat/completions": halves})) as url:
        wanted = ["engine.kind=openai", f'engine.url="{url}"', "engine.mode=text", "engine.model=m", "model.id=none"]
        found = evaluate(changed(recipe, *wanted, "sampling.top_k=0"), run=run, samples=2)
    assert [result.rates for result in found["m"]] == [{"resolution": True}] * 4
    assert run_command(["rollout", "show", str(run), "--label", "m"]) == 0
    shown = capsys.readouterr().out
    assert "[user]\nFind the number from 1 to 15.\n\nCommands: guess NUMBER\n[assistant]" in shown
    assert "guess 8" in shown


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["engine.kind=openai"], "'openai' needs engine.url"),
        (["engine.kind=openai", "engine.url=http://127.0.0.1:1/v1", "engine.timout=3"], "did you mean 'timeout'"),
    ],
)
def test_a_server_that_cannot_be_had_is_one_line(recipe: Recipe, overrides: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        evaluate(changed(recipe, *overrides))


def test_a_dead_server_is_an_error_and_no_score(recipe: Recipe) -> None:
    dead = changed(recipe, "engine.kind=openai", "engine.url=http://127.0.0.1:1/v1", "engine.retries=0")
    with pytest.raises(EngineError, match="does not answer"):
        evaluate(dead)
    with pytest.raises(ConfigError, match=r"that of a server is named with engine.model=x"):
        evaluate(dead, model="x")


def test_what_cannot_train_is_refused_before_anything_is_loaded(recipe: Recipe, tmp_path: Path) -> None:
    there = "engine.url=http://127.0.0.1:1/v1"
    for overrides, line in (
        (["engine.kind=openai"], "engine.url is missing"),
        (["engine.kind=openai", there, "engine.mode=text"], "engine.mode = 'text' is for evaluation and judges"),
        (["engine.kind=openai", there, "engine.timout=3"], "did you mean 'timeout'"),
        (["engine.kind=scripted"], "engine.kind = 'scripted' cannot train"),
    ):
        with pytest.raises(ConfigError, match=line):
            turnstile.train(changed(recipe, *overrides), run=tmp_path / "run")
    with pytest.raises(ConfigError, match="unknown key 'memry_mb'; did you mean 'memory_mb'"):
        changed(recipe, "engine.memry_mb=5")


JUDGED = [
    'graders=[{kind="clock"}, {kind="rubric", criteria={short="Is it short?", low="Are the numbers low?"}}]',
    'rewards.terms=[{kind="rubric", level=1, weights={low=3.0}}, {kind="tool_bonus", steps=4}]',
    "train.drop_zero_advantage_groups=false",
]


def test_a_run_is_judged_by_a_model_and_again_without_it(recipe: Recipe, tmp_path: Path) -> None:
    asked = 0

    async def scores(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        text = (await request.json())["messages"][0]["content"]
        assert "[user]\nFind the number from 1 to 15." in text
        content = json.dumps({"short": 5, "low": text.count("guess") % 6})
        choice = {"message": {"content": f"Well. {content}"}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice]})

    run = tmp_path / "run"
    with in_thread(lambda: bare_server({"/v1/models": MODELS, "/v1/chat/completions": scores})) as url:
        turnstile.train(changed(recipe, *JUDGED, f'judge.url="{url}"', "judge.key=''", "judge.retries=0"), run=run)
    assert 0 < asked <= 2 * guess_run.GROUPS * guess_run.ATTEMPTS + 2
    assert len((run / "verdicts.jsonl").read_text().splitlines()) == asked
    entries = list(read_record(run, phase="train"))
    for entry in entries:
        for trajectory, score in zip(entry.group.trajectories, entry.scores, strict=True):
            verdict = trajectory.signals["rubric"]
            assert score.outcome == {"agent": pytest.approx((verdict["short"] + 3 * verdict["low"]) / 4)}
            assert trajectory.signals["training_step"] == entry.step
    plain = make_scorer(read_recipe(run, ["rewards.terms.0.weights.low=0.0"]))
    again = [score.outcome for item in rescore(entries, plain) for score in item.scores]
    assert again == [{"agent": 1.0}] * len(again)


def test_a_judge_must_be_named_before_anything_is_loaded(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"grader kind 'rubric' asks a model: name it under \[judge\]"):
        turnstile.train(changed(recipe, *JUDGED), run=tmp_path / "run")
    typos = {'[{kind="clok"}]': "did you mean 'clock'", '[{kind="judge", bst=1}]': "did you mean 'best'"}
    for graders, line in typos.items():
        with pytest.raises(ConfigError, match=line):
            turnstile.train(changed(recipe, f"graders={graders}"), run=tmp_path / "run")
