"""Repositories with a single commit of a tree, so that an agent cannot learn the fix from the history."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from turnstile.errors import ConfigError, SandboxError
from turnstile.sandboxes.folder import copy_tree

SECONDS = 600
GIT_ENVIRONMENT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_AUTHOR_NAME": "Turnstile",
    "GIT_AUTHOR_EMAIL": "turnstile@localhost",
    "GIT_AUTHOR_DATE": "2000-01-01T00:00:00+0000",
    "GIT_COMMITTER_NAME": "Turnstile",
    "GIT_COMMITTER_EMAIL": "turnstile@localhost",
    "GIT_COMMITTER_DATE": "2000-01-01T00:00:00+0000",
    "LC_ALL": "C",
}
"""Settings that replace those of this machine and user, so that equal trees give equal commits."""
TRACES = (
    "logs",
    "packed-refs",
    "shallow",
    "FETCH_HEAD",
    "ORIG_HEAD",
    "worktrees",
    "modules",
    "objects/info/alternates",
)


def commit_once(tree: Path, into: Path) -> str:
    """Copy a tree into `into` as a git repository with one commit of all files, and return the commit's id.

    What sandboxes never copy is left out (`folder.walk_tree`), in particular older history. Raises ConfigError if git
    is missing or fails, and SandboxError if the repository would hold more than that commit.
    """
    copy_tree(tree, into)
    git(into, "-c", "init.defaultBranch=main", "init", "--quiet", "--template=")
    git(into, "config", "core.logAllRefUpdates", "false")
    git(into, "add", "--all", "--force", ".")  # also what .gitignore excludes, since it is part of the tree
    git(into, "commit", "--quiet", "--allow-empty", "--no-verify", "-m", "base")
    found = past(into)
    if found:
        raise SandboxError(f"the repository made of {tree} holds more than its one commit: {'; '.join(found)}")
    return git(into, "rev-parse", "HEAD").strip()


def past(repository: Path) -> list[str]:
    """Return what a repository reveals besides its one commit, one line each: refs, reflogs, objects, changes.

    The list should be empty. Raises ConfigError if this is not a repository.
    """
    found = []
    commits = git(repository, "rev-list", "--all", "--reflog").split()
    if len(commits) != 1:
        found.append(f"{len(commits)} commits")
    refs = git(repository, "for-each-ref", "--format=%(refname)").split()
    if len(refs) != 1:
        found.append(f"the refs {', '.join(refs)}")
    stored = set(git(repository, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)").split())
    reached = {line.split()[0] for line in git(repository, "rev-list", "--objects", "HEAD").splitlines()}
    if stored != reached:
        found.append(f"{len(stored - reached)} objects that the commit does not name")
    if git(repository, "remote").split():
        found.append("a remote")
    if changed := git(repository, "status", "--porcelain").splitlines():
        found.append(f"{len(changed)} files that differ from the commit")
    found += [f"the file .git/{name}" for name in TRACES if (repository / ".git" / name).exists()]
    return found


def git(repository: Path, *arguments: str) -> str:
    """Run git in a repository and return its output. Raises ConfigError if git is missing or fails."""
    command = ["git", "-c", f"safe.directory={repository}", "-C", str(repository), *arguments]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            command,
            env={**inherited, **GIT_ENVIRONMENT},
            capture_output=True,
            text=True,
            errors="surrogateescape",
            stdin=subprocess.DEVNULL,
            timeout=SECONDS,
        )
    except FileNotFoundError:
        raise ConfigError("putting a repository into an image needs the program git; install it") from None
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise ConfigError(f"git {arguments[0]} in {repository} failed: {last[0]}")
    return done.stdout
