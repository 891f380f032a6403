"""Conversations as token ids, laid out by a Hugging Face chat template."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from jinja2 import TemplateError

from turnstile.agents.base import Context, Parser, Tokenizer, with_instructions
from turnstile.agents.markers import Markers, marks_of, special_marks, text_marks
from turnstile.agents.parsing.hermes import HermesParser
from turnstile.errors import ConfigError
from turnstile.types import I32, Message, ToolCall, ToolSpec

_PROBE = "zq"  # a text that no template contains
_THOUGHT = "qqz"
_CALL = ToolCall(id="call00000", name=f"{_PROBE}tool", arguments={"x": _PROBE})
_TOOL = ToolSpec(
    name=_CALL.name,
    description="a tool",
    schema={"type": "object", "properties": {"x": {"type": "string", "description": "a text"}}, "required": ["x"]},
)
_USER = Message(role="user", content="go")


class ChatTokenizer(Tokenizer, Protocol):
    """The part of a Hugging Face tokenizer that chat templates need."""

    eos_token: str | None
    added_tokens_decoder: Mapping[int, Any]

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any: ...


class ChatRenderer:
    """Renders with any chat template that ends an assistant's turn with a token of its own.

    `template` replaces the tokenizer's template, and `variables` are passed to it (`{"enable_thinking": False}`). If
    the template shows tools in a syntax that `parser` reads, tools go through the template. Otherwise the parser's
    instructions are put in the first message and calls are written in the parser's syntax. If the template does not
    support tool messages, they become user messages. An empty user message is added between two assistant messages, and
    after an assistant message without an answer, since most templates require roles to alternate. Marks of the layout
    that messages quote are encoded as ordinary text (`agents/markers.py`).

    Raises ConfigError for a tokenizer without a template, and for a template whose turns have no end marker.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        parser: Parser | None = None,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.parser: Parser = HermesParser() if parser is None else parser
        self._template = template if template is not None else getattr(tokenizer, "chat_template", None)
        if not self._template:
            raise ConfigError("this tokenizer has no chat template; use the 'lines' renderer or give `template`")
        self._variables = dict(variables or {})
        self._knows_reasoning = self._knows_system = True
        self._native_calls = self._native_answers = True
        self._markers = Markers(tokenizer)
        self._probe()
        self.end, self._end_id = self._find_end()
        self._markers = self._find_markers()
        self._head = self._render([_USER], ())
        eos = tokenizer.eos_token
        self.stop: tuple[str, ...] = (self.end,) if eos in (None, self.end) else (self.end, str(eos))

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> I32:
        """Return the ids of a full render, including the head of the assistant's turn; i32[L].

        No token spans the beginning of an assistant's text, since none did when that text was sampled.
        """
        full = self._render(messages, tools)
        heads = [
            self._render(messages[:place], tools) for place, item in enumerate(messages) if item.role == "assistant"
        ]
        cuts = sorted({0, *(len(head) for head in heads if full.startswith(head)), len(full)})
        pieces = [self._markers.encode(full[begin:end], after=full[:begin]) for begin, end in itertools.pairwise(cuts)]
        return np.concatenate(pieces)

    def observation(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSpec], sampled: I32
    ) -> Context:
        """Return what a full render adds after the sampled tokens, or all of it if the template rewrites earlier turns.

        The new text begins at the assistant's end marker. The marker is located in a render that has a placeholder in
        place of the assistant's text, so nothing that the model wrote is mistaken for it. Only the text from the marker
        on is encoded.
        """
        last = history[-1]
        before = self._render(history[:-1], tools)
        full = self._render([*history[:-1], _with_placeholders(last), *new], tools)
        inside, end, behind = full[len(before) :].partition(self.end)
        kept = not last.reasoning or _THOUGHT in inside
        if not full.startswith(before) or not end or not kept:
            return Context(ids=self.prompt([*history, *new], tools), fresh=True)
        ids = self._markers.encode(self.end + behind)
        ended = len(sampled) > 0 and int(sampled[-1]) == self._end_id
        return Context(ids=ids[1:] if ended else ids)

    def assistant_turn(self, history: Sequence[Message], message: Message, tools: Sequence[ToolSpec]) -> I32:
        """Return the ids of the message and its end marker, as the template writes it in an ongoing conversation.

        If later messages change how the template writes it, for example by dropping reasoning, these are the ids that
        it has at the end of a conversation. If no render continues the head of the turn, they are the ids of the
        parser's text. The turn's end is located with a placeholder, as in `observation`.
        """
        before = self._render(history, tools)
        for goes_on in (True, False):
            full, empty = (
                self._render([*history, one], tools, head=goes_on) for one in (message, _with_placeholders(message))
            )
            inside, end, behind = empty[len(before) :].partition(self.end)
            whole = full.startswith(before) and empty.startswith(before) and full.endswith(end + behind)
            if whole and end and (not message.reasoning or _THOUGHT in inside):
                return self._markers.encode(full[len(before) : len(full) - len(behind)], after=before)
        return self.completion(self.parser.write(message, tools))

    def text(self, token_ids: I32) -> str:
        """Return the turn's text before the first stop string."""
        text = self._markers.decode(token_ids)
        for marker in self.stop:
            text = text.partition(marker)[0]
        return text

    def completion(self, text: str) -> I32:
        """Return the ids of `text` and the end marker."""
        return self._markers.encode(self._markers.quote(text, own=True) + self.end, after=self._head)

    def _render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, head: bool = True) -> str:
        """Return the rendered conversation as text, with quoted marks replaced by their names."""
        messages = [self._markers.message(message) for message in messages]
        tools = [self._markers.tool(tool) for tool in tools]
        if not self._native_calls:
            messages = with_instructions(self.parser, messages, tools)
        dicts = self._alternating([self._as_dict(message, tools) for message in messages], head)
        text: str = self.tokenizer.apply_chat_template(
            dicts,
            tools=[_as_function(tool) for tool in tools] if self._native_calls and tools else None,
            chat_template=self._template,
            add_generation_prompt=head,
            tokenize=False,
            **self._variables,
        )
        return text

    def _as_dict(self, message: Message, tools: Sequence[ToolSpec]) -> dict[str, Any]:
        if message.role == "assistant" and not self._native_calls:
            bare = replace(message, reasoning=None) if self._knows_reasoning else message
            found = {"role": "assistant", "content": self.parser.write(bare, tools)}
        elif message.role == "assistant" and message.reasoning and not self._knows_reasoning:
            bare = replace(message, tool_calls=())
            found = {"role": "assistant", "content": self.parser.write(bare, tools)}
        else:
            role = "user" if message.role == "tool" and not self._native_answers else message.role
            found = {"role": role, "content": message.content}
        extra: dict[str, Any] = {}
        if message.reasoning and self._knows_reasoning:
            extra["reasoning_content"] = message.reasoning
        if message.tool_calls and self._native_calls:
            extra["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
                for call in message.tool_calls
            ]
        if message.role == "tool" and self._native_answers and message.tool_call_id is not None:
            extra["tool_call_id"] = message.tool_call_id
        return {**found, **extra}

    def _alternating(self, dicts: list[dict[str, Any]], head: bool) -> list[dict[str, Any]]:
        """Return the messages with alternating roles.

        Neighbouring user messages are joined, and an empty user message separates assistant messages. With `head`, one
        also follows a final assistant message.
        """
        result: list[dict[str, Any]] = []
        for item in dicts:
            last = result[-1] if result else {"role": ""}
            if item["role"] == "system" and not self._knows_system:
                item = {**item, "role": "user"}
            if item["role"] == last["role"] == "user":
                result[-1] = {**last, "content": f"{last['content']}\n\n{item['content']}"}
                continue
            if item["role"] == last["role"] == "assistant":
                result.append({"role": "user", "content": ""})
            result.append(item)
        if head and result and result[-1]["role"] == "assistant":
            result.append({"role": "user", "content": ""})
        return result

    def _probe(self) -> None:
        """Find out which roles and fields the template supports, by rendering probe messages that use them."""
        reply = Message(role="assistant", content="ok")
        self._knows_system = self._shows([Message(role="system", content=_PROBE), _USER])
        self._knows_reasoning = self._shows([_USER, replace(reply, reasoning=_PROBE)], head=False)
        called = Message(role="assistant", tool_calls=(_CALL,))
        self._native_calls = self._shows([_USER], (_TOOL,)) and self._reads(called)
        answer = Message(role="tool", content=_THOUGHT, tool_call_id=_CALL.id)
        self._native_answers = self._native_calls and self._shows([_USER, called, answer], (_TOOL,), want=_THOUGHT)

    def _shows(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        head: bool = True,
        want: str = _PROBE,
    ) -> bool:
        try:
            return want in self._render(messages, tools, head=head)
        except TemplateError:  # the template does not support such messages
            return False

    def _reads(self, called: Message) -> bool:
        """Return whether the parser can read a tool call as the template writes it."""
        try:
            whole = self._render([_USER, called], (_TOOL,), head=False)
        except TemplateError:
            return False
        text = whole.removeprefix(self._render([_USER], (_TOOL,)))
        for token in marks_of(self.tokenizer):
            if not token.startswith("<tool_call") and not token.startswith("</tool_call"):
                text = text.partition(token)[0] if text.find(token) > text.find(_PROBE) else text
        return self.parser.parse(text, (_TOOL,)).tool_calls[:1] == (_CALL,)

    def _find_markers(self) -> Markers:
        """Return the marks that messages must not write.

        They are the special tokens, the added tokens that the template uses in its layout (including the head of the
        assistant's turn), and the marks that it writes as ordinary text. An assistant may write special tokens that are
        part of the parser's syntax.
        """
        special, tokens = special_marks(self.tokenizer), marks_of(self.tokenizer)
        called = Message(role="assistant", content=_PROBE, reasoning=_THOUGHT, tool_calls=(_CALL,))
        answer = Message(role="tool", content=_THOUGHT, tool_call_id=_CALL.id)
        shown = self._render([_USER, called, answer], (_TOOL,), head=False) + self._render([_USER], (_TOOL,))
        laid_out = {mark for mark in tokens if mark.strip() and mark in shown}
        messages: list[Message] = [
            Message(role=role, content=_PROBE) for role in ("system", "user", "assistant", "user")
        ]
        spoken = self.parser.write(called, (_TOOL,)) + self.parser.instructions((_TOOL,))
        return Markers(
            self.tokenizer,
            foreign=special | laid_out,
            own={mark for mark in special if mark not in spoken},
            text=text_marks(self._render(messages, ()), _PROBE, tokens),
        )

    def _find_end(self) -> tuple[str, int]:
        """Return the token that ends an assistant turn, and its id. Raises ConfigError if there is none."""
        text = self._render([_USER, Message(role="assistant", content=_PROBE)], (), head=False)
        behind = text.rpartition(_PROBE)[2]
        found = [(behind.find(token), -len(token), token, index) for token, index in marks_of(self.tokenizer).items()]
        places = sorted(item for item in found if item[0] >= 0)
        if not places:
            raise ConfigError("this chat template ends the assistant's turn with no token of its own; give `template`")
        return places[0][2], places[0][3]


def _with_placeholders(message: Message) -> Message:
    """Return an assistant's message of the same form, with its texts replaced by placeholders."""
    return replace(
        message,
        content=_PROBE,
        reasoning=_THOUGHT if message.reasoning else None,
        tool_calls=tuple(replace(call, arguments={}) for call in message.tool_calls),
    )


def _as_function(tool: ToolSpec) -> dict[str, Any]:
    """Return the tool in the format of chat templates, without the `x-` keys that only this project reads."""
    schema = {key: value for key, value in tool.schema.items() if not key.startswith("x-")}
    function = {"name": tool.name, "description": tool.description, "parameters": json.loads(json.dumps(schema))}
    return {"type": "function", "function": function}
