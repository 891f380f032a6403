"""A game for learning tests that is won by listening: ask for the word, then say the word that was told."""

from __future__ import annotations

import random
from collections.abc import Mapping

from turnstile.envs.base import Start, Step
from turnstile.tasks.demonstration import DemoStep, call
from turnstile.types import JSON, Message, Task, ToolSpec

WORDS = ("red", "green", "blue")
TEXTS = ["Tell.", "Commands: ask | say WORD", "ask", *WORDS, *(f"say {word}" for word in WORDS)]


def ask_tasks(count: int, *, seed: int = 0) -> list[Task]:
    draw = random.Random(seed)
    return [Task(id=f"ask-{seed}-{i}", env="ask", data={"word": draw.choice(WORDS)}) for i in range(count)]


class AskEnv:
    """`ask` is answered with the task's word, `say WORD` ends the game. Whoever has not listened is right in a
    third of the games."""

    async def reset(self, task: Task) -> Start:
        self.word, self.won, self.said = str(task.data["word"]), False, False
        word = {"type": "object", "properties": {"word": {"type": "string"}}}
        tools = (
            ToolSpec(name="ask", description="Ask for the word.", schema={"type": "object", "properties": {}}),
            ToolSpec(name="say", description="Say the word.", schema=word),
        )
        return Start(messages=(Message(role="user", content="Tell."),), tools=tools)

    async def step(self, message: Message) -> Step:
        action = message.tool_calls[0] if message.tool_calls else None
        signals = {"parsed": action is not None}
        if action is not None and action.name == "say":
            self.said, self.won = True, action.arguments["word"] == self.word
            return Step(terminated=True, submitted=True, signals=signals)
        told = (Message(role="tool", content=self.word),) if action is not None else ()
        return Step(messages=told, signals=signals)

    async def measure(self) -> Mapping[str, JSON]:
        return {"resolved": self.won, "submitted": self.said, "modified": self.said}

    def state_key(self) -> str:
        return ""

    async def close(self) -> None: ...


def deaf(task: Task, rng: random.Random) -> list[DemoStep]:
    """Asks, and says any word: how to act, but not what to say."""
    return [DemoStep(message=call("ask")), DemoStep(message=call("say", word=rng.choice(WORDS)))]
