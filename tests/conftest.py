"""What all tests share; being here also puts `helpers` on their import path."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from dockerd import IMAGE, ULIMITS, Dockerd, dockerd, why_not
from helpers import byte_tokenizer, tiny_tokenizer
from instances import instance_image
from turnstile.models.load import load_tokenizer
from turnstile.sandboxes.base import Limits
from turnstile.sandboxes.containers.provider import ContainerSandboxes
from turnstile.tasks.swe.formats.instance import Instance

torch.set_num_threads(1)  # networks of tests are so small that threads would mostly wait for each other

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as behind nohup: the commands that tests interrupt inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

PATIENT = Limits(seconds=120.0, cpu_seconds=60.0)  # a busy machine is no hang


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
        given = {"image": IMAGE, "daemon": engine.address, "ulimits": ULIMITS, "warm": 0, "limits": PATIENT, **knobs}
        made.append(ContainerSandboxes(**given))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for provider in made:
        await provider.close()
    assert engine.containers() == []
