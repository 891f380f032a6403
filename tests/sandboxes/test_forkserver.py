from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from turnstile.errors import SandboxError
from turnstile.sandboxes.base import ExecResult, Limits
from turnstile.sandboxes.check import processes_with
from turnstile.sandboxes.forkserver import SOURCE, ForkServer, base_environment, is_forkable

USUAL = Limits()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    running = ForkServer(scratch=tmp_path_factory.mktemp("scratch"), preload=("iniconfig", "json.tool"), workers=2)
    yield running
    asyncio.run(running.close())


async def run(
    server: ForkServer,
    cwd: Path,
    *argv: str,
    limits: Limits = USUAL,
    **env: str,
) -> ExecResult:
    return await server.run(argv, cwd=cwd, env={**base_environment(cwd), **env}, limits=limits)


async def run_code(server: ForkServer, cwd: Path, code: str, *arguments: str, **env: str) -> ExecResult:
    (cwd / "program.py").write_text(code)
    return await run(server, cwd, "python", "-m", "program", *arguments, **env)


async def test_a_module_runs_by_fork_with_its_own_arguments_folder_and_path(server: ForkServer, tmp_path: Path) -> None:
    code = (
        "import json, os, sys\n"
        "print(json.dumps([sys.argv[1:], os.getcwd(), sys.path[:2], __name__, os.environ['GIVEN'],\n"
        "                  'iniconfig' in sys.modules, os.getsid(0) == os.getpid(), sys.stdin.read()]))\n"
    )
    result = await run_code(server, tmp_path, code, "a", "b c", GIVEN="x", PYTHONPATH="src")
    assert result.stderr == ""
    expected = [["a", "b c"], str(tmp_path), [str(tmp_path), str(tmp_path / "src")], "__main__", "x", True, True, ""]
    assert json.loads(result.stdout) == expected


@pytest.mark.parametrize(
    ("code", "exit_code", "stderr"),
    [
        ("pass", 0, ""),
        ("raise SystemExit(7)", 7, ""),
        ("import sys; sys.exit('bad luck')", 1, "bad luck\n"),
        ("import os; os._exit(9)", 9, ""),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 139, ""),
    ],
)
async def test_exit_codes_of_forked_modules(
    server: ForkServer, tmp_path: Path, code: str, exit_code: int, stderr: str
) -> None:
    result = await run_code(server, tmp_path, code)
    assert result.exit_code == exit_code
    assert stderr in result.stderr
    assert bool(result.stderr) == bool(stderr)


async def test_exit_functions_run_and_output_is_flushed(server: ForkServer, tmp_path: Path) -> None:
    result = await run_code(server, tmp_path, "import atexit\natexit.register(print, 'last')\nprint('first', end=' ')")
    assert result.stdout == "first last\n"


async def test_a_missing_module_is_said(server: ForkServer, tmp_path: Path) -> None:
    result = await run(server, tmp_path, "python", "-m", "nowhere_to_be_found")
    assert result.exit_code == 1
    assert "No module named nowhere_to_be_found" in result.stderr


async def test_a_package_of_the_folder_wins_over_a_preloaded_one_unless_that_was_asked_for(
    server: ForkServer, tmp_path: Path
) -> None:
    for name in ("packaging", "iniconfig"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("mine = True\n")
    other = ForkServer(scratch=tmp_path, preload=("pytest",))
    code = "import packaging, iniconfig\nprint(hasattr(packaging, 'mine'), hasattr(iniconfig, 'mine'))"
    try:
        assert (await run_code(server, tmp_path, code)).stdout == "True False\n"  # iniconfig is to be kept
        assert (await run_code(other, tmp_path, code)).stdout == "True True\n"
    finally:
        await other.close()


async def test_changed_modules_are_never_run_from_old_byte_code(server: ForkServer, tmp_path: Path) -> None:
    for value in (1, 2):
        (tmp_path / "part.py").write_text(f"value = {value}\n")
        os.utime(tmp_path / "part.py", (1_000_000_000, 1_000_000_000))
        assert (await run_code(server, tmp_path, "import part\nprint(part.value)")).stdout == f"{value}\n"
    assert not (tmp_path / "__pycache__").exists()


async def test_no_state_passes_from_one_command_to_the_next(server: ForkServer, tmp_path: Path) -> None:
    code = "import json, os\nprint(hasattr(json, 'touched'), 'TOUCHED' in os.environ)\njson.touched = True\n"
    await run_code(server, tmp_path, code + "os.environ['TOUCHED'] = ''", MORE="1")
    assert (await run_code(server, tmp_path, code)).stdout == "False False\n"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="addresses are fixed on Linux only")
async def test_sets_are_ordered_alike_in_every_server(server: ForkServer, tmp_path: Path) -> None:
    other = ForkServer(scratch=tmp_path, preload=("pytest",))
    code = "print(hash(None), hash('x'), list({None, 'a', 3.5, (None, 1)}))"
    try:
        personality = (await run(server, tmp_path, "cat", "/proc/self/personality")).stdout
        if not int(personality or "0", 16) & 0x0040000:
            pytest.skip("this kernel does not let a process fix its addresses")
        outputs = {(await run_code(each, tmp_path, code)).stdout for each in (server, other)}
    finally:
        await other.close()
    assert len(outputs) == 1


async def test_at_most_so_many_commands_run_at_once(server: ForkServer, tmp_path: Path) -> None:
    code = "import os, time, sys\nopen(sys.argv[1], 'w').close()\n" + (
        "print(len([n for n in os.listdir() if n.startswith('busy')]))\ntime.sleep(0.2)\nos.unlink(sys.argv[1])\n"
    )
    (tmp_path / "program.py").write_text(code)
    results = await asyncio.gather(
        *(run(server, tmp_path, "python", "-m", "program", f"busy{number}") for number in range(6))
    )
    counts = [int(result.stdout) for result in results]
    assert max(counts) == 2


def test_what_goes_by_fork() -> None:
    plain = base_environment("/nowhere")
    assert is_forkable(["python", "-m", "pytest"], plain)
    assert is_forkable([sys.executable, "-m", "pytest", "-q"], {**plain, "PYTHONPATH": "src"})
    assert not is_forkable(["python", "-c", "pass"], plain)
    assert not is_forkable(["python3", "-m", "pytest"], plain)
    assert not is_forkable(["python", "-m", "pytest"], {**plain, "PYTHONHASHSEED": "7"})
    assert not is_forkable(["python", "-m", "pytest"], {**plain, "PYTHONWARNINGS": "error"})


async def test_interpreter_settings_hold(server: ForkServer, tmp_path: Path) -> None:
    code = "import sys\nprint(sys.flags.optimize)"
    assert (await run_code(server, tmp_path, code)).stdout == "0\n"
    assert (await run_code(server, tmp_path, code, PYTHONOPTIMIZE="2")).stdout == "2\n"


async def test_a_crowd_of_processes_is_ended(server: ForkServer, tmp_path: Path) -> None:
    command = "for i in 1 2 3 4 5 6 7 8; do sleep 30 & done; wait"
    result = await run(server, tmp_path, "sh", "-c", command, limits=Limits(processes=5, seconds=20))
    assert result.exit_code == 143
    assert not result.timed_out
    assert "too many processes" in result.stderr


async def test_files_grow_to_their_limit_only(server: ForkServer, tmp_path: Path) -> None:
    code = "open('big', 'wb').write(bytes(3 << 20))"
    (tmp_path / "program.py").write_text(code)
    result = await run(server, tmp_path, "python", "-m", "program", limits=Limits(file_mb=1))
    assert result.exit_code == 1
    assert "File too large" in result.stderr
    assert (tmp_path / "big").stat().st_size <= 1 << 20


async def test_a_missing_folder_and_an_empty_command(server: ForkServer, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="gone"):
        await run(server, tmp_path / "none", "true")
    with pytest.raises(ValueError, match="empty"):
        await run(server, tmp_path)


async def test_a_server_that_dies_fails_what_was_in_flight_and_is_started_anew(tmp_path: Path) -> None:
    server = ForkServer(scratch=tmp_path, preload=())
    try:
        assert (await run(server, tmp_path, "true")).exit_code == 0
        first = server.pid
        assert first is not None
        mark = "7654321"
        sleeping = asyncio.ensure_future(run(server, tmp_path, "sleep", mark, limits=Limits(seconds=30)))
        await until(lambda: processes_with(mark) != [])
        os.kill(first, signal.SIGKILL)
        with pytest.raises(SandboxError, match=r"died|ended"):
            await sleeping
        await until(lambda: processes_with(mark) == [])
        assert (await run(server, tmp_path, "true")).exit_code == 0
        assert server.pid != first
    finally:
        await server.close()


CHANGED_AND_ELSEWHERE = """
import asyncio, sys
from pathlib import Path
from turnstile.sandboxes.base import Limits
from turnstile.sandboxes.forkserver import ForkServer, base_environment

async def main():
    here = Path(sys.argv[1])
    program = here / "src" / "turnstile" / "program.py"
    server = ForkServer(scratch=here, preload=("turnstile.program",))
    try:
        for _ in range(2):
            command = ("python", "-m", "turnstile.program")
            result = await server.run(command, cwd=here, env=base_environment(here), limits=Limits())
            print(result.stdout + result.stderr)
            program.write_text("print('another version')")
    finally:
        await server.close()

asyncio.run(main())
"""


def test_a_server_goes_on_with_the_files_of_turnstile_that_its_client_began_with(tmp_path: Path) -> None:
    """Also where the client has another Turnstile than this Python's own, and where its files change meanwhile."""
    shutil.copytree(SOURCE / "turnstile", tmp_path / "src" / "turnstile")
    program = tmp_path / "src" / "turnstile" / "program.py"
    program.write_text("import turnstile\n\nprint(turnstile.__file__)\n")
    command = [sys.executable, "-c", CHANGED_AND_ELSEWHERE, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(program.with_name("__init__.py"))] * 2


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    server = ForkServer(scratch=tmp_path, preload=("there_is_no_such_module",))
    try:
        with pytest.raises(SandboxError, match="there_is_no_such_module"):
            await run(server, tmp_path, "true")
    finally:
        await server.close()
    with pytest.raises(SandboxError, match="closed"):
        await run(server, tmp_path, "true")


async def test_closing_ends_what_runs(tmp_path: Path) -> None:
    server = ForkServer(scratch=tmp_path, preload=())
    mark = "7654322"
    sleeping = asyncio.ensure_future(run(server, tmp_path, "sh", "-c", f"setsid sleep {mark}; true"))
    await until(lambda: processes_with(mark) != [])
    await server.close()
    with pytest.raises(SandboxError):
        await sleeping
    await until(lambda: processes_with(mark) == [])


PARENT = """
import asyncio, sys
from turnstile.sandboxes.base import Limits
from turnstile.sandboxes.forkserver import ForkServer, base_environment

async def main():
    server = ForkServer(scratch=sys.argv[1], preload=("json.tool",))
    limits = Limits(seconds=60)
    await server.run(["sh", "-c", f"setsid sleep {sys.argv[2]} & sleep {sys.argv[2]}"], cwd=sys.argv[1],
                     env=base_environment(sys.argv[1]), limits=limits)

asyncio.run(main())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
async def test_nothing_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    mark = "7654323"
    parent = subprocess.Popen(  # noqa: ASYNC220 - over at once
        [sys.executable, "-c", PARENT, str(tmp_path), mark]
    )
    try:
        await until(lambda: len(processes_with(mark)) >= 3)  # the two sleepers and the parent itself
    finally:
        parent.kill()
        parent.wait()
    await until(lambda: processes_with(mark) == [])
    await until(lambda: not any(str(tmp_path) in line for line in command_lines()))


def command_lines() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            found.append(path.read_text(errors="replace"))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


async def until(holds: object, seconds: float = 10.0) -> None:
    assert callable(holds)
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        await asyncio.sleep(0.02)


def test_a_server_needs_a_worker(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one worker"):
        ForkServer(scratch=tmp_path, workers=0)
