from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from turnstile.evaluation.metrics import EpisodeResult
from turnstile.evaluation.replay import Shown, episodes
from turnstile.evaluation.report import ReportData, make_page, write_report
from turnstile.evaluation.sections import Alert, alerts, costs, gains, reproduce
from turnstile.types import Completion, Message, Sampling, Score, Stop, Task, ToolCall, Trajectory, Turn

EVIL = "</pre><script>alert(1)</script>\ud800"


def policy(solved: list[int]) -> list[EpisodeResult]:
    return [
        EpisodeResult(
            task_id=f"t{i}",
            sample=0,
            rates={"completion": True, "modification": bool(s), "resolution": bool(s)},
            kind="compare" if i % 2 else "int",
            package="toolz",
            turns=4,
            outcome=float(s),
            total=float(s),
        )
        for i, s in enumerate(solved)
    ]


RATES = dict.fromkeys(("completion", "modification", "resolution"), False)


def shown(task: str, actions: list[Message], *, rates: dict[str, bool], closed: bool = False) -> Shown:
    """An episode whose first turn earned .1 for `looked`; with a closed gate it was withheld."""
    turns = tuple(
        Turn(
            context_ids=np.zeros(1, np.int32),
            completion=Completion(
                token_ids=np.zeros(2, np.int32),
                logprobs=np.zeros(2, np.float32),
                versions=np.zeros(2, np.int32),
                sampling=Sampling(),
                finish="stop",
                seconds=0.0,
            ),
            message=action,
            observation=(Message(role="tool", content=f"saw {place}"),),
        )
        for place, action in enumerate(actions)
    )
    looked = np.array([0.1] + [0.0] * (len(turns) - 1), np.float32)
    none = np.zeros(len(turns), np.float32)
    score = Score(
        outcome={"agent": -0.5 if closed else 1.0},
        turn=none if closed else looked,
        total=-0.5 if closed else 1.1,
        granted={"looked": none if closed else looked},
        withheld={"looked": looked if closed else none},
        gates={"outcome": not closed},
    )
    trajectory = Trajectory(
        task_id=task,
        group="g",
        attempt=0,
        turns=turns,
        stop=Stop.SUBMITTED if rates.get("completion") else Stop.TURNS,
        rates=RATES | rates,
    )
    advantages = [np.array([0.5, 1.0], np.float32)] * len(turns)
    return Shown(
        task=Task(id=task, env="swe", prompt="mend it", data={"kind": "compare"}),
        trajectory=trajectory,
        score=score,
        advantages=advantages,
    )


def said(content: str) -> Message:
    return Message(role="assistant", content=content)


BEFORE = [shown("t1", [said("view"), said(EVIL)], rates={}, closed=True)]
AFTER = [
    shown("t2", [said("submit")], rates={"completion": True}),
    shown("t1", [said("fix a -> b")], rates=dict.fromkeys(RATES, True)),
]
SECONDS = {"seconds/generate": 30.0, "seconds/update": 20.0, "seconds/step": 40.0}
DATA = ReportData(
    name="demo <1>",
    stages={"warm start": policy([0] * 20 + [1] * 4), "after RL": policy([1] * 12 + [0] * 8 + [1] * 4)},
    pairs=[("warm start", "after RL")],
    metrics=[{"step": s, "rate/resolution": 0.1 * s, **SECONDS} for s in range(1, 5)],
    before=BEFORE,
    after=AFTER,
    training={"kind": {"compare": 30, "int": 10}, "package": {"funcy": 40}},
    recipe={"seed": 0, "train": {"lr": 2.5e-5}, "rewards": {"terms": [{"kind": "signal"}]}, "tasks": {"where": {}}},
    versions={"torch": "2.13"},
    timings={"warm start": 60.0, "reinforcement learning": 180.0},
    memory={"reinforcement learning": 2048.0},
    heldout={0: "warm start", 4: "after RL"},
    notes=["One seed & a half."],
    command="turnstile train 'a b.toml'",
)


class Balanced(HTMLParser):
    """Raises at the first tag that closes another one; collects what the page points to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.links += [str(values[name]) for name in ("src", "href", "srcset") if name in values]
        self.ids += [str(values["id"])] if "id" in values else []
        if tag not in ("meta", "img", "source"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """`<path ... />` opens and closes itself."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(html: str) -> Balanced:
    page = Balanced()
    page.feed(html)
    page.close()
    assert page.open == []
    return page


def test_the_page_is_self_contained() -> None:
    html = make_page(DATA)
    page = check(html)
    local = [link[1:] for link in page.links if link.startswith("#")]
    assert set(local) <= set(page.ids)
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in page.links)
    assert len(page.links) - len(local) == 2
    assert not re.search(r"<script|https?://|@import|url\(", html)
    assert "demo &lt;1&gt;" in html
    assert "&lt;script&gt;alert(1)" in html
    titles = re.findall(r"<h2>(.*?)</h2>", html)
    assert titles == ["Results", "Learning curves", "Where the gain is", "Time and memory", "Episodes", "Reproduce"]


def test_the_headline_shows_each_rate_and_its_change() -> None:
    html = make_page(DATA).replace("\n", "")
    assert "<h3>resolution</h3><p class='big'><span class='from'>.17</span> &rarr; .67</p>" in html
    assert re.search(r"card up'><h3>resolution</h3>.*?\+\.500 \[\.\d+, \.\d+\], higher", html)
    assert re.search(r"card unclear'><h3>completion</h3>.*?\+\.000 .*?, no clear change", html)
    assert "From warm start to after RL, paired over 24 tasks" in html
    assert "One seed &amp; a half." in html


def test_a_report_without_data_is_valid() -> None:
    html = make_page(ReportData(name="empty", stages={}))
    check(html)
    assert re.findall(r"<h2>(.*?)</h2>", html) == []
    check(make_page(ReportData(name="nothing counted", stages={"a": [], "b": []}, pairs=[("a", "b")])))


def test_alarms_and_warnings_come_first_alarms_before_warnings() -> None:
    said = [
        Alert(level="warning", line="step 1: slow <b>"),
        Alert(level="alarm", line="collapse"),
        Alert(level="warning", line="step 1: slow <b>"),
    ]
    html = make_page(replace(DATA, alerts=said))
    check(html)
    assert re.findall(r"<h2>(.*?)</h2>", html)[0] == "Alarms and warnings"
    assert re.findall(r"<b>(\w+)</b> (.*?)</li>", html) == [
        ("alarm", "collapse"),
        ("warning", "step 1: slow &lt;b&gt;"),
    ]
    many = alerts([Alert(level="warning", line=f"step {step}") for step in range(25)])
    assert many.count("<li") == 20
    assert "5 more are in messages.jsonl" in many


def test_an_empty_report_says_why() -> None:
    html = make_page(ReportData(name="empty", stages={}, missing=["No results: no tasks were held out."]))
    check(html)
    assert re.findall(r"<h2>(.*?)</h2>", html) == ["Not in this report"]
    assert "<li>No results: no tasks were held out.</li>" in html


def test_the_report_is_written_and_replaced(tmp_path: Path) -> None:
    path = write_report(tmp_path / "run", DATA)
    assert path == tmp_path / "run" / "report.html"
    assert path.read_text(encoding="utf-8") == make_page(DATA)
    assert write_report(tmp_path / "run", ReportData(name="again", stages={})) == path
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]


def test_gains_by_kind_and_package_with_the_priors_part() -> None:
    html = gains(DATA.stages, DATA.pairs, DATA.training)
    check(html)
    _, kinds, packages, prior = html.split("<h3>")
    kinds = kinds.replace("\n", "")
    cells = re.findall(r"<th scope='row'>compare</th><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td>", kinds)
    assert cells == [("12", "75 %", ".167", ".667")]
    assert "<th scope='row'>toolz</th><td>24</td><td>0 %</td><td>.167</td>" in packages
    assert "one row in twenty" in packages
    assert "compare: 50 % of the tasks and 50 % of the gain (+.250 [" in prior
    same = {"a": DATA.stages["after RL"], "b": DATA.stages["after RL"]}
    assert "no gain to divide" in gains(same, [("a", "b")], DATA.training)
    assert "of training" not in gains(DATA.stages, DATA.pairs, {})
    assert gains(DATA.stages, [], {}) == ""


def test_costs_show_time_and_memory() -> None:
    phases, parts = costs(DATA.timings, DATA.memory, DATA.metrics).split("<h3>")
    assert "time, 4 min 00 s in all" in phases
    assert "width:33.3%" in phases
    assert "3 min 00 s (75 %)</td><td>2.0 GB" in phases
    assert "1 min 00 s (25 %)</td><td></td>" in phases
    assert "generate</th>" in parts
    assert "2 min 00 s (75 %)" in parts
    assert "1 min 20 s (50 %)" in parts
    assert "time, 2 min 40 s in all" in parts
    assert "Parts overlap" in parts
    assert "step</th>" not in parts
    assert costs({}, {}, []) == ""


def test_reproduce_shows_overridable_keys() -> None:
    html = reproduce(DATA.command, DATA.recipe, DATA.versions)
    for line in ("seed = 0", "train.lr = 2.5e-05", "rewards.terms = [{&#34;kind&#34;: &#34;signal&#34;}]"):
        assert line in html
    assert "turnstile train &#39;a b.toml&#39;" in html
    assert "tasks.where = {}" in html


def test_episodes_stand_side_by_side() -> None:
    html = episodes(BEFORE, AFTER, ("warm start", "after RL"))
    check(html)
    first, second = html.split("<details class='task'")[1:]
    assert first.startswith(" open><summary><code>t1</code>")
    assert second.startswith("><summary><code>t2</code>")
    assert "<span class='chip down'>no completion</span>" in first
    assert "<span class='chip up'>resolution</span>" in first
    assert "<span class='chip unclear'>completion</span>" in second
    before, after = first.split("<div class='episode'>")[1:]
    assert "gate outcome closed" in before
    assert "Closed gates withheld .10 of step rewards." in before
    assert "<span class='chip shut'>withheld +.10 looked</span>" in before
    assert "<span class='chip up'>+.10 looked</span>" not in before
    assert "gate outcome open" in after
    assert "<span class='chip up'>+.10 looked</span>" in after
    assert "advantage +.75" in after
    assert "saw 0" in after
    assert "mend it" in first


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            Message(role="assistant", tool_calls=(ToolCall(id="1", name="run", arguments={"test": "a"}),)),
            "run({&#34;test&#34;: &#34;a&#34;})",
        ),
        (Message(role="assistant", reasoning="hm", content="go\n"), "hm\ngo</pre>"),
        (Message(role="assistant"), "(nothing)"),
    ],
)
def test_an_episode_shows_what_the_agent_said(message: Message, expected: str) -> None:
    assert expected in episodes([], [shown("t", [message], rates={})], ("a", "b"))


def test_an_episode_that_broke_says_so() -> None:
    trajectory = Trajectory(task_id="t", group="g", attempt=0, turns=(), stop=Stop.ERROR, error="sandbox died <x>")
    broken = Shown(
        task=Task(id="t", env="swe"),
        trajectory=trajectory,
        score=Score(outcome=None, turn=np.zeros(0, np.float32), total=0.0),
    )
    html = episodes([broken], [], ("a", "b"))
    assert "infrastructure error" in html
    assert "Broke: sandbox died &lt;x&gt;" in html
    assert "outcome no verdict" in html


def test_held_out_stages_are_marked_in_the_curves() -> None:
    marked, bare = make_page(DATA), make_page(replace(DATA, heldout={}))
    assert marked != bare
    with pytest.raises(KeyError):
        make_page(replace(DATA, heldout={4: "never ran"}))
