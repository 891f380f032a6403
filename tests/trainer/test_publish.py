"""Published weight folders: complete, few, and kept while a server loads them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helpers import byte_tokenizer, tiny_llama
from turnstile.engines.remote.weights import PublishedWeights
from turnstile.errors import EngineError, RunFolderError
from turnstile.models.load import load_model
from turnstile.trainer.publish import WeightFolders


@pytest.fixture
def folders(tmp_path: Path) -> WeightFolders:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "left-by-a-killed-run").touch()
    words = byte_tokenizer()
    return WeightFolders(tmp_path / "weights", tiny_llama(len(words)), words, kept=1)


def given(folder: Path) -> PublishedWeights:
    return PublishedWeights(version=1, folder=folder, owner="me", serial=1)


def there(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "weights").iterdir())


def test_keeps_the_newest_folders_only(folders: WeightFolders, tmp_path: Path) -> None:
    assert there(tmp_path) == []
    for version in (0, 0, 1):  # a version may be written twice: before and after a warm start
        found = folders.write(version)
    assert there(tmp_path) == ["000002-1"]
    load_model(str(found), device="cpu")
    folders.remove()
    assert not (tmp_path / "weights").exists()


def test_refuses_a_path_that_cannot_be_emptied(tmp_path: Path) -> None:
    (tmp_path / "weights").touch()  # no folder at all
    words = byte_tokenizer()
    with pytest.raises(RunFolderError, match=r"weights cannot be emptied \(Not a dir"):
        WeightFolders(tmp_path / "weights", tiny_llama(len(words)), words)


def test_folder_stays_while_servers_load_it(folders: WeightFolders, tmp_path: Path) -> None:
    first = folders.write(1)
    with given(first).locked():
        folders.write(2)
        assert there(tmp_path) == ["000000-1", "000001-2"]
        with given(first).locked():  # by two servers at once
            pass
        folders.write(3)
        assert there(tmp_path) == ["000000-1", "000002-3"]
    folders.write(4)
    assert there(tmp_path) == ["000003-4"]
    with pytest.raises(EngineError, match="cannot be read: No such file"), given(first).locked():
        pass


def test_killed_process_releases_its_folder(folders: WeightFolders, tmp_path: Path) -> None:
    first = folders.write(1)
    code = (
        "import sys, time; from pathlib import Path; from turnstile.engines.remote.weights import PublishedWeights\n"
        f"with PublishedWeights(version=1, folder=Path({str(first)!r}), owner='me', serial=1).locked():\n"
        "    print('held', flush=True); time.sleep(600)"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    with other.stdout:
        assert other.stdout.readline() == "held\n"
        folders.write(2)
        assert there(tmp_path) == ["000000-1", "000001-2"]
        other.kill()
        other.wait()
    folders.write(3)
    assert there(tmp_path) == ["000002-3"]
