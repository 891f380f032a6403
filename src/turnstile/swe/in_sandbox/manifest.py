"""List the files of a folder with a digest of each.

Uses the standard library only, for Python 3.7 or newer. Its source is passed to the Python of a sandbox, which runs it
in the folder. It prints a JSON object that maps each path to the kind (`f` file, `x` executable file, `l` link), the
size if it is a file, and the digest.
"""

import hashlib
import json
import os
import stat
from typing import Any

SKIPPED = {
    *(".git", ".hg", ".svn", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".tox"),
    *(".nox", ".venv", "node_modules"),
}
LARGE = 32 << 20  # bytes; larger files are identified by size and time only


def manifest(root: str) -> Any:
    """Return an entry for every file and link below `root`, except history and what tools leave behind."""
    found = {}
    pending = [""]
    while pending:
        folder = pending.pop()
        try:
            entries = sorted(os.listdir(os.path.join(root, folder)))
        except OSError:
            continue
        for name in entries:
            path = folder + name
            full = os.path.join(root, path)
            try:
                status = os.lstat(full)
                if stat.S_ISLNK(status.st_mode):
                    found[path] = "l" + hashlib.sha256(os.fsencode(os.readlink(full))).hexdigest()
                elif name in SKIPPED or name.endswith((".pyc", ".pyo")):
                    continue
                elif stat.S_ISDIR(status.st_mode):
                    pending.append(path + "/")
                elif stat.S_ISREG(status.st_mode):
                    found[path] = f"{kind(status)}{status.st_size} {digest(full, status)}"
            except OSError as error:
                found[path] = "?" + str(error.errno)
    return found


def kind(status: os.stat_result) -> str:
    """Return "x" for an executable file and "f" for any other."""
    return "x" if status.st_mode & 0o100 else "f"


def digest(path: str, status: os.stat_result) -> str:
    """Return the SHA-256 of a file in hex, or the time of its last change if it is large."""
    if status.st_size > LARGE:
        return f"at {status.st_mtime_ns}"
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


if __name__ == "__main__":
    print(json.dumps(manifest(".")))
