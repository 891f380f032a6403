from __future__ import annotations

import ast
import random
import textwrap
from pathlib import Path

import pytest

from turnstile.swe import edits
from turnstile.swe.bug import Bug
from turnstile.swe.bugs import families, mutate
from turnstile.tasks.base import load_tasks


def changed(kind: str, body: str) -> list[str]:
    """The bodies that a family makes of one, without indentation."""
    text = "def f(a, b, *, c=1):\n" + textwrap.indent(textwrap.dedent(body).strip("\n"), "    ") + "\n"
    made = []
    for mutant in families.larger_mutants(text, [kind]):
        assert mutant.kind == kind
        result = edits.apply_all(text, mutant.edits)
        ast.parse(result)
        made.append(textwrap.dedent(result.partition("\n")[2]).rstrip("\n"))
    return made


@pytest.mark.parametrize(
    ("kind", "body", "want"),
    [
        ("args", "return g(a, b)", ["return g(b, a)"]),
        ("args", "return g(a, x=b) + g(a, a) + g(*a, b)", []),
        ("args", "return g(a,\n         b)", []),
        ("name", "return a", ["return b", "return c"]),
        ("name", "x = a\nreturn x", ["x = b", "x = c", "x = a\nreturn a", "x = a\nreturn c"]),
        ("name", "return len(g)", []),
        ("slice", "return a[b:]", ["return a[b + 1:]", "return a[b - 1:]", "return a[b:-1]"]),
        ("slice", "return a[:2]", ["return a[1:2]"]),
        ("slice", "return a[::b]", ["return a[1::b]"]),
        ("slice", "return range(a * b)", ["return range((a * b) + 1)", "return range((a * b) - 1)"]),
        ("return", "for x in a:\n    g(x)\nreturn b", ["for x in a:\n    g(x)\n    return b"]),
        ("return", "x = a\nreturn x", []),
        ("drop", "x = a\nx += 1  # more\nreturn x", ["x += 1  # more\nreturn x", "x = a\nreturn x"]),
        ("drop", "if a:\n    raise g(\n        b)\nreturn 1", ["if a:\n    pass\nreturn 1"]),
        ("drop", "x = a; y = b\nreturn x, y", []),
        ("drop", "'''Doc.'''\nreturn a", []),
        ("branch", "if a:\n    return 1\nreturn 2", ["return 2"]),
        ("branch", "if a:\n    x = 1\nelse:\n    x = 2\nreturn x", ["if a:\n    x = 1\nreturn x"]),
        (
            "branch",
            "if a:\n    x = 1\nelif b:\n    x = 2\nelse:\n    x = 3\nreturn x",
            ["if a:\n    x = 1\nelse:\n    x = 3\nreturn x", "if a:\n    x = 1\nelif b:\n    x = 2\nreturn x"],
        ),
        ("branch", "for x in a:\n    if x:\n        g(x)\nreturn a", ["for x in a:\n    pass\nreturn a"]),
        ("body", "'''Doc.'''\nx = a\nreturn x", ["'''Doc.'''\nraise NotImplementedError"]),
        ("body", "return a", []),
    ],
)  # fmt: skip
def test_each_family_makes_its_mutants(kind: str, body: str, want: list[str]) -> None:
    made = changed(kind, body)
    if kind == "name" and "x = a" in body:
        want = [one if "\n" in one else f"{one}\nreturn x" for one in want]
    assert made == want


@pytest.mark.slow
def test_mutants_of_a_real_module_parse_and_have_unique_ids() -> None:
    text = Path(mutate.__file__).read_text(encoding="utf-8")
    mutants = families.larger_mutants(text, mutate.LARGER_KINDS)
    assert {mutant.kind for mutant in mutants} == set(families.FAMILIES)
    assert len({(mutant.line, mutant.kind, mutant.index) for mutant in mutants}) == len(mutants)
    for mutant in mutants:
        result = edits.apply_all(text, mutant.edits)
        ast.parse(result)
        assert result != text


def test_a_pair_changes_two_lines_of_one_function() -> None:
    text = "def f(a, b):\n    x = a + 1\n    y = b - 2\n    return x < y\n\n\ndef g(a):\n    return a + 1\n"
    found = families.pairs(mutate.mutants(text), random.Random(0))
    assert found
    assert len({(mutant.line, mutant.index) for mutant in found}) == len(found)
    for mutant in found:
        assert mutant.function.qualname == "f"
        assert mutant.lines == 2
        before, after = text.splitlines(), edits.apply_all(text, mutant.edits).splitlines()
        assert sum(one != two for one, two in zip(before, after, strict=True)) == 2
    assert found == families.pairs(mutate.mutants(text), random.Random(0))


def test_every_larger_kind_belongs_to_a_family() -> None:
    assert {*families.FAMILIES, "pair"} == set(mutate.LARGER_KINDS)


def test_older_tasks_are_read_unchanged() -> None:
    task = load_tasks(Path(__file__).parents[3] / "data" / "demo" / "train.jsonl")[0]
    bug = Bug.of(task)
    assert (bug.also, bug.files, bug.lines, bug.statement) == ((), 1, 1, "")
    assert {key: value for key, value in bug.data().items() if key in task.data} == task.data
