from __future__ import annotations

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
from numpy.typing import NDArray

from turnstile.evaluation.metrics import (
    EpisodeResult,
    compared_rates,
    errors,
    from_group,
    max_samples,
    paired_difference,
    pass_at_k,
    rate,
    to_metrics,
    with_verdict,
)
from turnstile.types import Completion, Group, Message, Sampling, Score, Stop, Task, Trajectory, Turn


def episode(task: str, sample: int = 0, *, solved: bool = False, broken: bool = False, turns: int = 3) -> EpisodeResult:
    outcome = None if broken else float(solved)
    return EpisodeResult(
        task_id=task,
        sample=sample,
        rates={"completion": True, "modification": solved, "resolution": solved},
        turns=turns,
        stop="submitted",
        outcome=outcome,
        total=outcome,
    )


def episodes(**solved: list[int]) -> list[EpisodeResult]:
    """episodes(a=[1, 0]): task a with two samples, the first solved."""
    return [episode(task, i, solved=bool(s)) for task, samples in solved.items() for i, s in enumerate(samples)]


def turn() -> Turn:
    completion = Completion(
        token_ids=np.array([1], dtype=np.int32),
        logprobs=np.array([-0.5], dtype=np.float32),
        versions=np.array([0], dtype=np.int32),
        sampling=Sampling(),
        finish="stop",
        seconds=0.0,
    )
    return Turn(
        context_ids=np.array([7], dtype=np.int32), completion=completion, message=Message(role="assistant", content="x")
    )


def test_from_group_reads_rates_task_data_and_scores() -> None:
    task = Task(id="t1", env="swe", data={"kind": "compare", "package": "toolz", "line": 3})
    rates = [{"completion": True, "resolution": True}, {"completion": False, "resolution": False}, {}]
    stops = [Stop.SUBMITTED, Stop.TURNS, Stop.ERROR]
    group = Group(
        id="g",
        task=task,
        trajectories=tuple(
            Trajectory(task_id="t1", group="g", attempt=i, turns=(turn(),) * (i + 1), stop=stop, rates=reached)
            for i, (stop, reached) in enumerate(zip(stops, rates, strict=True))
        ),
    )
    outcomes = [{"agent": 1.0}, {"agent": -0.5}, None]
    scores = [Score(outcome=o, turn=np.zeros(i + 1, np.float32), total=i + 0.25) for i, o in enumerate(outcomes)]

    first, second, third = from_group(group, scores)

    assert first == EpisodeResult(
        task_id="t1",
        sample=0,
        rates={"completion": True, "resolution": True},
        kind="compare",
        package="toolz",
        turns=1,
        stop="submitted",
        outcome=1.0,
        total=0.25,
    )
    assert (second.rates, third.rates) == ({"completion": False, "resolution": False}, {})
    assert (second.turns, second.stop, second.outcome, second.total) == (2, "turns", -0.5, 1.25)
    assert (third.stop, third.outcome, third.total) == ("error", None, None)
    with pytest.raises(ValueError):
        from_group(group, scores[:2])


def test_older_results_have_their_rates_beside_the_fields() -> None:
    older = {"task_id": "t", "sample": 0, "completion": True, "resolution": False, "changed": True, "turns": 2}
    assert EpisodeResult.read(older) == EpisodeResult(
        task_id="t", sample=0, rates={"completion": True, "resolution": False}, turns=2
    )
    result = episode("t", solved=True)
    assert EpisodeResult.read(json.loads(json.dumps(asdict(result)))) == result


def test_the_rates_are_compared_in_their_order_or_else_the_outcome() -> None:
    assert compared_rates([episode("a"), episode("b", broken=True)]) == ("completion", "modification", "resolution")
    bare = EpisodeResult(task_id="t", sample=0, outcome=0.25, total=0.5)
    assert compared_rates([bare]) == ("outcome",)
    assert rate([bare], "outcome").mean == 0.25
    assert (rate([bare], "solved").n_tasks, bare.value("turns")) == (0, 0.0)


def test_rate_weighs_tasks_the_same_and_leaves_errors_out() -> None:
    results = [*episodes(a=[1, 1, 0], b=[0], c=[1]), episode("b", 1, broken=True), episode("d", 0, broken=True)]

    found = rate(results, "resolution")

    assert found.mean == pytest.approx((2 / 3 + 0 + 1) / 3)
    assert (found.n_tasks, found.n_episodes) == (3, 5)
    assert (errors(results), len(with_verdict(results))) == (2, 5)
    assert rate([episode("a", turns=2), episode("b", turns=5)], "turns").mean == 3.5


def test_rate_of_two_tasks_by_hand() -> None:
    # Resampling tasks (0, 1) with replacement gives means 0, .5, 1 with chances 1/4, 1/2, 1/4: the middle half
    # of them is exactly .5, and the 95 % interval spans everything.
    results = episodes(a=[0], b=[1])
    assert (rate(results, level=0.95).low, rate(results, level=0.95).high) == (0.0, 1.0)
    assert (rate(results, level=0.4).low, rate(results, level=0.4).high) == (0.5, 0.5)


def test_samples_of_a_task_are_not_independent_evidence() -> None:
    alone = rate(episodes(a=[0], b=[1], c=[0], d=[1]))
    many = rate(episodes(a=[0] * 8, b=[1] * 8, c=[0] * 8, d=[1] * 8))
    assert (many.low, many.high) == (alone.low, alone.high)
    assert (many.n_tasks, many.n_episodes) == (4, 32)


def test_no_success_at_all_is_not_certainty() -> None:
    none = rate(episodes(**{f"t{i}": [0] for i in range(48)}))
    assert (none.mean, none.low) == (0.0, 0.0)
    assert none.high == pytest.approx(1 - 0.025 ** (1 / 48))  # .074, the exact binomial bound
    every = rate(episodes(**{f"t{i}": [1] for i in range(48)}))
    assert (every.high, every.low) == (1.0, pytest.approx(0.025 ** (1 / 48)))
    same = paired_difference(episodes(a=[1], b=[0]), episodes(a=[1], b=[0]))
    assert same.high == -same.low == pytest.approx(1 - 0.025**0.5)
    assert not same.excludes_zero
    turns = rate([episode("a", turns=8), episode("b", turns=8)], "turns")
    assert (turns.low, turns.high) == (8.0, 8.0)


def test_nothing_to_count_gives_nan() -> None:
    for found in (rate([]), rate([episode("a", broken=True)]), paired_difference(episodes(a=[1]), episodes(b=[1]))):
        assert (found.n_tasks, found.n_episodes) == (0, 0)
        assert math.isnan(found.mean)
        assert math.isnan(found.low)
        assert not found.excludes_zero


def test_paired_difference_by_hand() -> None:
    before = episodes(a=[0, 1], b=[0, 0], c=[1, 1], only_before=[1])
    after = episodes(a=[1, 1], b=[0, 1], c=[1, 0], only_after=[1])
    found = paired_difference(before, after)
    assert found.mean == pytest.approx((0.5 + 0.5 - 0.5) / 3)
    assert (found.n_tasks, found.n_episodes) == (3, 12)
    assert paired_difference(after, before).mean == pytest.approx(-found.mean)


def test_pairing_removes_the_tasks_own_difficulty() -> None:
    # Half of the tasks are always solved; of the hard half, training solves every other one.
    before = episodes(**{f"t{i}": [i % 2] for i in range(80)})
    after = episodes(**{f"t{i}": [int(i % 2 or i % 4 == 0)] for i in range(80)})
    paired, low, high = paired_difference(before, after), rate(before), rate(after)
    assert paired.mean == pytest.approx(0.25)
    assert high.mean - low.mean == pytest.approx(0.25)
    assert paired.high - paired.low < 0.7 * ((high.high - high.low) ** 2 + (low.high - low.low) ** 2) ** 0.5
    assert paired.excludes_zero


def test_seeds_join_by_task() -> None:
    before = episodes(a=[0], b=[0])
    seeds = [episodes(a=[1], b=[0]), episodes(a=[0], b=[0]), episodes(a=[1], b=[1])]
    found = paired_difference(before * 3, [result for seed in seeds for result in seed])
    assert found.mean == pytest.approx((2 / 3 + 1 / 3) / 2)
    assert (found.n_tasks, found.n_episodes) == (2, 12)


def test_pass_at_k_by_hand() -> None:
    results = episodes(a=[1, 0, 0, 0], b=[1, 1, 0, 0], c=[0, 0, 0, 0])
    # 1 - C(3,2)/C(4,2) = 1/2, 1 - C(2,2)/C(4,2) = 5/6, 0
    assert pass_at_k(results, 2).mean == pytest.approx((1 / 2 + 5 / 6 + 0) / 3)
    assert pass_at_k(results, 1).mean == pytest.approx(rate(results).mean)
    assert pass_at_k(results, 4).mean == pytest.approx(2 / 3)
    assert max_samples(results) == 4


def test_pass_at_k_needs_k_samples_of_a_task() -> None:
    results = [*episodes(a=[1, 0], b=[0]), episode("b", 1, broken=True)]
    found = pass_at_k(results, 2)
    assert (found.mean, found.n_tasks, found.n_episodes) == (1.0, 1, 2)
    assert pass_at_k(results, 3).n_tasks == 0
    with pytest.raises(ValueError, match="k >= 1"):
        pass_at_k(results, 0)


def test_pass_at_k_is_unbiased() -> None:
    generator = np.random.default_rng(1)
    chance, runs = 0.3, 400
    means = []
    for _ in range(runs):
        samples = (generator.random(5) < chance).astype(int).tolist()
        means.append(pass_at_k(episodes(a=samples), 3, resamples=1).mean)
    expected = 1 - (1 - chance) ** 3
    assert np.mean(means) == pytest.approx(expected, abs=4 * np.std(means) / runs**0.5)


def test_intervals_repeat_and_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    results = episodes(**{f"t{i}": [int(i % 3 == 0)] for i in range(30)})
    first = rate(results)
    assert rate(results) == first
    assert rate(results, resamples=50, seed=1) != rate(results, resamples=50)
    monkeypatch.setattr("turnstile.evaluation.metrics._CHUNK", 1000)
    assert rate(results) == first


def simulate(generator: np.random.Generator, tasks: int, samples: int) -> NDArray[np.int64]:
    """Tasks of very unlike difficulty: Beta(1, 1) chances, so that clustering matters. The true rate is .5."""
    return (generator.random((tasks, samples)) < generator.random((tasks, 1))).astype(int)


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    runs, clustered, naive = 250, 0, 0
    for _ in range(runs):
        solved = simulate(generator, 40, 6)
        found = rate(episodes(**{f"t{i}": row.tolist() for i, row in enumerate(solved)}), resamples=1000)
        clustered += found.low <= 0.5 <= found.high
        alone = rate(episodes(**{f"t{i}": [int(s)] for i, s in enumerate(solved.ravel())}), resamples=1000)
        naive += alone.low <= 0.5 <= alone.high
    assert 0.90 <= clustered / runs <= 0.985
    assert naive / runs < 0.85  # what treating samples as independent would claim


def test_an_evaluation_gives_metrics_to_log() -> None:
    logged = to_metrics([*episodes(a=[1], b=[0]), episode("c", broken=True)])
    assert (logged["eval/rate/resolution"], logged["eval/rate/completion"]) == (0.5, 1.0)
    assert (logged["eval/rate/resolution_low"], logged["eval/rate/resolution_high"]) == (0.0, 1.0)
    assert (logged["eval/turns"], logged["eval/reward/outcome"]) == (3.0, 0.5)
    assert (logged["eval/count/errors"], logged["eval/count/trajectories"]) == (1.0, 3.0)
    assert to_metrics([]) == {"eval/count/errors": 0.0, "eval/count/trajectories": 0.0}
