"""Run a task's tests and write its reward.

Uses the standard library only, as it is copied beside the tests of a Harbor task.

python3 grade.py [FOLDER FOR reward.txt]
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def main() -> None:
    """Run the instance's tests and write the reward that Harbor reads."""
    sys.path.insert(0, HERE)
    logs = importlib.import_module("logs")  # beside this file, and not on the path of the code under test

    with open(os.path.join(HERE, "instance.json"), encoding="utf-8") as file:
        task = json.load(file)
    sys.path.remove(HERE)
    done = subprocess.run(
        ["bash", "-c", task["test_command"]],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    text = done.stdout.decode("utf-8", "replace")
    print(text)
    parse = {"pytest": logs.pytest_log, "unittest": logs.unittest_log}[task.get("log_parser", "pytest")]
    found = parse(text)
    named = (*task.get("fail_to_pass", ()), *task.get("pass_to_pass", ()))
    wanted = task.get("expected") or dict.fromkeys(named, "PASSED")
    passed = ("PASSED", "XFAIL")
    trouble = getattr(parse, "trouble", lambda *run: None)(text, found, done.returncode)
    if trouble:
        print(trouble)
        found = {}
    bad = [
        test for test, status in wanted.items()
        if found.get(test) != status and not (found.get(test) in passed and status in passed)
    ]  # fmt: skip
    for test in bad:
        print(f"{test}: {found.get(test, 'missing')}")
    folder = sys.argv[1] if len(sys.argv) > 1 else "/logs/verifier"
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "reward.txt"), "w", encoding="utf-8") as file:
        file.write("0" if bad or not wanted else "1")


if __name__ == "__main__":
    main()
