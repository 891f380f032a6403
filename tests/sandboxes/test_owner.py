from __future__ import annotations

import os
import subprocess
import sys

from turnstile.sandboxes.owner import HOST, PID, STARTED, is_gone, owner_labels, start_time


def test_a_living_process_is_not_gone() -> None:
    assert not is_gone(owner_labels())


def test_one_that_ended_is_and_so_is_one_whose_number_another_has() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    labels = {**owner_labels(), PID: str(child.pid), STARTED: start_time(child.pid) or ""}
    assert not is_gone(labels)
    child.communicate()
    assert is_gone(labels)
    assert is_gone({**labels, PID: str(os.getpid())})


def test_of_other_machines_nothing_is_known() -> None:
    assert not is_gone({**owner_labels(), HOST: "elsewhere", STARTED: "long ago"})
    assert not is_gone({})
