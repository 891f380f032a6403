from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest

from turnstile.swe import edits
from turnstile.swe.bugs import mutate


def found(body: str) -> set[tuple[str, str, str]]:
    text = f"def f(a, b, c):\n    {body}\n"
    for mutant in mutate.mutants(text):
        ast.parse(edits.apply(text, mutant.line, mutant.col, mutant.old, mutant.new))
    return {(mutant.kind, mutant.old, mutant.new) for mutant in mutate.mutants(text)}


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ("return a < b", {("compare", "<", "<="), ("compare", "<", ">")}),
        ("return a <= b", {("compare", "<=", "<"), ("compare", "<=", ">=")}),
        ("return a == b", {("compare", "==", "!=")}),
        ("return a != b", {("compare", "!=", "==")}),
        ("return a is b", {("is_in", "is", "is not")}),
        ("return a is not b", {("is_in", "is not", "is")}),
        ("return a in b", {("is_in", "in", "not in")}),
        ("return a not in b", {("is_in", "not in", "in")}),
        ("return a[7]", {("int", "7", "8"), ("int", "7", "6")}),
        ("return 0", {("int", "0", "1")}),
        ("return 0x10, 1_000, 1.5, 2j, '3'", set()),
        ("return True, False", {("bool", "True", "False"), ("bool", "False", "True")}),
        ("return a and b", {("boolop", "and", "or")}),
        ("return not a", {("not", "not ", "")}),
        ("return not(a)", set()),
        ("return a + b", {("arith", "+", "-")}),
        ("return a * b", {("arith", "*", "/"), ("arith", "*", "+")}),
        ("return a // b", {("arith", "//", "/")}),
        ("a -= b", {("arith", "-=", "+=")}),
        ("return min(a, b)", {("minmax", "min", "max")}),
        ("return all(a)", {("anyall", "all", "any")}),
        ("return a.min(b), max(), any", set()),
        ("return b if a else c", {("not", "", "not ")}),
        ("return f'{a + 1 < b}'", set()),
        ("x: 'a < b' = c", set()),
        ("x: a[1] = c", set()),
        ("assert a < b", set()),
    ],
)
def test_each_family_edits_one_token(body: str, want: set[tuple[str, str, str]]) -> None:
    assert found(body) == want


def test_mutants_follow_the_order_of_the_file() -> None:
    text = "def f(a, b):\n    return a < b, a + 5 < b\n"
    assert [(mutant.col, mutant.new) for mutant in mutate.mutants(text)] == [
        (13, "<="), (13, ">"), (20, "-"), (22, "4"), (22, "6"), (24, "<="), (24, ">")
    ]  # fmt: skip


def test_operators_are_found_between_parentheses_and_comments() -> None:
    text = "def f(a, b):\n    return ((a)  # a + b\n            +\n            (b))\n"
    (mutant,) = mutate.mutants(text)
    assert (mutant.line, mutant.col) == (3, 12)
    assert edits.apply(text, 3, 12, "+", "-") == text.replace("            +\n", "            -\n")


def test_columns_count_characters() -> None:
    text = "def f(a):\n    return 'äöü€𝄞', a < 1, 'ß'\n"
    for mutant in mutate.mutants(text):
        changed = edits.apply(text, mutant.line, mutant.col, mutant.old, mutant.new)
        assert changed.count("'äöü€𝄞'") == changed.count("'ß'") == 1
        assert sum(x != y for x, y in zip(text.split(), changed.split(), strict=True)) == 1


def test_a_form_feed_does_not_end_a_line() -> None:
    text = "x = 1\n\x0c\ndef f(a):\r\n    return a < 1\r\n"
    mutant = next(mutant for mutant in mutate.mutants(text) if mutant.kind == "compare")
    assert mutant.line == 4
    assert edits.apply(text, 4, mutant.col, "<", "<=") == text.replace("<", "<=")


SOURCE = textwrap.dedent(
    '''
    import os
    LIMIT = 3 < 4

    class Box:
        size = 1

        @property
        @cached(9)
        def area(self, n=2) -> "1 < 2":
            """Doc < string

            1 + 1"""
            # comment 3 < 4

            text = """
    # not a comment
            """

            def inner(x=5):
                "inner doc"
                return x < 6
            return inner
    '''
).lstrip()


def test_only_statements_in_functions_are_edited() -> None:
    kinds = [(mutant.kind, mutant.line, mutant.old) for mutant in mutate.mutants(SOURCE)]
    assert kinds == [("compare", 21, "<"), ("compare", 21, "<"), ("int", 21, "6"), ("int", 21, "6")]


def test_functions_have_qualified_names_and_hidden_lines() -> None:
    (function,) = mutate.functions(SOURCE)
    assert (function.qualname, function.start, function.end) == ("Box.area", 7, 22)
    assert function.hidden == (10, 11, 12, 13, 14, 18, 20)  # 16 looks like a comment and is part of a string
    assert function.shown == 9


def test_the_scope_is_the_innermost_function_with_its_decorators() -> None:
    assert {mutant.scope for mutant in mutate.mutants(SOURCE)} == {(19, 21)}
    text = "def f(a):\n    def g(b):\n        return b + b\n    return a * g\n"
    scopes = {mutant.line: mutant.scope for mutant in mutate.mutants(text)}
    assert scopes == {3: (2, 3), 4: (1, 4)}


def patch_of(text: str, kind: str, index: int = 0) -> mutate.Patch:
    return mutate.patch(text, [mutant for mutant in mutate.mutants(text) if mutant.kind == kind][index])


def test_a_patch_has_one_token_of_context_on_each_side() -> None:
    text = "def f(a, b):\n    if a.x < b.y:\n        return not b\n"
    assert patch_of(text, "compare") == mutate.Patch(buggy="x <= b", fixed="x < b", unique=True)
    assert patch_of(text, "not") == mutate.Patch(buggy="return b", fixed="return not b", unique=True)


def test_a_patch_grows_until_it_is_unique() -> None:
    text = "def f(a, b):\n    x = a < b\n    y = a <= b\n    return x\n"
    patch = patch_of(text, "compare")
    assert patch == mutate.Patch(buggy="x = a <= b", fixed="x = a < b", unique=True)


def test_a_patch_that_cannot_be_unique_says_so() -> None:
    text = "def f(a):\n    a = 1\n    a = 2\n"
    patch = mutate.patch(text, next(m for m in mutate.mutants(text) if m.line == 2 and m.new == "2"))
    assert patch == mutate.Patch(buggy="a = 2", fixed="a = 1", unique=False)


def test_hidden_lines_do_not_count_for_uniqueness() -> None:
    text = 'def f(a, b):\n    """a <= b"""\n    # a <= b\n    return a < b\n'
    assert patch_of(text, "compare").buggy == "a <= b"


def test_every_unique_patch_repairs_its_function() -> None:
    text = Path(mutate.__file__).read_text(encoding="utf-8")
    mutants = mutate.mutants(text)
    assert len(mutants) > 50
    for mutant in mutants[::7]:
        patch = mutate.patch(text, mutant)
        line = edits.source_lines(edits.apply(text, mutant.line, mutant.col, mutant.old, mutant.new))[mutant.line - 1]
        assert patch.buggy in line
        if patch.unique:
            assert line.replace(patch.buggy, patch.fixed) == edits.source_lines(text)[mutant.line - 1]


def test_an_edit_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="expected '<', found 'a'"):
        edits.apply("a < b\n", 1, 0, "<", "<=")
    with pytest.raises(ValueError):
        edits.apply("a < b\n", 9, 0, "<", "<=")


def test_a_site_with_several_mutants_counts_once() -> None:
    text = "def f(a):\n    return a < 5\n"
    assert len(mutate.mutants(text)) == 4
    assert mutate.site_count(mutate.mutants(text)) == {"f": 2}


def test_ids_of_one_line_do_not_clash() -> None:
    text = "def f(a):\n    return a < 5, a < 6\n"
    keys = [(mutant.line, mutant.kind, mutant.index) for mutant in mutate.mutants(text)]
    assert len(set(keys)) == len(keys) == 8
