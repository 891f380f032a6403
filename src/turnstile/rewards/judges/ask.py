"""Questions to a judge, which are asked concurrently, answered only once each, and parsed."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from turnstile.agents.writer import Writer
from turnstile.errors import EngineError
from turnstile.tasks import jsonl_log
from turnstile.types import Message

T = TypeVar("T")
LONGEST = 300  # maximum number of characters of a text in a constrained answer
_AGAIN = "That cannot be read: {why}. Answer again, with nothing but the JSON object."


class UnreadableError(ValueError):
    """An answer does not have the requested form. The text gives the reason as a clause."""


class Asker:
    """Puts questions to the model `write`, at most `concurrent` at once.

    `identity` names the model and how it is sampled. Answers are kept in the file `kept`, if given, by the contents of
    the question, so the same model is never asked the same question again. If an answer cannot be parsed, the question
    is repeated with the reason, up to `tries` attempts in total; with `constrained` the model can only give answers
    that can be parsed. `failures` collects one entry for each question without a verdict: the reason, and whether the
    model could not be reached.
    """

    def __init__(
        self,
        write: Writer,
        *,
        identity: str,
        kept: Path | None = None,
        concurrent: int = 16,
        tries: int = 2,
        constrained: bool = False,
        close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._write = write
        self._identity = identity
        self._kept = kept
        self._places = asyncio.Semaphore(concurrent)
        self._tries = tries
        self._constrained = constrained
        self._close = close
        self._known: dict[str, str] | None = None
        self._asking: dict[str, asyncio.Task[str]] = {}
        self.failures: list[tuple[str, bool]] = []
        self.questions = 0
        self.asked = 0  # requests made to the model

    async def ask(self, question: str, read: Callable[[str], T], form: str) -> T | None:
        """Return what `read` returns for the answer, or None if there is no answer that `read` accepts.

        The reason for None is added to `failures`. `read` raises UnreadableError for an answer that it cannot parse. It
        must accept every answer that matches the regular expression `form`.
        """
        self.questions += 1
        messages = [Message(role="user", content=question)]
        why = ""
        for seed in range(self._tries):
            try:
                answer = await self._answer(messages, seed, form if self._constrained else "")
            except EngineError as error:
                self.failures.append((str(error), True))
                return None
            try:
                return read(answer)
            except UnreadableError as error:
                why = str(error)
            messages = [
                *messages[:1],
                Message(role="assistant", content=answer),
                Message(role="user", content=_AGAIN.format(why=why)),
            ]
        self.failures.append((why, False))
        return None

    async def close(self) -> None:
        """Release the model."""
        if self._close is not None:
            await self._close()

    async def _answer(self, messages: list[Message], seed: int, regex: str) -> str:
        """Return the model's answer, reusing an earlier answer to the same request."""
        content = json.dumps([self._identity, [[message.role, message.content] for message in messages], seed, regex])
        key = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
        known = self._answers()
        if key in known:
            return known[key]
        if key not in self._asking:
            self._asking[key] = asyncio.ensure_future(self._once(key, messages, seed, regex))
            self._asking[key].add_done_callback(lambda _: self._asking.pop(key, None))
        return await asyncio.shield(self._asking[key])

    async def _once(self, key: str, messages: list[Message], seed: int, regex: str) -> str:
        async with self._places:
            self.asked += 1
            answer = await self._write(messages, seed, regex)
        self._answers()[key] = answer
        if self._kept is not None:
            jsonl_log.append(self._kept, json.dumps({"key": key, "answer": answer}))
        return answer

    def _answers(self) -> dict[str, str]:
        if self._known is None:
            lines = jsonl_log.read(self._kept) if self._kept is not None else ()
            self._known = {line["key"]: line["answer"] for line in lines}
        return self._known


def object_in(answer: str, *keys: str) -> Mapping[str, Any]:
    """Return the last JSON object in an answer that has all `keys`, ignoring the text around it.

    Raises UnreadableError if there is none.
    """
    decoder, found, at = json.JSONDecoder(), None, answer.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(answer, at)
        except (ValueError, RecursionError):
            end = at + 1
        else:
            if isinstance(value, dict) and all(key in value for key in keys):
                found = value
        at = answer.find("{", end)
    if found is None:
        raise UnreadableError(f"it holds no JSON object with {' and '.join(map(repr, keys))}")
    return found


def form_of(example: Mapping[str, Any]) -> str:
    """Return a regular expression for JSON objects like the example.

    A "..." in the example matches a text of up to LONGEST characters, and a list matches any one of its elements.
    """
    return r"\{" + ", ".join(f"{re.escape(json.dumps(key))}: {_form(value)}" for key, value in example.items()) + r"\}"


def _form(value: object) -> str:
    if isinstance(value, Mapping):
        return form_of(value)
    if isinstance(value, list):
        return f"({'|'.join(re.escape(json.dumps(choice)) for choice in value)})"
    return rf'"[^"\\\x00-\x1f]{{1,{LONGEST}}}"'


def checked_fraction(value: object, maximum: float, label: str) -> float:
    """Return a number from 0 to `maximum` as a fraction of `maximum`.

    Raises UnreadableError for any other value, including NaN.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UnreadableError(f"{label} is {value!r:.40}, not a number")
    if not 0 <= value <= maximum:
        raise UnreadableError(f"{label} is {value:g}, not from 0 to {maximum:g}")
    return float(value) / maximum
