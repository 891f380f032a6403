"""What may be loaded where. The order of the rooms is import-linter's business (`make check`)."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import turnstile

LIGHT = ("types", "tasks", "sandboxes", "envs", "agents", "rewards", "credit", "records", "rollout", "swe")
HEAVY = ("torch", "transformers", "peft", "tensorboard")


def modules_of(room: str) -> list[str]:
    """The room's module, or its package with everything below it but what a sandbox runs by itself."""
    prefix = f"turnstile.{room}"
    found = [info.name for info in pkgutil.walk_packages(turnstile.__path__, "turnstile.")]
    return [name for name in found if name == prefix or name.startswith(f"{prefix}.")]


def loaded_after(code: str) -> set[str]:
    """Top-level modules loaded in a fresh interpreter after `code`."""
    script = f"import sys\n{code}\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("room", LIGHT)
def test_a_room_that_needs_no_torch_loads_without_it(room: str) -> None:
    names = modules_of(room)
    assert names, f"there is no turnstile.{room}"
    loaded = loaded_after("\n".join(f"import {name}" for name in names))
    assert not loaded & set(HEAVY)


def test_the_help_loads_nothing_heavy() -> None:
    loaded = loaded_after("from turnstile.cli.main import run\nrun(['--help'])\nrun(['rollout', '--help'])")
    assert not loaded & {*HEAVY, "numpy", "rich", "pydantic", "matplotlib"}


def test_the_package_says_that_it_is_typed() -> None:
    from importlib.resources import files

    assert files("turnstile").joinpath("py.typed").is_file()
