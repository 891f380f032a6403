from __future__ import annotations

from pathlib import Path

import pytest

from turnstile.errors import ConfigError
from turnstile.sandboxes.containers.repository import commit_once, git, past


@pytest.fixture
def tree(template: Path) -> Path:
    """The template as a checkout with a past."""
    git(template, "init", "--quiet")
    git(template, "add", ".")
    git(template, "commit", "--quiet", "-m", "the answer, as it will be")
    git(template, "tag", "v2")
    (template / ".gitignore").write_text("made.py\n")
    (template / "made.py").write_text("made = True\n")
    return template


def test_a_tree_becomes_one_commit_without_a_past(tree: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    commit = commit_once(tree, made)
    assert past(made) == []
    assert git(made, "rev-list", "--all").split() == [commit]
    assert sorted(git(made, "ls-files").split()) == [".gitignore", "made.py", "pkg/__init__.py", "run.sh"]
    assert commit_once(tree, tmp_path / "again") == commit
    (tree / "made.py").write_text("made = False\n")
    assert commit_once(tree, tmp_path / "changed") != commit


def test_whatever_is_left_of_a_past_is_found(tree: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    commit_once(tree, made)
    (made / "run.sh").write_text("later\n")
    assert past(made) == ["1 files that differ from the commit"]
    git(made, "stash", "--quiet")
    git(made, "stash", "drop", "--quiet")
    assert any("objects that the commit does not name" in line for line in past(made))
    git(made, "commit", "--allow-empty", "--quiet", "-m", "later")
    git(made, "tag", "v2")
    git(made, "remote", "add", "origin", str(tree))
    git(made, "pack-refs", "--all")
    found = "\n".join(past(made))
    for word in ("2 commits", "refs/tags/v2", "a remote", ".git/packed-refs"):
        assert word in found


def test_what_is_no_repository_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="git rev-list in"):
        past(tmp_path)
