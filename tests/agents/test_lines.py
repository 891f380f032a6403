"""Actions as plain lines, for small models."""

from __future__ import annotations

import string

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import byte_tokenizer
from turnstile.agents.base import Renderer
from turnstile.agents.check import check_renderer
from turnstile.agents.parsing.lines import CALL_ID, LineParser
from turnstile.agents.renderer import LinesRenderer
from turnstile.errors import ConfigError
from turnstile.swe.envs.swe import TOOLS
from turnstile.types import Message, ToolCall, ToolSpec

PARSER = LineParser()
BYTES = LinesRenderer(byte_tokenizer())


def tool(name: str, **properties: str) -> ToolSpec:
    """A tool whose arguments have these types; `x_line` is its line form."""
    form = properties.pop("x_line", None)
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return ToolSpec(name=name, description=name, schema=schema | ({"x-line": form} if form else {}))


NUMBERS = (
    tool("guess", number="integer"),
    tool("scale", factor="number"),
    tool("flag", on="boolean"),
    tool("edit", line="integer", text="string", x_line="{line} {text}"),
    tool("move", a="string", b="string", x_line="{a} to {b}!"),
)


def called(name: str, **arguments: object) -> tuple[ToolCall, ...]:
    return (ToolCall(id=CALL_ID, name=name, arguments=arguments),)


@pytest.mark.parametrize(
    ("line", "name", "arguments"),
    [
        ("view", "view", {}),
        ("  view  ", "view", {}),
        ("\nrun\nview", "run", {}),
        ("fix a == b -> a != b", "fix", {"old": "a == b", "new": "a != b"}),
        ("fix  x   ->   y ", "fix", {"old": "x", "new": "y"}),
        ("fix a -> b -> c", "fix", {"old": "a", "new": "b -> c"}),
        ("fix not  ->", "fix", {"old": "not", "new": ""}),
        ("fix a->b -> c", "fix", {"old": "a->b", "new": "c"}),
        ("guess 7", "guess", {"number": 7}),
        ("guess -3", "guess", {"number": -3}),
        ("scale .5", "scale", {"factor": 0.5}),
        ("flag true", "flag", {"on": True}),
        ("edit 12 x = 1", "edit", {"line": 12, "text": "x = 1"}),
        ("move here to there!", "move", {"a": "here", "b": "there"}),
    ],
)
def test_reads(line, name, arguments):
    message = PARSER.parse(line, TOOLS + NUMBERS)
    assert message.tool_calls == called(name, **arguments)
    assert message.content == line.strip().split("\n")[0].strip()


@pytest.mark.parametrize(
    "line",
    ["", "  ", "View", "views", "view it", "fix", "fix a", "fix a->b", "fix -> b", "guess seven", "guess 1.5",
     "guess", "flag 1", "edit x y", "scale nan", "move a to b", "guess " + "9" * 5000, "\ud83d\x00"],
)  # fmt: skip
def test_does_not_read(line):
    message = PARSER.parse(line, TOOLS + NUMBERS)
    assert message.tool_calls == ()
    assert message.content == line.strip()


words = st.text(string.ascii_letters + string.digits + " ()[]=<>!.,:'\"_+*-é数", min_size=1).map(str.strip).filter(bool)


@given(old=words.filter(lambda text: "->" not in text), new=words | st.just(""))
def test_fix_is_its_own_inverse(old, new):
    line = PARSER.write(Message(role="assistant", tool_calls=called("fix", old=old, new=new)), TOOLS)
    message = PARSER.parse(line, TOOLS)
    assert message.tool_calls == called("fix", old=old, new=new)
    assert PARSER.parse(PARSER.write(message, TOOLS), TOOLS) == message


@given(st.text())
@settings(max_examples=200)
def test_never_raises_and_what_is_read_is_written_back(text):
    message = PARSER.parse(text, TOOLS + NUMBERS)
    assert PARSER.parse(PARSER.write(message, TOOLS + NUMBERS), TOOLS + NUMBERS) == message


@pytest.mark.parametrize("value", [True, -4, 2.5])
def test_typed_values_survive(value):
    name, key = {bool: ("flag", "on"), int: ("guess", "number"), float: ("scale", "factor")}[type(value)]
    message = Message(role="assistant", tool_calls=called(name, **{key: value}))
    assert PARSER.parse(PARSER.write(message, NUMBERS), NUMBERS).tool_calls == message.tool_calls


def test_instructions_list_the_commands():
    assert PARSER.instructions(TOOLS) == "Commands: view | fix OLD -> NEW | undo | run | submit"
    assert PARSER.instructions(NUMBERS).endswith(
        "guess NUMBER | scale FACTOR | flag ON | edit LINE TEXT | move A to B!"
    )


def test_several_arguments_need_a_form():
    with pytest.raises(ConfigError, match="tool 'both' has 2 arguments and no line form"):
        PARSER.instructions([tool("both", a="string", b="string")])


# The renderer


@pytest.fixture(scope="module", params=["smollm2", "bytes_"])
def lines(request):
    return LinesRenderer(request.getfixturevalue(request.param))


def decoded(renderer, ids) -> str:
    return renderer.tokenizer.decode(list(ids))


def test_is_a_renderer(lines):
    assert isinstance(lines, Renderer)
    assert lines.stop == ("\n",)


def test_prompt_is_text_and_instructions(lines):
    ids = lines.prompt([Message(role="system", content="Be brief."), Message(role="user", content="Go\n")], TOOLS)
    assert ids.dtype == np.int32
    assert decoded(lines, ids) == "Be brief.\nGo\n" + PARSER.instructions(TOOLS) + "\n"
    assert decoded(lines, lines.prompt([Message(role="user", content="Go")], ())) == "Go\n"


def test_prefix_stands_first(bytes_):
    ids = LinesRenderer(bytes_, prefix="<|im_start|>").prompt([Message(role="user", content="Go")], ())
    assert ids[0] == bytes_.convert_tokens_to_ids("<|im_start|>")
    assert decoded(LinesRenderer(bytes_), ids) == "<|im_start|>Go\n"


@pytest.mark.parametrize(
    ("sampled", "added"),
    [("view\n", "ok\n"), ("view\n\n", "ok\n"), ("view", "\nok\n"), ("", "\nok\n"), ("\n", "ok\n"), ("é数\n", "ok\n")],
)
def test_observation_adds_what_is_missing(lines, sampled, added):
    ids = np.asarray(lines.tokenizer.encode(sampled), dtype=np.int32)
    history = [Message(role="user", content="Go"), PARSER.parse(sampled, TOOLS)]
    context = lines.observation(history, [Message(role="tool", content="ok", tool_call_id="x")], TOOLS, ids)
    assert not context.fresh
    assert decoded(lines, context.ids) == added


def test_empty_observations_add_nothing_more(lines):
    history = [Message(role="user", content="Go"), Message(role="assistant", content="view")]
    done, cut = lines.completion("view"), lines.completion("view")[:-1]
    for new in ([], [Message(role="user", content="")]):
        assert lines.observation(history, new, TOOLS, done).ids.tolist() == []
        assert decoded(lines, lines.observation(history, new, TOOLS, cut).ids) == "\n"


def test_text_is_the_first_line_without_special_tokens(lines):
    ids = np.asarray(lines.tokenizer.encode("view<|im_end|>\nrun\n"), dtype=np.int32)
    assert lines.text(ids) == "view"


@given(text=st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=30))
@settings(max_examples=60, deadline=None)
def test_completion_and_text_are_inverse(text):
    if "<|" not in text:
        assert BYTES.text(BYTES.completion(text)) == text


@pytest.mark.parametrize("code", ["x . y , z", "don 't  a != b", "    if a is not None :", "\tx", "f( 'n''t' ) ;"])
def test_code_survives_the_tokenizer(lines, code):
    assert lines.text(lines.completion(code)) == code


def test_the_whole_is_exact(lines):
    assert check_renderer(lines) == []
