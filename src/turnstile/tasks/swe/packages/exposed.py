"""Whether code in a sandbox can read a package as it should be, beside the copy with the fault.

A package is there to be read where the sandbox's Python has it too: in its own folder of packages, in another Python's,
or as what some package carries along.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from turnstile.errors import SandboxError, TaskError
from turnstile.sandboxes.base import Limits, Sandboxes
from turnstile.tasks.swe.packages.source import Package

LIMITS = Limits(seconds=120.0, cpu_seconds=60.0, output_chars=10_000_000)
_LOOK = """
import glob, json, os, sys
root, files = sys.argv[1], sys.argv[2:]
places = [place for place in sys.path if place]
for top in ("/usr", "/usr/local", "/opt/*"):
    places += glob.glob(top + "/lib/python3*/site-packages") + glob.glob(top + "/lib/python3*/dist-packages")
for place in list(places):
    places += glob.glob(place + "/*/_vendor")
found = {}
for file in files:
    inner = os.path.relpath(file, root)
    found[file] = next(filter(os.path.isfile, (os.path.join(place, inner) for place in places)), None)
sys.stdout.write(json.dumps(found))
"""


async def exposed(package: Package, sandboxes: Sandboxes) -> Mapping[str, str | None]:
    """Where in these sandboxes each of the package's modules can be read, None where it cannot.

    Raises SandboxError where that cannot be told.
    """
    sandbox = await sandboxes.start(package.tree, deps=package.deps)
    try:
        command = ["python3", "-c", _LOOK, package.import_root, *package.modules]
        done = await sandbox.exec(command, env={"PYTHONPATH": str(package.deps)}, limits=LIMITS)
    finally:
        await sandbox.close()
    try:
        found: Mapping[str, str | None] = json.loads(done.stdout)
    except ValueError:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.exit_code}"])[-1]
        raise SandboxError(f"what a sandbox shows of {package.label} cannot be told: {said}") from None
    return found


def refuse_exposed(package: Package, file: str, found: Mapping[str, str | None]) -> None:
    """Raises TaskError where the file of a fault is among what can be read."""
    place = found.get(file)
    if place is not None:
        raise TaskError(
            f"{package.spec}: the sandboxes show {file} without its fault, at {place}, so whoever has a shell can copy "
            f"the repair; have them without {package.name} (pip uninstall, another image, sandbox.readable), or leave "
            "its tasks out"
        )
