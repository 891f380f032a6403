"""One-token bugs at every place in a module's functions that fits a known kind of slip.

A bug is a text edit within one line, found from the syntax tree and the token stream, so the rest of the file stays the
same, byte for byte. Only statements inside functions are edited, but no docstrings, comments, annotations, decorators,
default values, asserts or f-strings.
"""

from __future__ import annotations

import ast
import io
import itertools
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from turnstile.swe.edits import changed_lines, source_lines

TOKEN_KINDS = ("compare", "int", "boolop", "not", "is_in", "arith", "bool", "minmax", "anyall")
"""Kinds of bugs in which one token is wrong."""
LARGER_KINDS = ("args", "name", "slice", "return", "drop", "branch", "body", "pair")
"""Kinds of larger bugs; see `families`."""
KINDS = (*TOKEN_KINDS, *LARGER_KINDS)

_COMPARE = {"<": ("<=", ">"), "<=": ("<", ">="), ">": (">=", "<"), ">=": (">", "<="), "==": ("!=",), "!=": ("==",)}
_ARITH = {"+": ("-",), "-": ("+",), "*": ("/", "+"), "/": ("*",), "//": ("/",), "%": ("//",),
          "+=": ("-=",), "-=": ("+=",), "*=": ("+=",), "/=": ("*=",)}  # fmt: skip
_IS_IN = {"is": "is not", "is not": "is", "in": "not in", "not in": "in"}
_NAMES = {"min": ("minmax", "max"), "max": ("minmax", "min"), "any": ("anyall", "all"), "all": ("anyall", "any")}
_SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True, kw_only=True, slots=True)
class Function:
    """A function or method that is not nested in another one. Lines count from 1, and both ends are included.

    `hidden` are its lines that do not help with a repair: docstrings, comments and blank lines.
    """

    qualname: str
    start: int  # first decorator or the `def` line
    end: int
    hidden: tuple[int, ...]

    @property
    def shown(self) -> int:
        """The number of lines shown."""
        return self.end - self.start + 1 - len(self.hidden)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One bug, which replaces `old` at (line, col) with `new`. Lines count from 1, columns from 0 in characters.

    `also` holds further edits in the same form; all positions refer to the text without the bug. `scope` is the first
    and last line of the innermost function around the bug, which a test must run to reveal it.
    """

    kind: str
    line: int
    col: int
    old: str
    new: str
    function: Function
    scope: tuple[int, int]
    index: int = 0  # position among the mutants of the same line and kind
    also: tuple[tuple[int, int, str, str], ...] = ()

    @property
    def edits(self) -> tuple[tuple[int, int, str, str], ...]:
        return ((self.line, self.col, self.old, self.new), *self.also)

    @property
    def is_small(self) -> bool:
        """Whether the bug is a single edit within one line, so that no line moves."""
        return not self.also and "\n" not in self.old + self.new

    @property
    def lines(self) -> int:
        """The number of lines that the bug changes, removes or adds."""
        return changed_lines(self.edits)


class Tokens:
    """A module's lines and tokens; `solid` are the tokens without comments, line ends and indentation."""

    def __init__(self, text: str) -> None:
        self.lines = source_lines(text)
        self.all = list(tokenize.generate_tokens(io.StringIO(text).readline))
        self.solid = [token for token in self.all if token.type not in _SKIPPED]

    def position(self, line: int, byte_col: int) -> tuple[int, int]:
        """Convert a syntax-tree position, whose column counts UTF-8 bytes, to (line, column in characters)."""
        return line, len(self.lines[line - 1].encode()[:byte_col].decode())

    def start(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        return self.position(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.position(node.end_lineno, node.end_col_offset)

    def between(self, first: tuple[int, int], last: tuple[int, int]) -> list[tokenize.TokenInfo]:
        """Return the tokens in [first, last) except parentheses; between two operands, they are the operator."""
        return [
            token for token in self.solid
            if first <= token.start and token.end <= last and token.string not in "()"
        ]  # fmt: skip


def functions(text: str) -> list[Function]:
    """Return the outermost functions and methods of a module, in order."""
    tree, lines = ast.parse(text), source_lines(text)
    comments = silent_lines(text)
    return [describe(node, qualname, comments, len(lines)) for node, qualname in outer_functions(tree, "")]


def mutants(text: str) -> list[Mutant]:
    """Return every one-token bug of a module, sorted by position.

    Raises SyntaxError if the text is not valid Python.
    """
    tree, tokens = ast.parse(text), Tokens(text)
    comments = silent_lines(text)
    found: list[Mutant] = []
    for node, qualname in outer_functions(tree, ""):
        function = describe(node, qualname, comments, len(tokens.lines))
        edits = sorted(set(_edits_of_function(node, tokens, function)))
        counts: dict[tuple[int, str], int] = {}
        for line, col, kind, old, new, scope in edits:
            index = counts.get((line, kind), 0)
            counts[line, kind] = index + 1
            found.append(Mutant(kind=kind, line=line, col=col, old=old, new=new, function=function, scope=scope,
                                index=index))  # fmt: skip
    return found


Edit = tuple[int, int, str, str, str, tuple[int, int]]
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def outer_functions(node: ast.AST, prefix: str) -> Iterator[tuple[FunctionNode, str]]:
    """Yield the functions and methods that are not nested in another function, each with its qualified name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FunctionNode):
            yield child, prefix + child.name
        elif isinstance(child, ast.ClassDef):
            yield from outer_functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from outer_functions(child, prefix)


def span_of(node: FunctionNode) -> tuple[int, int]:
    """Return the first and last line of a function, including its decorators."""
    assert node.end_lineno is not None
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]), node.end_lineno


def docstring_of(node: ast.AST) -> ast.stmt | None:
    """Return the docstring statement of a function, class or module; None if it has none."""
    body = getattr(node, "body", None)
    if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
        value = body[0].value
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return body[0]
    return None


def silent_lines(text: str) -> set[int]:
    """Return the numbers of the lines outside strings that hold only a comment or white space."""
    lines = source_lines(text)
    silent = {number for number, line in enumerate(lines, 1) if not line.strip() or line.lstrip().startswith("#")}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.STRING:
            silent.difference_update(range(token.start[0], token.end[0] + 1))
    return silent


def describe(node: FunctionNode, qualname: str, comments: set[int], length: int) -> Function:
    """Return the `Function` of a syntax node; `comments` and docstrings become its hidden lines.

    `length` is the number of lines in the file.
    """
    start, end = span_of(node)
    hidden = {line for line in comments if start <= line <= end}
    for inner in ast.walk(node):
        docstring = docstring_of(inner) if isinstance(inner, FunctionNode | ast.ClassDef) else None
        if docstring is not None and docstring.lineno > getattr(inner, "lineno", 0):
            hidden.update(range(docstring.lineno, min(docstring.end_lineno or docstring.lineno, length) + 1))
    return Function(qualname=qualname, start=start, end=end, hidden=tuple(sorted(hidden)))


def _edits_of_function(node: FunctionNode, tokens: Tokens, outer: Function) -> Iterator[Edit]:
    """Yield the edits in a function's body, each with the lines of the innermost function around it."""
    docstring = docstring_of(node)
    pending: list[ast.AST] = [statement for statement in node.body if statement is not docstring]
    while pending:
        item = pending.pop()
        if isinstance(item, FunctionNode):
            yield from _edits_of_function(item, tokens, outer)
            continue
        if isinstance(item, ast.ClassDef | ast.Assert | ast.JoinedStr):
            continue  # positions inside an f-string differ between Python versions
        for line, col, kind, old, new in _edits(item, tokens):
            yield line, col, kind, old, new, span_of(node)
        annotation = getattr(item, "annotation", None)
        pending.extend(child for child in ast.iter_child_nodes(item) if child is not annotation)


def _edits(node: ast.AST, tokens: Tokens) -> Iterator[tuple[int, int, str, str, str]]:
    match node:
        case ast.Compare():
            operands = [node.left, *node.comparators]
            for left, right in itertools.pairwise(operands):
                yield from _compare(tokens.between(tokens.end(left), tokens.start(right)))
        case ast.BinOp():
            yield from _arith(tokens.between(tokens.end(node.left), tokens.start(node.right)))
        case ast.AugAssign():
            yield from _arith(tokens.between(tokens.end(node.target), tokens.start(node.value)))
        case ast.BoolOp():
            other = "or" if isinstance(node.op, ast.And) else "and"
            for left, right in itertools.pairwise(node.values):
                for token in tokens.between(tokens.end(left), tokens.start(right)):
                    yield *token.start, "boolop", token.string, other
        case ast.UnaryOp(op=ast.Not()):
            line, col = tokens.start(node)
            if tokens.lines[line - 1][col:].startswith("not "):
                yield line, col, "not", "not ", ""
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            if isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
                yield *tokens.start(test), "not", "", "not "
        case ast.Constant():
            yield from _constant(node, tokens)
        case ast.Call(func=ast.Name(id=name) as called) if name in _NAMES and len(node.args) > 0:
            kind, other = _NAMES[name]
            yield *tokens.start(called), kind, name, other


def _compare(operator: list[tokenize.TokenInfo]) -> Iterator[tuple[int, int, str, str, str]]:
    text = " ".join(token.string for token in operator)
    if not operator:
        return
    start, end = operator[0].start, operator[-1].end
    if text in _IS_IN and start[0] == end[0] and end[1] - start[1] == len(text):
        yield *start, "is_in", text, _IS_IN[text]
    for other in _COMPARE.get(text, ()):
        yield *start, "compare", text, other


def _arith(operator: list[tokenize.TokenInfo]) -> Iterator[tuple[int, int, str, str, str]]:
    for token in operator:
        for other in _ARITH.get(token.string, ()):
            yield *token.start, "arith", token.string, other


def _constant(node: ast.Constant, tokens: Tokens) -> Iterator[tuple[int, int, str, str, str]]:
    line, col = tokens.start(node)
    if isinstance(node.value, bool):
        yield line, col, "bool", str(node.value), str(not node.value)
    elif isinstance(node.value, int) and tokens.lines[line - 1][col:].startswith(str(node.value)):
        old = tokens.lines[line - 1][slice(*_columns(node, tokens))]
        if old == str(node.value):
            yield line, col, "int", old, str(node.value + 1)
            if node.value > 0:
                yield line, col, "int", old, str(node.value - 1)


def _columns(node: ast.expr, tokens: Tokens) -> tuple[int, int]:
    return tokens.start(node)[1], tokens.end(node)[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """A bug as search and replace on one line: replacing `buggy` with `fixed` repairs the function.

    `unique` means that `buggy` occurs once in the lines shown, so the replacement needs no line number.
    """

    buggy: str
    fixed: str
    unique: bool


def patch(text: str, mutant: Mutant) -> Patch:
    """Return the bug as search and replace, with at least one token of context on each side.

    Context is added until `buggy` is unique in the lines shown or the line ends. For a bug of several edits or lines,
    the texts are those of the first edit and `unique` is False.
    """
    if not mutant.is_small:
        return Patch(buggy=mutant.new, fixed=mutant.old, unique=False)
    lines, spans = _line_spans(text)
    line = lines[mutant.line - 1]
    first, moved = mutant.col, len(mutant.new) - len(mutant.old)
    last = first + len(mutant.new)
    before = [span for span in spans[mutant.line] if span[1] <= first]
    after = [(a + moved, b + moved) for a, b in spans[mutant.line] if a >= first + len(mutant.old)]
    line = line[:first] + mutant.new + line[first + len(mutant.old) :]
    hidden = set(mutant.function.hidden)
    shown = [
        line if number == mutant.line else lines[number - 1]
        for number in range(mutant.function.start, mutant.function.end + 1)
        if number not in hidden
    ]
    view = "\n".join(shown)
    left, right = min(1, len(before)), min(1, len(after))  # tokens of context on each side
    while True:
        start = before[-left][0] if left else first
        end = after[right - 1][1] if right else last
        buggy = line[start:end]
        unique = view.find(buggy, view.find(buggy) + 1) < 0
        if unique or (left == len(before) and right == len(after)):
            break
        if right < len(after) and (right <= left or left == len(before)):
            right += 1
        else:
            left += 1
    fixed = buggy[: first - start] + mutant.old + buggy[last - start :]
    return Patch(buggy=buggy, fixed=fixed, unique=unique)


@lru_cache(maxsize=4)
def _line_spans(text: str) -> tuple[list[str], dict[int, list[tuple[int, int]]]]:
    """Return the lines without their ends, and the column spans of the tokens on each line, by line number.

    A string that spans several lines has one span on each of them.
    """
    lines = [line.rstrip("\r\n") for line in source_lines(text)]
    spans: dict[int, list[tuple[int, int]]] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in _SKIPPED:
            continue
        for number in range(token.start[0], token.end[0] + 1):
            start = token.start[1] if token.start[0] == number else 0
            end = token.end[1] if token.end[0] == number else len(lines[number - 1])
            spans.setdefault(number, []).append((start, end))
    return lines, spans


def site_count(found: list[Mutant]) -> Mapping[str, int]:
    """Count the distinct places for a bug in each function, which is the size of a blind search."""
    sites: dict[str, set[tuple[int, int]]] = {}
    for mutant in found:
        sites.setdefault(mutant.function.qualname, set()).add((mutant.line, mutant.col))
    return {qualname: len(places) for qualname, places in sites.items()}
