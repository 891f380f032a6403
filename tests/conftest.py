"""What all tests share; being here also puts `helpers` on their import path."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

import standin  # noqa: F401  (before any gradient is computed: torch counts its devices then, once)
from dockerd import Dockerd, dockerd, make_containers, why_not
from helpers import byte_tokenizer, tiny_tokenizer
from instances import instance_image
from turnstile.engines.local.cpu.thread_pool import release_torch_threads
from turnstile.models.load import load_tokenizer
from turnstile.sandboxes.base import Limits
from turnstile.sandboxes.containers.provider import ContainerSandboxes
from turnstile.swe.formats.instance import Instance

STARTED = pytest.StashKey[float]()
torch.set_num_threads(1)  # networks of tests are so small that threads would mostly wait for each other


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--result", type=Path, help="a file for what came of the tests, as JSON")


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[STARTED] = time.monotonic()


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """Writes how many tests passed, of which commit, when, and in how many seconds; nothing of a part of them."""
    file = config.getoption("--result")
    some = (
        config.getoption("keyword")
        or config.getoption("markexpr")
        or config.args_source is not config.ArgsSource.TESTPATHS
    )
    if file is None or some or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return
    counts = {name: len(terminalreporter.stats.get(name, [])) for name in ("passed", "failed", "error", "skipped")}
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True, cwd=config.rootpath
    ).stdout.strip()
    seconds = round(time.monotonic() - config.stash[STARTED])
    found = {"commit": commit, "date": time.strftime("%Y-%m-%d", time.gmtime()), **counts, "seconds": seconds}
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as behind nohup: the commands that tests interrupt inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

PATIENT = Limits(seconds=120.0, cpu_seconds=60.0)  # a busy machine is not a hang


@pytest.fixture(scope="session")
def smollm2() -> PreTrainedTokenizerBase:
    return load_tokenizer("smollm2-135m")


@pytest.fixture(scope="session")
def words() -> PreTrainedTokenizerBase:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def bytes_() -> PreTrainedTokenizerBase:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def engine() -> Iterator[Dockerd]:
    """A real container engine, which the tests start and end themselves."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with dockerd() as running:
        yield running


@pytest.fixture(scope="session")
def instance(engine: Dockerd, tmp_path_factory: pytest.TempPathFactory) -> Instance:
    """A repository with a past and a future, in an image of that engine."""
    return instance_image(engine, tmp_path_factory.mktemp("instance"))


@pytest.fixture
async def containers(engine: Dockerd) -> AsyncIterator[Callable[..., ContainerSandboxes]]:
    """Makes providers without spares, and closes them; nothing of theirs is left in the engine."""
    made = []

    def make(**knobs: object) -> ContainerSandboxes:
        made.append(make_containers(engine.address, **{"limits": PATIENT, **knobs}))
        return made[-1]

    yield make
    for provider in made:
        await provider.close()
    assert engine.containers() == []


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """So many compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
    release_torch_threads()
