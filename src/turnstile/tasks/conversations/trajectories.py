"""Conversations as an agent's trajectories, with its tokens turn by turn as if it had sampled them."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jinja2 import TemplateError

from turnstile.agents.base import Context, Scaffold
from turnstile.tasks.conversations.conversation import Conversation
from turnstile.types import I32, Completion, Message, Sampling, Stop, ToolSpec, Trajectory, Turn

TOO_LONG = "longer than the context"
NOTHING = "nothing to learn"
FORGED = "a message that contains the model's control tokens, which would pass for the template's"
UNREADABLE = "a message that the agent's parser would not read as intended"
_NOT_SAMPLED = Sampling(temperature=1.0)  # for tokens that were not sampled


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedConversations:
    """Conversations as trajectories, and counts of the conversations left out."""

    trajectories: list[Trajectory] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)  # reason -> number of conversations
    cut: int = 0  # number of trajectories cut to the context

    def tokens(self) -> int:
        """Return the number of tokens in the trajectories."""
        return sum(len(turn.context_ids) + len(turn.completion.token_ids) for turn in self._turns())

    def trained_tokens(self) -> int:
        """Return the number of tokens to train on."""
        return sum(len(turn.completion.token_ids) for turn in self._turns() if turn.trainable)

    def _turns(self) -> Iterable[Turn]:
        return (turn for trajectory in self.trajectories for turn in trajectory.turns)

    def summary(self) -> str:
        """Return a one-line summary."""
        parts = [f"{count} left out: {why}" for why, count in self.left_out.most_common()]
        if self.cut:
            parts.insert(0, f"{self.cut} of them cut to the context")
        text = (
            f"{len(self.trajectories)} conversations, {self.tokens()} tokens, {self.trained_tokens()} of them to learn"
        )
        return "; ".join([text, *parts])


def to_trajectories(
    conversations: Sequence[Conversation],
    scaffold: Scaffold,
    *,
    context: int,
    cut: bool = False,
    controls: Collection[str] = (),
    done: Callable[[Trajectory], None] = lambda trajectory: None,
) -> TokenizedConversations:
    """Return each conversation as a trajectory of the agent, in a group of its own.

    A conversation that exceeds `context` (tokens; 0: no limit) is left out, or with `cut` ends with the last turn that
    fits. Also left out are conversations with nothing to train on, with one of the tokenizer's `controls` in a text,
    those that the chat template rejects, and those with a trainable message that the scaffold's parser would read
    differently. `done` is called with each trajectory that is kept.
    """
    kept: list[Trajectory] = []
    left_out: Counter[str] = Counter()
    shortened = 0
    for number, conversation in enumerate(conversations):
        if not any(conversation.trainable):
            left_out[NOTHING] += 1
            continue
        texts = [text for message in conversation.messages for text in _texts(message)]
        if any(control in text for text in texts for control in controls):
            left_out[FORGED] += 1
            continue
        try:
            full = trajectory(conversation, scaffold, group=f"conversations/{number}/{conversation.id}")
        except TemplateError as error:
            left_out[f"the chat template refuses it ({error})"] += 1
            continue
        if not all(_parses_back(turn, scaffold, conversation.tools) for turn in full.turns if turn.trainable):
            left_out[UNREADABLE] += 1
            continue
        turns = full.turns[: _count_fitting(full.turns, context)]
        if len(turns) < len(full.turns):
            if not cut or not any(turn.trainable for turn in turns):
                left_out[TOO_LONG] += 1
                continue
            shortened += 1
        kept.append(replace(full, turns=turns))
        done(kept[-1])
    return TokenizedConversations(trajectories=kept, left_out=left_out, cut=shortened)


def trajectory(conversation: Conversation, scaffold: Scaffold, *, group: str) -> Trajectory:
    """Return the conversation in the agent's tokens, with one turn for each of the assistant's messages.

    The assistant's messages become the sampled tokens, from `Renderer.assistant_turn`. Everything else is context, from
    `Renderer.prompt` and `Renderer.observation`, so a template that rewrites earlier text starts a new row.
    Log-probabilities are zeros, since nothing was sampled. `signals` contains `resolved` if the file gives it.
    """
    renderer, messages, tools = scaffold.renderer, conversation.messages, conversation.tools
    indices = [index for index, message in enumerate(messages) if message.role == "assistant"]
    context = Context(ids=renderer.prompt(messages[: indices[0]], tools))
    turns: list[Turn] = []
    for index, next_index in itertools.pairwise([*indices, len(messages)]):
        sampled = renderer.assistant_turn(messages[:index], messages[index], tools)
        answers = messages[index + 1 : next_index]
        turns.append(
            Turn(
                context_ids=context.ids,
                completion=_completion(sampled),
                message=messages[index],
                observation=answers,
                fresh=context.fresh,
                trainable=conversation.trainable[index],
            )
        )
        if next_index < len(messages):
            context = renderer.observation(messages[: index + 1], answers, tools, sampled)
    return Trajectory(
        task_id=conversation.task_id or conversation.id,
        group=group,
        attempt=0,
        turns=tuple(turns),
        stop=Stop.DONE,
        signals={} if conversation.resolved is None else {"resolved": conversation.resolved},
    )


def _texts(message: Message) -> Iterator[str]:
    """Yield all texts of a message that a template puts into the prompt unchanged."""
    yield message.content
    yield message.reasoning or ""
    for call in message.tool_calls:
        yield json.dumps(dict(call.arguments), ensure_ascii=False)


def _completion(token_ids: I32) -> Completion:
    return Completion(
        token_ids=token_ids,
        logprobs=np.zeros(len(token_ids), np.float32),
        versions=np.zeros(len(token_ids), np.int32),
        sampling=_NOT_SAMPLED,
        finish="stop",
        seconds=0.0,
    )


def _count_fitting(turns: Sequence[Turn], context: int) -> int:
    """Return how many turns, counted from the first, fit a context of `context` tokens (0: no limit)."""
    held = 0
    for index, turn in enumerate(turns):
        held = (0 if turn.fresh else held) + len(turn.context_ids) + len(turn.completion.token_ids)
        if context and held > context:
            return index
    return len(turns)


def _parses_back(turn: Turn, scaffold: Scaffold, tools: Sequence[ToolSpec]) -> bool:
    """Return whether the agent's parser would read the turn's tokens as its message."""
    text = scaffold.renderer.text(turn.completion.token_ids)
    if not turn.message.tool_calls:
        return turn.message.content.strip() in text
    offered = tools or [ToolSpec(name=call.name, description="", schema={}) for call in turn.message.tool_calls]
    return _calls(scaffold.parser.parse(text, offered)) == _calls(turn.message)


def _calls(message: Message) -> list[tuple[str, dict[str, object]]]:
    return [(call.name, dict(call.arguments)) for call in message.tool_calls]
