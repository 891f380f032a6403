"""Is a renderer exact? The proof per model family: incremental contexts against full renders.

Training on what was sampled is sound only if the tokens an episode is fed are those of the conversation's own
layout. `check_renderer` plays fixed conversations and compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from turnstile.agents.base import Renderer
from turnstile.types import Message, ToolCall, ToolSpec

LOOK_UP = ToolSpec(
    name="look_up",
    description="Look a word up.",
    schema={
        "type": "object",
        "properties": {"word": {"type": "string", "description": "the word"}},
        "required": ["word"],
    },
)
_TEXTS = ("view", "fix a == b -> a != b", "naïve — 数 🙂 ​", "  two  blanks  ", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """An opening, then what the assistant says and what it is answered, turn by turn."""

    name: str
    opening: tuple[Message, ...]
    turns: tuple[tuple[Message, tuple[Message, ...]], ...]
    tools: tuple[ToolSpec, ...] = ()


def check_renderer(renderer: Renderer, *, conversations: Sequence[Conversation] | None = None) -> list[str]:
    """What is wrong with a renderer, a line each; an empty list is the proof for these conversations.

    For each turn, with S the ids between the prompt and the new context in a full render (`prompt` of
    everything): the full render is prompt + S + context; S ends in the end marker and reads as the assistant's
    message, and is what `said` gives; after a turn that was cut short the context begins with the marker and is
    otherwise the same. A fresh context is the full render, and is only given where that does not extend the prompt or
    the turn had reasoning. Texts survive `completion` and `text`.
    """
    problems = [
        f"text(completion({text!r})) is {renderer.text(renderer.completion(text))!r}"
        for text in _TEXTS
        if renderer.text(renderer.completion(text)) != text
    ]
    for conversation in CONVERSATIONS if conversations is None else conversations:
        history = list(conversation.opening)
        for number, (said, answered) in enumerate(conversation.turns):
            where = f"{conversation.name}, turn {number}"
            problems += [f"{where}: {what}" for what in _turn(renderer, history, said, answered, conversation.tools)]
            history += [said, *answered]
    return problems


def _turn(
    renderer: Renderer,
    history: Sequence[Message],
    said: Message,
    answered: Sequence[Message],
    tools: Sequence[ToolSpec],
) -> Iterator[str]:
    after = [*history, said]
    prompt, full = renderer.prompt(history, tools), renderer.prompt([*after, *answered], tools)
    marker = renderer.completion("")
    ended = renderer.completion("x")
    context = renderer.observation(after, answered, tools, ended)
    cut = renderer.observation(after, answered, tools, ended[: len(ended) - len(marker)])
    extends = np.array_equal(full[: len(prompt)], prompt)
    if context.fresh or cut.fresh:
        if extends and not said.reasoning:
            yield "the context is fresh though a full render extends the prompt"
        for each in (context, cut):
            if not np.array_equal(each.ids, full):
                yield "the fresh context is not the full render"
        return
    if not extends:
        yield "a full render rewrites the prompt, but the context is not fresh"
        return
    middle = full[len(prompt) : len(full) - len(context.ids)]
    if len(middle) < len(marker) or not np.array_equal(full[len(full) - len(context.ids) :], context.ids):
        yield "a full render does not end in the context"
    elif not np.array_equal(middle[len(middle) - len(marker) :], marker):
        yield f"in a full render the context does not follow the end marker but {renderer.text(middle[-3:])!r}"
    elif not said.tool_calls and said.content.strip() not in renderer.text(middle):
        yield f"a full render has {renderer.text(middle)!r} where the assistant said {said.content!r}"
    elif not np.array_equal(middle, own := renderer.said(history, said, tools)):
        yield f"said gives {renderer.text(own)!r} where a full render has {renderer.text(middle)!r}"
    if not np.array_equal(cut.ids, np.concatenate([marker, context.ids])):
        yield "after a turn cut short the context is not the end marker and then the same"


def _user(text: str) -> Message:
    return Message(role="user", content=text)


def _says(text: str, *, reasoning: str | None = None) -> Message:
    return Message(role="assistant", content=text, reasoning=reasoning)


def _calls(word: str, *, reasoning: str | None = None, content: str = "") -> Message:
    call = ToolCall(id="call00000", name=LOOK_UP.name, arguments={"word": word})
    return Message(role="assistant", content=content, reasoning=reasoning, tool_calls=(call,))


def _result(text: str) -> Message:
    return Message(role="tool", content=text, tool_call_id="call00000")


CONVERSATIONS = (
    Conversation(
        name="plain",
        opening=(_user("Hello."),),
        turns=((_says("Hi."), (_user("Two?"),)), (_says("Two."), (_user("  Three\n\nlines?\n"),)), (_says("3"), ())),
    ),
    Conversation(
        name="system message",
        opening=(Message(role="system", content="Be brief."), _user("Hello.")),
        turns=((_says("Hi."), (_user("More."),)), (_says("No."), (_user("Why?"),))),
    ),
    Conversation(
        name="unicode",
        opening=(_user("Grüße — 数 🙂"),),
        turns=((_says("naïve ​ 数"), (_user("🙂🙂 é"),)), (_says("é"), (_user("ß"),))),
    ),
    Conversation(
        name="empty observation",
        opening=(_user("Go on."),),
        turns=((_says("one"), ()), (_says("two"), ()), (_says("three"), (_user(""),)), (_says("four"), (_user("x"),))),
    ),
    Conversation(
        name="tools",
        opening=(_user("What does naïve mean?"),),
        turns=(
            (_calls("naïve"), (_result("innocent"),)),
            (_calls("innocent"), (_result("not guilty\n"), _result("blameless"))),
            (_says("It means innocent."), (_user("And sound?"),)),
            (_calls("sound"), (_result(""),)),
            (_says("look_up"), (_user("unknown command"),)),
            (_says("I give up."), (_user("Fine."),)),
        ),
        tools=(LOOK_UP,),
    ),
    Conversation(
        name="reasoning",
        opening=(_user("What does naïve mean?"),),
        turns=(
            (_says("Let me think.", reasoning="It is French."), (_user("And?"),)),
            (_calls("naïve", reasoning="Look it up."), (_result("innocent"),)),
            (_calls("innocent", reasoning="And again.", content="Again:"), (_result("blameless"),)),
            (_says("Blameless.", reasoning="Enough."), (_user("Sure?"),)),
            (_says("Yes."), (_user("Good."),)),
        ),
        tools=(LOOK_UP,),
    ),
)
"""With and without tools, of several turns, with texts that tokenizers find hard."""
