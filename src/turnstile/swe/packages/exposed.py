"""Check whether code in a sandbox can read a package without the fault, besides the copy with the fault.

It can if the package is also installed for the sandbox's Python or another one (including the one that a virtual
environment was made with), or bundled with another package, wheels included.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from turnstile.errors import SandboxError, TaskError
from turnstile.sandboxes.base import Limits, Sandboxes
from turnstile.swe.packages.source import Package

LIMITS = Limits(seconds=120.0, cpu_seconds=60.0, output_chars=10_000_000)
_LOOK = """
import glob, json, os, sys, zipfile
root, files = sys.argv[1], sys.argv[2:]
places = [place for place in sys.path if place]
wheels = ["/usr/share/python-wheels/*.whl"]
for top in ("/usr", "/usr/local", "/opt/*", glob.escape(sys.base_prefix)):
    for inner in ("site-packages", "dist-packages"):
        places += glob.glob(top + "/lib/python3*/" + inner)
    wheels.append(top + "/lib/python3*/ensurepip/_bundled/*.whl")
for place in map(glob.escape, list(places)):
    places += glob.glob(place + "/*/_vendor")
    wheels += [place + "/*.whl", place + "/*/_bundled/*.whl", place + "/virtualenv/seed/wheels/embed/*.whl"]
carried = {}
for wheel in sorted({path for pattern in wheels for path in glob.glob(pattern)}):
    try:
        names = zipfile.ZipFile(wheel).namelist()
    except (OSError, zipfile.BadZipFile):
        continue  # nobody else can read it either
    for name in names:
        carried.setdefault(name.rpartition("/_vendor/")[2], wheel + "/" + name)
found = {}
for file in files:
    inner = os.path.relpath(file, root)
    there = filter(os.path.isfile, (os.path.join(place, inner) for place in places))
    found[file] = next(there, None) or carried.get(inner)
sys.stdout.write(json.dumps(found))
"""


async def find_exposed(package: Package, sandboxes: Sandboxes) -> Mapping[str, str | None]:
    """Return where each of the package's modules can be read in these sandboxes; None for one that cannot.

    Raises SandboxError if that cannot be determined.
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
        last_line = (done.stderr.strip().splitlines() or [f"exit code {done.exit_code}"])[-1]
        raise SandboxError(f"what a sandbox shows of {package.label} cannot be told: {last_line}") from None
    return found


def refuse_exposed(package: Package, file: str, found: Mapping[str, str | None]) -> None:
    """Raise TaskError if `found` says that the file with the fault can be read without it."""
    place = found.get(file)
    if place is not None:
        raise TaskError(
            f"{package.spec}: the sandboxes show {file} without its fault, at {place}, so whoever has a shell can copy "
            f"the repair; have them without {package.name} (pip uninstall, another image, sandbox.readable), or leave "
            "its tasks out"
        )
