"""Write changed files as a diff, in the form that git writes and `git apply` reads."""

from __future__ import annotations

import base64
import difflib
import hashlib
import zlib
from collections.abc import Callable, Collection, Sequence

from turnstile.swe.grading.bench import Files

MOST_LINES = 4000
"""Most lines between the first and the last change, old and new together, that are compared one by one. The time for
that can grow with their square; of more lines, all old ones are replaced with all new ones."""
_ENDLESS = "\\ No newline at end of file\n"


def git_diff(files: Files, base: Callable[[str], bytes | None], executable: Collection[str] = ()) -> str:
    """Return the diff from `base` to `files`; "" if they do not differ.

    `base` returns a file's bytes at the beginning, None if it did not exist. Files that are not UTF-8 text become
    binary patches. `executable` are the new files that can be run.
    """
    return "".join(_file_diff(path, base(path), files[path], path in executable) for path in sorted(files))


def _file_diff(path: str, old: bytes | None, new: bytes | None, executable: bool) -> str:
    if old == new:
        return ""
    before, after = quote_path(f"a/{path}"), quote_path(f"b/{path}")
    head = f"diff --git {before} {after}\n"
    mode = "100755" if executable else "100644"
    if old is None:
        head += f"new file mode {mode}\n"
    elif new is None:
        head += "deleted file mode 100644\n"
    texts = _text(old or b""), _text(new or b"")
    if texts[0] is None or texts[1] is None:
        index = f"index {_blob_id(old)}..{_blob_id(new)}{'' if old is None or new is None else ' 100644'}\n"
        return f"{head}{index}GIT binary patch\n{_literal(new or b'')}\n{_literal(old or b'')}\n"
    before = "/dev/null" if old is None else before
    after = "/dev/null" if new is None else after
    ours, theirs = _lines(texts[0]), _lines(texts[1])
    if _span(ours, theirs) > MOST_LINES:
        lines = [f"--- {before}\n", f"+++ {after}\n", f"@@ -{_extent(ours)} +{_extent(theirs)} @@\n"]
        lines += [f"-{line}" for line in ours] + [f"+{line}" for line in theirs]
    else:
        lines = list(difflib.unified_diff(ours, theirs, before, after))
    return head + "".join(line if line.endswith("\n") else f"{line}\n{_ENDLESS}" for line in lines)


def _text(data: bytes) -> str | None:
    if b"\0" in data:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _lines(text: str) -> list[str]:
    """Return the lines of a text, split at newlines only, as in git."""
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def _span(old: Sequence[str], new: Sequence[str]) -> int:
    """Count the lines of both texts between their common beginning and their common end."""
    shorter = min(len(old), len(new))
    first = next((at for at in range(shorter) if old[at] != new[at]), shorter)
    last = next((at for at in range(shorter - first) if old[-1 - at] != new[-1 - at]), shorter - first)
    return len(old) + len(new) - 2 * (first + last)


def _extent(lines: Sequence[str]) -> str:
    """Return the range of a whole file, as in a hunk's header."""
    return f"{min(len(lines), 1)},{len(lines)}"


def _blob_id(data: bytes | None) -> str:
    if data is None:
        return "0" * 40
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _literal(data: bytes) -> str:
    """Encode a file as the literal of a git binary patch.

    The data is compressed with zlib and encoded in base85, 52 bytes per line, with a character for the length before
    each line.
    """
    packed = zlib.compress(data)
    lines = [f"literal {len(data)}\n"]
    for first in range(0, len(packed), 52):
        part = packed[first : first + 52]
        size = chr(ord("A") + len(part) - 1) if len(part) <= 26 else chr(ord("a") + len(part) - 27)
        lines.append(size + base64.b85encode(part, pad=True).decode() + "\n")
    return "".join(lines)


_ESCAPES = {ord('"'): '\\"', ord("\\"): "\\\\", ord("\n"): "\\n", ord("\t"): "\\t"}


def quote_path(path: str) -> str:
    """Return a path as git writes it, quoted if it contains anything but plain ASCII."""
    data = path.encode("utf-8", "surrogateescape")
    if all(32 <= byte < 127 and byte not in _ESCAPES for byte in data):
        return path
    plain = (_ESCAPES.get(byte) or (chr(byte) if 32 <= byte < 127 else f"\\{byte:03o}") for byte in data)
    return f'"{"".join(plain)}"'


def touched_files(patch: str) -> tuple[str, ...]:
    """Return the files that a unified diff changes, adds or removes."""
    found: dict[str, None] = {}
    for line in patch.splitlines():
        name = ""
        if line.startswith("diff --git a/"):
            name = line.removeprefix("diff --git a/").partition(" b/")[2]
            found[line.removeprefix("diff --git a/").partition(" b/")[0]] = None
        elif line.startswith(("--- a/", "+++ b/")):
            name = line[6:].partition("\t")[0]
        if name:
            found[name] = None
    return tuple(found)
