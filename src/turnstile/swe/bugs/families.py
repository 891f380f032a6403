"""Larger bugs, from wrong variables and swapped arguments to dropped branches and removed bodies.

Like the one-token bugs of `mutate`, they are text edits that leave the rest of the file as it is. Each family is a
small generator over the syntax tree of a function.
"""

from __future__ import annotations

import ast
import itertools
import random
from collections.abc import Callable, Iterator, Sequence

from turnstile.swe.bugs.mutate import (
    Edit,
    FunctionNode,
    Mutant,
    Tokens,
    describe,
    docstring_of,
    outer_functions,
    silent_lines,
    span_of,
)

Found = tuple[int, int, str, str]
"""(line, column, old, new)"""

PAIRS = 3  # pairs drawn per function, at most
_BLOCKS = ("body", "orelse", "finalbody")


def larger_mutants(text: str, kinds: Sequence[str]) -> list[Mutant]:
    """Return a module's bugs of the given larger kinds, sorted by position.

    Kinds without a family are ignored. Raises SyntaxError if the text is not valid Python.
    """
    tree, tokens = ast.parse(text), Tokens(text)
    comments = silent_lines(text)
    families = {kind: FAMILIES[kind] for kind in kinds if kind in FAMILIES}
    found: list[Mutant] = []
    for node, qualname in outer_functions(tree, "") if families else ():
        function = describe(node, qualname, comments, len(tokens.lines))
        edits: set[Edit] = {
            (line, col, kind, old, new, span_of(scope))
            for scope in _scopes(node)
            for kind, family in families.items()
            for line, col, old, new in family(scope, tokens)
        }
        counts: dict[tuple[int, str], int] = {}
        for line, col, kind, old, new, scope in sorted(edits):
            index = counts.get((line, kind), 0)
            counts[line, kind] = index + 1
            found.append(
                Mutant(kind=kind, line=line, col=col, old=old, new=new, function=function, scope=scope, index=index)
            )
    return found


def pairs(singles: Sequence[Mutant], rng: random.Random) -> list[Mutant]:
    """Draw up to PAIRS pairs of one-token bugs per function, each pair on two different lines."""
    groups: dict[tuple[int, int], list[Mutant]] = {}
    for mutant in singles:
        groups.setdefault(mutant.scope, []).append(mutant)
    found: dict[tuple[int, str, int, str], Mutant] = {}
    counts: dict[int, int] = {}
    for group in groups.values():
        if len({mutant.line for mutant in group}) < 2:
            continue
        for _ in range(PAIRS):
            first, second = sorted(rng.sample(group, 2), key=lambda mutant: (mutant.line, mutant.col))
            key = (first.line, first.new, second.line, second.new)
            if first.line == second.line or key in found:
                continue
            index = counts.get(first.line, 0)
            counts[first.line] = index + 1
            found[key] = Mutant(
                kind="pair", line=first.line, col=first.col, old=first.old, new=first.new, function=first.function,
                scope=first.scope, index=index, also=((second.line, second.col, second.old, second.new),),
            )  # fmt: skip
    return list(found.values())


def _scopes(node: FunctionNode) -> Iterator[FunctionNode]:
    """Yield a function and the functions nested in it at any depth, except those inside classes."""
    yield node
    for inner in _body_nodes(node):
        if isinstance(inner, FunctionNode):
            yield from _scopes(inner)


def _body_nodes(node: FunctionNode) -> Iterator[ast.AST]:
    """Yield the syntax nodes of a function's body, without its docstring and annotations.

    Nested functions and classes, lambdas, asserts and f-strings are yielded without their contents.
    """
    docstring = docstring_of(node)
    pending: list[ast.AST] = [statement for statement in node.body if statement is not docstring]
    while pending:
        item = pending.pop()
        yield item
        if not isinstance(item, FunctionNode | ast.ClassDef | ast.Lambda | ast.Assert | ast.JoinedStr):
            annotation = getattr(item, "annotation", None)
            pending.extend(child for child in ast.iter_child_nodes(item) if child is not annotation)


def _span_text(first: ast.expr, last: ast.expr, tokens: Tokens) -> str | None:
    """Return the source from the start of `first` to the end of `last`; None if it spans several lines."""
    (line, start), (end_line, end) = tokens.start(first), tokens.end(last)
    return tokens.lines[line - 1][start:end] if line == end_line else None


def _swapped_arguments(node: FunctionNode, tokens: Tokens) -> Iterator[Found]:
    """Yield swaps of two adjacent arguments on the same line, such as f(a, b) -> f(b, a)."""
    for item in _body_nodes(node):
        if not isinstance(item, ast.Call):
            continue
        for left, right in itertools.pairwise(item.args):
            one, two, both = (_span_text(a, b, tokens) for a, b in ((left, left), (right, right), (left, right)))
            if one is None or two is None or both is None or one == two:
                continue
            if not isinstance(left, ast.Starred) and not isinstance(right, ast.Starred):
                between = both[len(one) : len(both) - len(two)]
                if between.strip() == ",":
                    yield *tokens.start(left), both, two + between + one


def _wrong_variables(node: FunctionNode, tokens: Tokens) -> Iterator[Found]:
    """Yield up to two wrong names for each local variable that is read.

    They are names of parameters, and of variables assigned on earlier lines. Names that are called are left alone.
    """
    arguments = node.args
    known = {
        argument.arg: 0
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        if argument.arg not in ("self", "cls")
    }
    names = [item for item in _body_nodes(node) if isinstance(item, ast.Name)]
    for name in names:
        if isinstance(name.ctx, ast.Store):
            known[name.id] = min(known.get(name.id, name.lineno), name.lineno)
    called = {id(item.func) for item in _body_nodes(node) if isinstance(item, ast.Call)}
    for name in names:
        if not isinstance(name.ctx, ast.Load) or name.id not in known or id(name) in called:
            continue
        others = sorted(other for other, line in known.items() if other != name.id and line < name.lineno)
        start = others.index(max((other for other in others if other < name.id), default=others[0])) if others else 0
        for other in (others[start:] + others[:start])[:2]:
            yield *tokens.start(name), name.id, other


def _shifted_bounds(node: FunctionNode, tokens: Tokens) -> Iterator[Found]:
    """Yield off-by-one bounds, such as x[a:b] -> x[a + 1:b], x[a:] -> x[a:-1] and range(n) -> range(n - 1)."""
    for item in _body_nodes(node):
        if isinstance(item, ast.Slice):
            for bound in (item.lower, item.upper):
                if bound is not None:
                    yield from _off_by_one(bound, tokens)
            colon = next((token for token in tokens.between(tokens.start(item), (item.end_lineno or 0, 1 << 30))
                          if token.string == ":"), None)  # fmt: skip
            if colon is not None and item.lower is None:
                yield *colon.start, "", "1"
            if colon is not None and item.upper is None and item.step is None:
                yield *colon.end, "", "-1"
        elif isinstance(item, ast.Call) and isinstance(item.func, ast.Name) and item.func.id == "range" and item.args:
            yield from _off_by_one(item.args[-1] if len(item.args) < 3 else item.args[1], tokens)


def _off_by_one(bound: ast.expr, tokens: Tokens) -> Iterator[Found]:
    text = _span_text(bound, bound, tokens)
    if text is None or isinstance(bound, ast.Starred | ast.Constant):
        return
    plain = isinstance(bound, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
    for sign in "+-":
        yield *tokens.start(bound), text, f"{text if plain else f'({text})'} {sign} 1"


def _early_returns(node: FunctionNode, tokens: Tokens) -> Iterator[Found]:
    """Yield edits that indent a return, which moves it into the loop, branch or `with` block before it."""
    for block in _blocks(node):
        for before, after in itertools.pairwise(block):
            if isinstance(before, ast.For | ast.While | ast.If | ast.With) and isinstance(after, ast.Return):
                last = (before.orelse if isinstance(before, ast.If) else []) or before.body
                deeper = last[-1].col_offset - after.col_offset
                line, col = tokens.start(after)
                if deeper > 0 and _is_alone(after, tokens):
                    yield line, col, "", tokens.lines[last[-1].lineno - 1][col : col + deeper]


def _dropped_statements(node: FunctionNode, tokens: Tokens) -> Iterator[Found]:
    """Yield removals of assignments, expressions, raises and deletions.

    `pass` takes the place of a statement that is alone in its block.
    """
    for block in _blocks(node):
        for statement in block:
            if isinstance(statement, ast.Assign | ast.AugAssign | ast.Expr | ast.Raise | ast.Delete) and _is_alone(
                statement, tokens
            ):
                yield _remove_lines(statement, statement, tokens, leave_pass=len(block) == 1)


def _dropped_branches(node: FunctionNode, tokens: Tokens) -> Iterator[Found]:
    """Yield removals of an `if` without alternatives, of an `elif`, or of an `else`."""
    for block in _blocks(node):
        for statement in block:
            if not isinstance(statement, ast.If) or not _is_alone(statement, tokens):
                continue
            is_elif = tokens.lines[statement.lineno - 1].lstrip().startswith("elif")
            if is_elif:
                yield _remove_lines(statement, statement.body[-1], tokens)
            elif not statement.orelse:
                yield _remove_lines(statement, statement, tokens, leave_pass=len(block) == 1)
            if statement.orelse and not _is_elif(statement.orelse[0], tokens):
                first = (statement.body[-1].end_lineno or 0) + 1
                line = next((number for number in range(first, statement.orelse[0].lineno)
                             if tokens.lines[number - 1].strip().startswith("else")), None)  # fmt: skip
                if line is not None:
                    old = "".join(tokens.lines[line - 1 : statement.end_lineno])
                    yield line, 0, old, ""


def _removed_bodies(node: FunctionNode, tokens: Tokens) -> Iterator[Found]:
    """Yield the replacement of a whole body, except its docstring, with `raise NotImplementedError`."""
    statements = [statement for statement in node.body if statement is not docstring_of(node)]
    if len(statements) > 1 and all(_is_alone(statement, tokens) for statement in (statements[0], statements[-1])):
        line, col = tokens.start(statements[0])
        old = "".join(tokens.lines[line - 1 : statements[-1].end_lineno])
        end = "\r\n" if old.endswith("\r\n") else "\n" if old.endswith("\n") else ""
        yield line, 0, old, f"{tokens.lines[line - 1][:col]}raise NotImplementedError{end}"


def _blocks(node: FunctionNode) -> Iterator[list[ast.stmt]]:
    """Yield the blocks of statements in a function, except those in nested functions and classes."""
    docstring = docstring_of(node)
    yield [statement for statement in node.body if statement is not docstring]
    for item in _body_nodes(node):
        if isinstance(item, ast.stmt | ast.ExceptHandler) and not isinstance(item, FunctionNode | ast.ClassDef):
            for name in _BLOCKS:
                block = getattr(item, name, None)
                if block:
                    yield block


def _is_alone(statement: ast.stmt, tokens: Tokens) -> bool:
    """Return whether a statement shares its first and last lines with no other statement."""
    (line, col), (end_line, end) = tokens.start(statement), tokens.end(statement)
    rest = tokens.lines[end_line - 1][end:].strip()
    return not tokens.lines[line - 1][:col].strip() and (not rest or rest.startswith("#"))


def _is_elif(statement: ast.stmt, tokens: Tokens) -> bool:
    return isinstance(statement, ast.If) and tokens.lines[statement.lineno - 1].lstrip().startswith("elif")


def _remove_lines(first: ast.stmt, last: ast.stmt, tokens: Tokens, *, leave_pass: bool = False) -> Found:
    """Return the edit that removes the lines from `first` to `last`, or replaces them with `pass` if `leave_pass`."""
    line, col = tokens.start(first)
    old = "".join(tokens.lines[line - 1 : last.end_lineno])
    end = "\r\n" if old.endswith("\r\n") else "\n" if old.endswith("\n") else ""
    return line, 0, old, f"{tokens.lines[line - 1][:col]}pass{end}" if leave_pass else ""


FAMILIES: dict[str, Callable[[FunctionNode, Tokens], Iterator[Found]]] = {
    "args": _swapped_arguments,
    "name": _wrong_variables,
    "slice": _shifted_bounds,
    "return": _early_returns,
    "drop": _dropped_statements,
    "branch": _dropped_branches,
    "body": _removed_bodies,
}
"""Generators of the larger bugs, by kind; `pairs` makes those of kind "pair" from one-token bugs."""
