"""Actions as single lines, for small models: `NAME argument`, `fix OLD -> NEW`.

A tool without arguments is written as its name alone. If it has one argument, the rest of the line is that argument. If
it has several, the schema gives their form in the line under the key `x-line`: `"{old} -> {new}"`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from turnstile.errors import ConfigError
from turnstile.types import JSON, Message, ToolCall, ToolSpec

CALL_ID = "call00000"
"""The id of a line's only call (nine letters and digits, which even the strictest templates accept)."""

_FIELD = re.compile(r"\{(\w+)\}")


class LineParser:
    """Parses one action per message, from the first line that is not empty. Tool names must match exactly."""

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> Message:
        """Return the line as an assistant's message, without tool calls if it does not match any tool's form.

        Accepts any text. Raises ConfigError only for a called tool that has several arguments and no line form.
        """
        line = next((part.strip() for part in text.splitlines() if part.strip()), "")
        name, _, rest = line.partition(" ")
        for tool in tools:
            if tool.name == name:
                arguments = _read(tool, rest.strip())
                if arguments is not None:
                    call = ToolCall(id=CALL_ID, name=name, arguments=arguments)
                    return Message(role="assistant", content=line, tool_calls=(call,))
        return Message(role="assistant", content=line)

    def write(self, message: Message, tools: Sequence[ToolSpec]) -> str:
        """Return the line of the message's first tool call, or its content if it has none."""
        if not message.tool_calls:
            return message.content
        call = message.tool_calls[0]
        form = next((_form(tool) for tool in tools if tool.name == call.name), "")
        rest = _FIELD.sub(lambda field: _show(call.arguments.get(field[1], "")), form)
        return f"{call.name} {rest}".strip()

    def instructions(self, tools: Sequence[ToolSpec]) -> str:
        """Return one line that lists the commands, such as `Commands: view | fix OLD -> NEW | submit`."""
        forms = (f"{tool.name} {_FIELD.sub(lambda field: field[1].upper(), _form(tool))}".strip() for tool in tools)
        return "Commands: " + " | ".join(forms)


def _form(tool: ToolSpec) -> str:
    """Return the form of the tool's arguments in a line, with `{name}` for each; "" if it has none.

    Raises ConfigError if it has several arguments and no `x-line`.
    """
    declared = tool.schema.get("x-line")
    if declared is not None:
        return str(declared)
    names = list(tool.schema.get("properties", {}))
    if len(names) > 1:
        raise ConfigError(
            f"tool {tool.name!r} has {len(names)} arguments and no line form; "
            'add "x-line" to its schema, such as "{old} -> {new}"'
        )
    return "{" + names[0] + "}" if names else ""


def _read(tool: ToolSpec, rest: str) -> Mapping[str, JSON] | None:
    """Return the arguments in `rest`, or None if they do not match the tool's form and types."""
    form = _form(tool)
    properties: Mapping[str, Mapping[str, JSON]] = tool.schema.get("properties", {})
    required = tool.schema.get("required", list(properties))
    if not rest:
        return None if required else {}
    match = re.fullmatch(_pattern(form), rest)
    if match is None:
        return None
    arguments: dict[str, JSON] = {}
    for name, text in match.groupdict().items():
        value = _as_type(text.strip(), properties.get(name, {}))
        if value is None:
            return None
        arguments[name] = value
    return arguments


def _pattern(form: str) -> str:
    """Return a regular expression for `form`, in which blanks around literal text may be missing at the line's ends."""
    pieces = _FIELD.split(form)
    pattern = ""
    for index, piece in enumerate(pieces):
        if index % 2:
            pattern += f"(?P<{piece}>.*?)"
        elif piece.strip():
            before = r"(?:^|\s+)" if piece[0].isspace() else ""
            after = r"(?:\s+|$)" if piece[-1].isspace() else ""
            pattern += before + re.escape(piece.strip()) + after
        elif piece:
            pattern += r"\s+"
    return pattern


def _as_type(text: str, schema: Mapping[str, JSON]) -> JSON | None:
    """Return `text` converted to the schema's type, or None if that fails.

    A text must have at least `minLength` characters (1 by default).
    """
    kind = schema.get("type", "string")
    if kind == "integer":
        return int(text) if re.fullmatch(r"[+-]?\d{1,18}", text) else None
    if kind == "number":
        return float(text) if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", text, re.I) else None
    if kind == "boolean":
        return {"true": True, "false": False}.get(text.lower())
    return text if len(text) >= schema.get("minLength", 1) else None


def _show(value: JSON) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
