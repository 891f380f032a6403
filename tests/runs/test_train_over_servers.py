"""Training over servers: real sockets, and the same run as in this process to the last bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import guess_run
import turnstile
from ends import same_end
from modelserver import MODELS, always, bare_server, in_thread
from turnstile.cli.main import run as command
from turnstile.config import Recipe, make_recipe
from turnstile.errors import ConfigError
from turnstile.gateway.server import EngineServer
from turnstile.records.record import read_record
from turnstile.runs.serve import make_server
from turnstile.wiring.agent import make_agent


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """With the factor that training over servers has anyhow."""
    return guess_run.recipe(tmp_path_factory.mktemp("inputs"), sections={"loss_multipliers": [{"kind": "tis"}]})


@pytest.fixture(scope="module")
def near(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in this process."""
    run = tmp_path_factory.mktemp("near") / "run"
    turnstile.train(recipe, run=run)
    return run


@pytest.fixture
def urls(recipe: Recipe, tmp_path: Path) -> Iterator[list[str]]:
    """Two servers of the model that the recipe starts from."""
    overrides = ["engine.deterministic=true", "model.threads=1", "model.device=cpu"]
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                in_thread(
                    lambda: make_server(recipe.model.id, overrides, renderer="lines", weights_from=tmp_path).listening(
                        "127.0.0.1", 0
                    )
                )
            )
            for _ in range(2)
        ]


def over(recipe: Recipe, urls: list[str], *overrides: str) -> Recipe:
    addresses = ", ".join(f'"{url}"' for url in urls)
    wanted = ["engine.kind=openai", f"engine.url=[{addresses}]", "engine.retries=0", *overrides]
    return make_recipe(recipe.model_dump(mode="json"), wanted)


def sampled(run: Path, phase: str) -> list[Any]:
    """Everything that was recorded of each token."""
    return [
        (e.group.id, turn.completion.token_ids.tolist(), turn.completion.logprobs.tolist(),
         turn.completion.versions.tolist(),
         None if turn.completion.entropies is None else turn.completion.entropies.tolist())
        for e in read_record(run, phase=phase)
        for trajectory in e.group.trajectories
        for turn in trajectory.turns
    ]  # fmt: skip


def test_a_run_over_servers_is_the_same(recipe: Recipe, near: Path, urls: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    turnstile.train(over(recipe, urls), run=run)
    for phase in ("train", "eval"):
        assert sampled(run, phase) == sampled(near, phase) != []
    assert {v for _, _, _, versions, _ in sampled(run, "train") for v in versions} == {0, 1, 2, 3}
    same_end(run, near)
    assert command(["audit", str(run), "--record"]) == 0
    assert not (run / "weights").exists()
    again = tmp_path / "again"
    assert command(["train", "--replay", str(run), "--out", str(again)]) == 0  # without a server


@pytest.mark.parametrize(
    "learns", [["model.train=lora", "model.lora_rank=4"], ["model.train=top", "model.top_layers=1"]]
)
@pytest.mark.slow
def test_servers_sample_with_the_part_of_the_model_that_learns(
    recipe: Recipe, urls: list[str], tmp_path: Path, learns: list[str]
) -> None:
    run = tmp_path / "run"
    short = [
        "train.steps=2",
        "train.epochs=1",
        "train.minibatches=1",
        "eval.every=0",
        "train.drop_zero_advantage_groups=false",
    ]
    turnstile.train(over(recipe, urls[:1], *learns, *short), run=run)
    gaps = [json.loads(line)["policy/logprob_gap"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(gaps) == 2
    assert max(gaps) < 1e-5


@pytest.mark.slow
def test_servers_play_ahead_of_training(recipe: Recipe, urls: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    plain = ["engine.deterministic=false", "rollout.max_staleness=1", "regularizers=[]"]
    turnstile.train(over(recipe, urls, *plain), run=run)
    for entry in read_record(run, phase="train"):
        for trajectory in entry.group.trajectories:
            for turn in trajectory.turns:
                versions = turn.completion.versions
                assert versions.min() >= entry.step - 2  # no older than step s - 1 - ahead
                assert versions.max() <= entry.step - 1
                assert sorted(versions) == versions.tolist()
    assert command(["audit", str(run), "--record"]) == 0
    assert not (run / "weights").exists()


@pytest.mark.slow
def test_a_server_that_cannot_train_is_a_one_line_error(recipe: Recipe, tmp_path: Path) -> None:
    choice = {"token_ids": None, "text": "x", "finish_reason": "stop"}
    answers = {"/v1/models": MODELS, "/v1/completions": always({"choices": [choice]})}
    with (
        in_thread(lambda: bare_server(answers)) as url,
        pytest.raises(ConfigError, match="does not return the ids of sampled tokens"),
    ):
        turnstile.train(over(recipe, [url]), run=tmp_path / "ids")
    agent = make_agent(recipe)
    server = EngineServer(agent.engine, model="m", scaffold=agent.scaffold, tokenizer=agent.tokenizer, context=256)
    with (
        in_thread(lambda: server.listening("127.0.0.1", 0)) as url,
        pytest.raises(ConfigError, match="start turnstile serve with --weights-from"),
    ):
        turnstile.train(over(recipe, [url]), run=tmp_path / "weights")
    with in_thread(
        lambda: make_server(recipe.model.id, renderer="lines", weights_from=tmp_path / "ids").listening("127.0.0.1", 0)
    ) as url:
        for ahead in (0, 1):
            with pytest.raises(ConfigError, match=r"is not below .*, the only place that weights are loaded from"):
                turnstile.train(
                    over(recipe, [url], f"rollout.max_staleness={ahead}", "engine.deterministic=false"),
                    run=tmp_path / f"elsewhere-{ahead}",
                )
