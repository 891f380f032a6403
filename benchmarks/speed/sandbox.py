"""What container sandboxes cost beside the engine they run on, and remote ones beside the tier that is served,
measured in one run on one machine.

    python -m benchmarks.speed.sandbox --image python:3.12

Prints the round trip of a command through the runner and, for comparison, through the engine's own exec and without
anything between: a program in the container that starts the same command over and over. Then the time from asking for a
sandbox with a template to having it, when one is ready; what grading takes beside the tests themselves; and how many
containers a second go through create, start and remove, by Turnstile and by the bare engine with the same settings.
Last, the round trip through a server in a process of its own (`turnstile sandbox serve`) beside the same tier without
one, in turns; `--local` prints that for the local tier too, and without an image for that alone.
The load of the machine stands beside, since all of this waits for processors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from turnstile.sandboxes.base import Limits, Sandbox, Sandboxes
from turnstile.sandboxes.containers.provider import ContainerSandbox, ContainerSandboxes, PoolSize, Resources
from turnstile.sandboxes.http.remote import RemoteSandboxes
from turnstile.sandboxes.http.wire import TOKEN
from turnstile.sandboxes.local import LocalSandboxes
from turnstile.swe.grading.grader import CodeGrader

CARRY = ("turnstile", "pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
TEST_SECONDS = 1.0
SPAWN = """
import subprocess, sys, time
for _ in range(int(sys.argv[1])):
    started = time.perf_counter()
    subprocess.run(["true"], stdin=subprocess.DEVNULL, close_fds=False, start_new_session=True)
    print(time.perf_counter() - started)
"""
TEST = f"""
import time
from ten import TEN

def test_ten():
    time.sleep({TEST_SECONDS})
    assert TEN == 10
"""

Make = Callable[..., ContainerSandboxes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", help="an image with Python 3.7 or newer")
    parser.add_argument("--local", action="store_true", help="what a server adds to local sandboxes")
    parser.add_argument("--daemon", help="the engine's socket (default: DOCKER_HOST or the usual one)")
    parser.add_argument("--ulimit", action="append", default=[], metavar="NAME=N", help="as the engine needs them")
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--commands", type=int, default=50, help="commands in each sandbox")
    parser.add_argument("--lifecycles", type=int, default=24)
    parser.add_argument("--starts", type=int, default=4, help="containers started at once")
    parser.add_argument("--memory-mb", type=int, default=256)
    args = parser.parse_args()
    if not (args.image or args.local):
        parser.error("give --image, --local or both")
    ulimits = {name: int(number) for name, _, number in (each.partition("=") for each in args.ulimit)}

    def make(**knobs: Any) -> ContainerSandboxes:
        pool = PoolSize(starts=args.starts, warm=knobs.pop("warm", 0), most=knobs.pop("most", 64))
        resources = Resources(ulimits=ulimits, memory_mb=args.memory_mb)
        return ContainerSandboxes(image=args.image, daemon=args.daemon, resources=resources, pool=pool, **knobs)

    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template"
        template.mkdir()
        (template / "file.txt").write_text("content\n")
        package = Path(folder) / "package"
        package.mkdir()
        (package / "ten.py").write_text("TEN = 10\n")
        (package / "test_ten.py").write_text(TEST)
        report: dict[str, Any] = {}
        if args.image:
            report = asyncio.run(measure(make, template, package, args))
            resources = {"ulimits": ulimits, "memory_mb": args.memory_mb}
            knobs = {"image": args.image, "daemon": args.daemon, "resources": resources}
            container = make(most=args.at_once)
            report["remote, container"] = beside(container, "container", knobs, template, args.at_once, args.commands)
        if args.local:
            local = LocalSandboxes(workers=args.at_once)
            knobs = {"workers": args.at_once}
            report["remote, local"] = beside(local, "local", knobs, template, args.at_once, args.commands)
    print(json.dumps(report, indent=2))


async def measure(make: Make, template: Path, package: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Every figure: milliseconds at the median and at the ninetieth of a hundred, lifecycles a second."""
    report: dict[str, Any] = {}
    provider = make(most=args.at_once)
    report["engine"] = provider.daemon.version()
    first = await provider.start(template)
    report["round trip, 1 at once"] = spread(await round_trips(first, args.commands))
    report["engine's own exec, 1 at once"] = spread([await timed(engine_exec(provider, first)) for _ in range(10)])
    rest = await asyncio.gather(*(provider.start(template) for _ in range(args.at_once - 1)))
    together = await asyncio.gather(*(round_trips(each, args.commands) for each in (first, *rest)))
    report[f"round trip, {args.at_once} at once"] = spread(seconds for each in together for seconds in each)
    together = await asyncio.gather(*(spawns(each, args.commands) for each in (first, *rest)))
    report[f"nothing between, {args.at_once} at once"] = spread(seconds for each in together for seconds in each)
    report["nothing between, 1 at once"] = spread(await spawns(first, args.commands))
    report["load"] = os.getloadavg()[0]
    await provider.close()

    provider = make(warm=4)
    await (await provider.start(template)).close()
    handed = []
    for _ in range(12):
        while provider.spares < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)  # for the removal of the one before
        started = time.perf_counter()
        sandbox = await provider.start(template)
        handed.append(time.perf_counter() - started)
        await sandbox.close()
    report["hand-out of a ready one"] = spread(handed)
    await provider.close()
    report[f"grading beside {TEST_SECONDS} s of tests"] = spread(await gradings(make, package))

    rates: dict[str, list[float]] = {"ours": [], "engine": []}
    for _ in range(5):  # in turns, so that what else the machine does falls on both
        rates["engine"].append(await asyncio.to_thread(bare_rate, make(), args.lifecycles, args.starts))
        rates["ours"].append(await our_rate(make(), template, args.lifecycles))
    report["lifecycles a second"] = {name: round(statistics.median(found), 2) for name, found in rates.items()}
    ratios = [ours / engine for ours, engine in zip(rates["ours"], rates["engine"], strict=True)]
    report["ours / engine, median"] = round(statistics.median(ratios), 3)
    report["ours / engine, each"] = [round(ratio, 2) for ratio in ratios]
    return report


def beside(
    direct: Sandboxes, kind: str, knobs: dict[str, Any], template: Path, at_once: int, commands: int
) -> dict[str, Any]:
    """Round trips in sandboxes of a tier, and in those of a server of the same."""
    os.environ[TOKEN] = secrets.token_urlsafe()
    words = [f"{name}={toml(value)}" for name, value in knobs.items() if value is not None]
    command = [sys.executable, "-u", "-m", "turnstile", "sandbox", "serve", kind, *words, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        return asyncio.run(compared(direct, RemoteSandboxes(url=url), template, at_once, commands))
    finally:
        server.terminate()
        server.communicate()


async def compared(direct: Sandboxes, remote: Sandboxes, template: Path, at_once: int, commands: int) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for count in (1, at_once):
        found: dict[str, list[float]] = {"direct": [], "remote": []}
        rooms = {"direct": direct, "remote": remote}
        there = {name: [await room.start(template) for _ in range(count)] for name, room in rooms.items()}
        for _ in range(4):  # in turns, so that what else the machine does falls on both
            for name, sandboxes in there.items():
                together = await asyncio.gather(*(round_trips(each, -(-commands // 4)) for each in sandboxes))
                found[name] += [seconds for each in together for seconds in each]
        for sandboxes in there.values():
            await asyncio.gather(*(each.close() for each in sandboxes))
        spreads = {name: spread(seconds) for name, seconds in found.items()}
        ratio = statistics.median(found["remote"]) / statistics.median(found["direct"])
        report[f"round trip, {count} at once"] = {**spreads, "remote / direct": round(ratio, 2)}
    await direct.close()
    await remote.close()
    return report


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml(inner)}" for name, inner in value.items()) + "}"
    return json.dumps(value)


async def round_trips(sandbox: Sandbox, count: int) -> list[float]:
    return [await timed(sandbox.exec(["true"])) for _ in range(count)]


async def spawns(sandbox: ContainerSandbox, count: int) -> list[float]:
    """Seconds of each start of a command by a program inside."""
    limits = Limits(seconds=300, cpu_seconds=300, output_chars=10**6)
    done = await sandbox.exec(["python3", "-I", "-S", "-c", SPAWN, str(count)], limits=limits)
    return [float(line) for line in done.stdout.split()]


async def gradings(make: Make, package: Path) -> list[float]:
    """Seconds that grading takes beyond those of the tests, in containers that are ready."""
    provider = make(warm=2, carry=CARRY)
    grader = CodeGrader(provider)
    found = []
    for number in range(7):
        while number and provider.spares < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        started = time.perf_counter()
        verdict = await grader.grade(package, {}, fail_to_pass=["test_ten.py::test_ten"], repeat=number)
        assert verdict.resolved, verdict
        found.append(time.perf_counter() - started - TEST_SECONDS)
    await grader.close()
    await provider.close()
    return found[1:]  # the first compiles the package


async def engine_exec(provider: ContainerSandboxes, sandbox: ContainerSandbox) -> None:
    await provider.daemon.call(exec_once, provider, sandbox.container.identity)


def exec_once(provider: ContainerSandboxes, identity: str) -> None:
    client = provider.daemon.client
    client.exec_start(client.exec_create(identity, ["true"])["Id"])


async def our_rate(provider: ContainerSandboxes, template: Path, count: int) -> float:
    """Sandboxes a second: started with a template, used for one command, closed and removed."""

    async def one() -> None:
        sandbox = await provider.start(template)
        await sandbox.exec(["true"])
        await sandbox.close()

    started = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(count)))
    await provider.wait_for_removals()
    rate = count / (time.perf_counter() - started)
    await provider.close()
    return rate


def bare_rate(provider: ContainerSandboxes, count: int, starts: int) -> float:
    """Containers a second by the engine alone: created with the same settings, started and removed."""
    daemon = provider.daemon

    def one(_: int) -> None:
        identity = daemon.create(provider.spec)
        daemon.client.start(identity)
        daemon.remove(identity)

    started = time.perf_counter()
    with ThreadPoolExecutor(starts) as threads:
        list(threads.map(one, range(count)))
    rate = count / (time.perf_counter() - started)
    asyncio.run(provider.close())
    return rate


async def timed(doing: Awaitable[object]) -> float:
    started = time.perf_counter()
    await doing
    return time.perf_counter() - started


def spread(seconds: Iterable[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "p50 ms": round(1000 * statistics.median(ordered), 2),
        "p90 ms": round(1000 * ordered[int(0.9 * (len(ordered) - 1))], 2),
    }


if __name__ == "__main__":
    main()
