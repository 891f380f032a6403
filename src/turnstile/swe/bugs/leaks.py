"""Check whether a text gives a repair away.

The check is strict, because a false alarm only costs a better text, while a missed leak costs a task.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import PurePosixPath

from turnstile.swe.bug import Bug

_TOKEN = re.compile(r"\w+|->|==|!=|<=|>=|//|\*\*|<<|>>|[-+*/%]=|[^\w\s]")
_OPERATOR = re.compile(r"[<>=!+*/%|&^~@-]+")
_SPAN = re.compile(r"`[^`]+`|\"[^\"\n]+\"|'[^'\n]+'")
_MIN_CHARS = 5  # characters; shorter code cannot be told from prose
_ENGLISH = frozenset(
    {"a", "and", "all", "any", "as", "assert", "break", "class", "continue", "del", "else", "except", "for", "from",
     "if", "import", "in", "is", "max", "min", "not", "of", "or", "pass", "raise", "range", "return", "the", "to",
     "try", "while", "with"}
)  # fmt: skip
"""Words that prose uses too, so they give something away only in quotes or backticks."""
_NUMBERS = dict(
    enumerate(
        ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
    )
)
_PROSE = {
    "<": r"strict(ly)? (less|smaller|below)|exclusive",
    "<=": r"(less|smaller)[ -](than[ -])?or[ -]equal|at most|no (more|greater|larger) than|inclusive",
    ">": r"strict(ly)? (greater|more|larger|above)|exclusive",
    ">=": r"(greater|more|larger)[ -](than[ -])?or[ -]equal|at least|no (less|fewer|smaller) than|inclusive",
    "==": r"\bequality\b",
    "!=": r"\binequality\b|\bunequal",
    "not": r"\bnegat|\binver(t|s)|opposite",
    "and": r"conjunction|logical and|both conditions",
    "or": r"disjunction|logical or|either condition",
    "+": r"\b(addition|plus)\b",
    "-": r"\b(subtraction|minus)\b",
    "*": r"\b(multiplication|times)\b",
    "/": r"\bdivision\b",
    "//": r"\b(floor|integer) division\b",
    "%": r"\b(modulo|modulus|remainder)\b",
}
"""Patterns of the words that prose uses for an operator."""
_REMEDY = re.compile(
    r"\b(remove|swap|flip|replace|change)\b[^.;]*\b(condition|operator|comparison|negation|constant|branch|statement)\b",
    re.IGNORECASE,
)


def leak(text: str, bug: Bug, shown: str) -> str | None:
    """Return what a text gives away about the place or content of the repair, as a clause; None if nothing.

    `shown` is the text that the writer was shown; its lines may be repeated.
    """
    path = PurePosixPath(bug.file)
    dotted = [".".join(path.with_suffix("").parts[first:]) for first in range(len(path.parts) - 1)]
    names = {bug.file, path.name, *dotted} - {"__init__.py"}
    name_in_text = next((name for name in sorted(names) if name in text), None)
    if name_in_text is not None:
        return f"it names the file {name_in_text}"
    if re.search(r"\blines?\s+\d", text, re.IGNORECASE):
        return "it names a line"
    own = text
    for line in sorted((line.strip() for line in shown.splitlines()), key=len, reverse=True):
        own = own.replace(line, " ") if len(line) >= _MIN_CHARS else own
    for line in _changed_lines(bug):
        if _bare(line) in _bare(own) and _bare(line) not in _bare(shown):
            return f"it quotes the code: {line.strip()}"
    if remedy := _REMEDY.search(own):
        return f"it says what to do: {remedy[0]}"
    spans = " ".join(_SPAN.findall(own))
    for token in sorted(_changed_tokens(bug, shown)):
        if token in _tokens(spans if token.lower() in _ENGLISH else own):
            return f"it names what was changed: {token}"
        if words := _find_words_for(token, own):
            return f"it names what was changed, {token}, in words: {words}"
    return None


def _find_words_for(token: str, text: str) -> str | None:
    """Return the words that a text uses for an operator or a small number; None if it does not mention it."""
    small = token.isdecimal() and int(token) < len(_NUMBERS)
    pattern = rf"\b{_NUMBERS[int(token)]}\b" if small else _PROSE.get(token)
    found = re.search(pattern, text, re.IGNORECASE) if pattern else None
    return found[0] if found else None


def _changed_lines(bug: Bug) -> list[str]:
    texts = [bug.buggy, bug.fixed, *(side for _, _, old, new in bug.edits for side in (old, new))]
    return [line for text in texts for line in text.splitlines() if len(_bare(line)) >= _MIN_CHARS]


def _changed_tokens(bug: Bug, shown: str) -> set[str]:
    """Return the names, numbers and operators in which the bug and the repair differ.

    For edits of whole lines, only long identifiers that do not occur in `shown` count.
    """
    found: set[str] = set()
    known = _tokens(shown)
    for _, _, old, new in bug.edits:
        one, other = Counter(_TOKEN.findall(old)), Counter(_TOKEN.findall(new))
        changed = set((one - other) + (other - one))
        if "\n" in old + new:
            changed = {token for token in changed - known if len(token) >= _MIN_CHARS and token.isidentifier()}
        found |= {token for token in changed if token.isalnum() or "_" in token or _OPERATOR.fullmatch(token)}
    return found


def _tokens(text: str) -> set[str]:
    """Return the tokens of a text, ignoring hyphens between words and list markers."""
    return set(_TOKEN.findall(re.sub(r"(?<=\w)-(?=[^\W\d])|(?m:^\s*[-*]\s)", " ", text)))


def _bare(text: str) -> str:
    return re.sub(r"\s+", "", text)
