"""The script that cuts a repository's history down to the state in which a task begins."""

from __future__ import annotations

import shlex


def cut_history(workdir: str) -> str:
    """Return a bash script that cuts the git history in a task's image down to one commit.

    It prints the number of commits that are left and the number that can be reached by name, which are 1 and 1 if all
    went well. One commit without parents goes into an empty repository, with only the objects that it needs. The tag
    that describes it keeps its name, as builds ask for it.
    """
    return _CUT.format(workdir=shlex.quote(workdir))


_CUT = """
set -e
set -o pipefail
cd {workdir}
export GIT_AUTHOR_NAME=task GIT_AUTHOR_EMAIL=task@localhost GIT_AUTHOR_DATE="2000-01-01T00:00:00Z"
export GIT_COMMITTER_NAME=task GIT_COMMITTER_EMAIL=task@localhost GIT_COMMITTER_DATE="2000-01-01T00:00:00Z"
new=/tmp/turnstile-git
rm -rf $new
tag=$(git describe --tags --abbrev=0 2>/dev/null || true)
git add -u
commit=$(git commit-tree "$(git write-tree)" -m "The state that the task begins with" </dev/null)
git init -q --bare $new
printf '%s\\n' "$commit" | git pack-objects -q --revs --stdout | git --git-dir=$new index-pack --stdin >/dev/null
git --git-dir=$new update-ref refs/heads/main "$commit"
git --git-dir=$new symbolic-ref HEAD refs/heads/main
git --git-dir=$new config core.bare false
test -z "$tag" || git --git-dir=$new tag "$tag" main
cp .git/info/exclude $new/info/exclude 2>/dev/null || true
rm -rf .git
mv $new .git
git reset -q
echo $(git cat-file --batch-all-objects --batch-check | grep -c ' commit ') $(git rev-list --all | wc -l)
"""
