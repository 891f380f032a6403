"""The repair environment: its tools, what it says, what it measures."""

from __future__ import annotations

import asyncio
import random

import pytest

from helpers import bug_task, family_tokenizer
from turnstile.agents.base import Scaffold
from turnstile.agents.parsing.hermes import HermesParser
from turnstile.agents.parsing.lines import LineParser
from turnstile.agents.renderer import ChatRenderer, LinesRenderer
from turnstile.engines.scripted import ScriptedEngine
from turnstile.envs.check import check_env
from turnstile.rollout.episode import Attempt, play
from turnstile.rollout.episode import Limits as EpisodeLimits
from turnstile.sandboxes.base import Limits
from turnstile.sandboxes.local import LocalSandboxes
from turnstile.swe.envs.swe import TOOLS, SweEnv
from turnstile.swe.grading.grader import CodeGrader
from turnstile.swe.grading.testrun import PRELOAD
from turnstile.swe.oracle import demonstrate, oracle, random_agent
from turnstile.tasks.demonstration import call
from turnstile.types import Message, Sampling, Stop, Task, ToolCall

VIEW = """\
def clamp(self, value, low, high):
    if value > low:
        return low
    if value > high:
        return high
    return value"""


@pytest.fixture(scope="module")
def task(tmp_path_factory, smollm2):  # the model's tokenizer is loaded before the cache is another one
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TURNSTILE_CACHE", str(cache))
        yield bug_task(cache)


@pytest.fixture(scope="module")
def sandboxes():
    sandboxes = LocalSandboxes(preload=PRELOAD)
    yield sandboxes
    asyncio.run(sandboxes.close())


@pytest.fixture(scope="module")
def grader(sandboxes):
    return CodeGrader(sandboxes)


async def opened(grader, task):
    env = SweEnv(grader=grader)
    await env.reset(task)
    return env


async def test_prompt_names_test_message_function_and_file(grader, task):
    start = await SweEnv(grader=grader).reset(task)
    assert [message.content for message in start.messages] == [
        "test_below fails: AssertionError: assert -1 == 0\nThe bug is in Range.clamp of tinyrange/__init__.py."
    ]
    commands = LineParser().instructions(start.tools)
    assert commands == "Commands: view | fix OLD -> NEW | undo | run | submit"


async def test_view_hides_docstring_and_comments(grader, task):
    env = await opened(grader, task)
    step = await env.step(call("view"))
    assert step.messages == (Message(role="tool", content=VIEW, tool_call_id="call00000"),)
    assert step.signals == {
        "parsed": True, "command": "view", "succeeded": True, "reason": "", "looked_at_failing_code": True,
        "ran_tests": False, "tests_passed": None, "modified": False,
    }  # fmt: skip


async def test_the_oracle_resolves_the_task(grader, task):
    env = await opened(grader, task)
    act = oracle(task)
    steps = [await env.step(act(())) for _ in range(4)]
    assert [step.signals["command"] for step in steps] == ["view", "fix", "run", "submit"]
    assert steps[1].messages[0].content == "ok: if value < low:"
    assert steps[1].signals["modified"]
    assert steps[2].messages[0].content == "all 3 tests pass"
    assert steps[2].signals["ran_tests"]
    assert steps[2].signals["tests_passed"] is True
    assert [step.submitted for step in steps] == [False, False, False, True]
    assert steps[3].terminated
    signals = await env.measure()
    patch = signals.pop("patch")
    assert signals == {
        "submitted": True, "modified": True, "resolved": True, "f2p_passed": 2, "f2p_total": 2,
        "f2p_tests": {"tests/test_clamp.py::test_below": True, "tests/test_clamp.py::test_inside": True},
        "p2p_passed": 1, "p2p_total": 1,
    }  # fmt: skip
    assert "--- a/tinyrange/__init__.py\n+++ b/tinyrange/__init__.py\n" in patch
    assert "-        if value > low:\n+        if value < low:\n" in patch


async def test_untouched_code_fails_and_the_message_says_how(grader, task):
    env = await opened(grader, task)
    step = await env.step(call("run"))
    assert step.messages[0].content == "3 of 3 tests fail: assert -1 == 0"
    assert step.signals["tests_passed"] is False
    signals = await env.measure()
    assert (signals["modified"], signals["resolved"], signals["submitted"], signals["patch"]) == (False,) * 3 + ("",)
    assert (signals["f2p_passed"], signals["p2p_passed"]) == (0, 1)
    assert set(signals["f2p_tests"].values()) == {False}


@pytest.mark.parametrize(
    ("old", "new", "said", "reason"),
    [
        ("valeu > low", "x", "no match; nearest: if value > low:", "no match"),
        ("value > ", "value < ", "2 matches, give more of the line", "2 matches"),
        ("value > low", "value > low", "no change: both sides are the same", "no change"),
        ("value > low:", "value > low", "syntax error, not applied", "syntax error"),
        ("# below first", "#", "no match", "no match"),
        (
            "low, high):\n    if value",
            "low, high):\n    if not value",
            "no match: hidden lines lie between",
            "no match",
        ),
        ("", "x", "no match", "no match"),
    ],
)
async def test_a_fix_that_does_not_apply_says_why_and_changes_nothing(grader, task, old, new, said, reason):
    env = await opened(grader, task)
    key = env.state_key()
    step = await env.step(call("fix", old=old, new=new))
    assert step.messages[0].content.startswith(said)
    assert len(step.messages[0].content) <= 70
    assert (step.signals["succeeded"], step.signals["reason"], step.signals["modified"]) == (False, reason, False)
    assert env.state_key() == key


async def test_a_fix_of_several_lines_may_change_their_number(grader, task):
    env = await opened(grader, task)
    await env.step(call("fix", old="    if value > low:\n        return low\n", new="    value = max(value, low)\n"))
    await env.step(call("fix", old="    return value", new="    done = value\n    return done"))
    view = (await env.step(call("view"))).messages[0].content
    assert view == VIEW.replace("    if value > low:\n        return low\n", "    value = max(value, low)\n").replace(
        "    return value", "    done = value\n    return done"
    )
    await env.step(call("submit"))
    assert (await env.measure())["resolved"]


async def test_undo_takes_back_one_fix_at_a_time(grader, task):
    env = await opened(grader, task)
    keys = [env.state_key()]
    for old, new in (("value > low", "value < low"), ("value > high", "value >= high")):
        await env.step(call("fix", old=old, new=new))
        keys.append(env.state_key())
    assert len(set(keys)) == 3
    for key in (keys[1], keys[0]):
        assert (await env.step(call("undo"))).messages[0].content == "undone"
        assert env.state_key() == key
    step = await env.step(call("undo"))
    assert (step.messages[0].content, step.signals["succeeded"]) == ("nothing to undo", False)


async def test_the_state_key_depends_on_the_state_and_not_on_the_path(grader, task):
    one, two = await opened(grader, task), await opened(grader, task)
    await one.step(call("view"))
    await two.step(call("run"))
    await two.step(call("fix", old="nowhere", new="x"))
    await two.step(call("view"))
    assert one.state_key() == two.state_key()
    assert one.state_key() != (await opened(grader, task)).state_key()


async def test_code_that_hangs_is_a_failed_test(sandboxes, task):
    env = await opened(CodeGrader(sandboxes, limits=Limits(seconds=1.0)), task)
    await env.step(call("fix", old="    return value", new="    while True: pass"))
    step = await env.step(call("run"))
    assert step.signals["tests_passed"] is False
    assert "timed out" in step.messages[0].content


async def test_several_calls_in_one_turn_stop_at_the_submit(grader, task):
    env = await opened(grader, task)
    names = [("view", {}), ("fix", {"old": "value > low", "new": "value < low"}), ("submit", {}), ("undo", {})]
    calls = tuple(ToolCall(id=str(i), name=name, arguments=given) for i, (name, given) in enumerate(names))
    step = await env.step(Message(role="assistant", tool_calls=calls))
    assert [message.tool_call_id for message in step.messages] == ["0", "1"]
    assert step.submitted
    assert (step.signals["command"], step.signals["succeeded"], step.signals["modified"]) == (
        "view+fix+submit", True, True,
    )  # fmt: skip
    assert (await env.measure())["resolved"]


async def test_garbage_is_answered(grader, task):
    env = await opened(grader, task)
    step = await env.step(Message(role="assistant", content="I would like to help"))
    assert step.messages[0].content == "no command; use view, fix, undo, run, submit"
    assert (step.signals["parsed"], step.signals["command"], step.signals["succeeded"]) == (False, "", False)
    step = await env.step(call("delete"))
    assert (step.signals["parsed"], step.signals["reason"]) == (True, "unknown command")


async def test_keeps_the_promises_of_an_environment(grader, task):
    actions = [call("view"), call("fix", old="value > low", new="value < low"), call("run"), call("submit")]
    assert await check_env(lambda: SweEnv(grader=grader), task, actions=actions) == []
    assert await check_env(lambda: SweEnv(grader=grader), task) == []


async def test_grading_is_remembered_across_episodes(sandboxes, task):
    grader = CodeGrader(sandboxes)
    for _ in range(3):
        env = await opened(grader, task)
        await env.step(call("fix", old="value > low", new="value < low"))
        assert (await env.measure())["resolved"]
    assert grader.runs == 1


@pytest.mark.parametrize("seed", range(12))
async def test_every_demonstration_solves_its_task_through_the_line_syntax(grader, task, seed):
    steps = demonstrate(task, random.Random(seed), missed=0.4, wrong=0.4)
    env, parser = await opened(grader, task), LineParser()
    seen = []
    for step in steps:
        message = parser.parse(parser.write(step.message, TOOLS), TOOLS)
        assert message.tool_calls == step.message.tool_calls
        seen.append(await env.step(message))
    assert (await env.measure())["resolved"]
    assert seen[-1].submitted
    for step, answer in zip(steps, seen, strict=True):
        assert step.trainable or answer.signals["command"] == "fix"
        assert answer.signals["succeeded"] or not step.trainable


@pytest.mark.parametrize("scaffold", ["lines", "qwen3", "smollm2", "llama3"])
async def test_the_oracle_plays_through_every_scaffold(grader, task, smollm2, scaffold):
    if scaffold == "lines":
        agent = Scaffold(LinesRenderer(smollm2), LineParser())
    else:
        tokenizer, template = (smollm2, None) if scaffold == "smollm2" else family_tokenizer(smollm2, scaffold)
        agent = Scaffold(ChatRenderer(tokenizer, template=template), HermesParser())
    act = oracle(task)
    engine = ScriptedEngine(agent.renderer, lambda session, turn, prompt: agent.parser.write(act(()), TOOLS))
    played = await play(
        task, Attempt(group="g", number=0, seed=0), env=SweEnv(grader=grader), engine=engine,
        session=engine.open("g"), scaffold=agent, sampling=Sampling(), limits=EpisodeLimits(),
    )  # fmt: skip
    assert played.stop is Stop.SUBMITTED
    assert played.signals["resolved"]
    assert [turn.signals["command"] for turn in played.turns] == ["view", "fix", "run", "submit"]
    assert [turn.fresh for turn in played.turns] == [False] * 4
    text = smollm2.decode([i for turn in played.turns[1:] for i in turn.context_ids])
    for said in ("def clamp(self", "ok: if value < low:", "all 3 tests pass"):
        assert said in text


def test_demonstrations_take_every_form(task):
    forms = {
        tuple((step.message.tool_calls[0].name, step.trainable) for step in demonstrate(task, random.Random(seed)))
        for seed in range(60)
    }
    view, fix, run, submit, undo = ((name, True) for name in ("view", "fix", "run", "submit", "undo"))
    slip = ("fix", False)
    assert forms == {
        (view, fix, run, submit),
        (view, fix, submit),
        (view, slip, fix, run, submit),
        (view, slip, run, undo, fix, run, submit),
    }


async def test_the_random_agent_acts_validly(grader, task):
    env, act = await opened(grader, task), random_agent(task, random.Random(1))
    commands = set()
    for _ in range(40):
        step = await env.step(act(()))
        commands.add(step.signals["command"])
        assert step.signals["parsed"]
        assert not step.signals["reason"].startswith(("unknown", "bad"))
    assert commands == {"view", "fix", "undo", "run", "submit"}


def test_the_oracle_gives_whole_lines_if_the_text_is_not_unique(task):
    act = oracle(Task(id="t", env="swe", data={**task.data, "buggy": "value", "unique": False}))
    fix = [act(()) for _ in range(2)][1].tool_calls[0]
    assert fix.arguments == {"old": "    if value > low:", "new": "    if value < low:"}
