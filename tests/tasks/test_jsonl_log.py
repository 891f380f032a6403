from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from turnstile.errors import TaskError
from turnstile.tasks import jsonl_log


def test_skips_a_torn_end_and_removes_it_on_append(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "j.jsonl"
    assert list(jsonl_log.read(path)) == []
    jsonl_log.append(path, '{"n": 1}')
    with path.open("ab") as file:
        file.write(b'{"n": "\xff')
    assert list(jsonl_log.read(path)) == [{"n": 1}]
    jsonl_log.append(path, '{"n": 2}')
    assert path.read_bytes() == b'{"n": 1}\n{"n": 2}\n'
    with path.open("ab") as file:
        file.write(b"torn")
    jsonl_log.repair(path)
    assert path.read_bytes() == b'{"n": 1}\n{"n": 2}\n'
    jsonl_log.repair(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_several_processes_may_write(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    code = "from pathlib import Path; from turnstile.tasks.jsonl_log import append\n"
    code += f"for n in range(100): append(Path({str(path)!r}), '[%d, \"' % n + 'x' * 5000 + '\"]')"
    writers = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert sorted(n for n, _ in jsonl_log.read(path)) == sorted([*range(100)] * 2)


def test_names_damaged_lines_and_failed_writes(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_text("[1]\nno\n[2]\n")
    with pytest.raises(TaskError, match=r"j\.jsonl:2: the line is damaged \(.*\); remove it, or the file"):
        list(jsonl_log.read(path))
    with pytest.raises(TaskError, match=r"j\.jsonl/k: it cannot be written"):
        jsonl_log.append(path / "k", "[]")
