"""The in-process engine against a stock model: sharing, caching, eviction and failures."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from helpers import tiny_llama
from turnstile.batching.forest import pack_prefix_trees
from turnstile.engines.base import Engine
from turnstile.engines.check import check_engine
from turnstile.engines.local import plan, prefix_tree, requests, transformers
from turnstile.engines.local.kv_cache import MIN_CAPACITY, KVCache
from turnstile.engines.local.plan import PREFILL_TOKENS
from turnstile.engines.local.prefix_tree import common_prefix
from turnstile.engines.local.sampling import draw
from turnstile.engines.local.transformers import TransformersEngine
from turnstile.errors import ConfigError, EngineError
from turnstile.models.attention import ForestLayout, forward_hidden
from turnstile.models.load import load_model
from turnstile.models.logprobs import token_logprobs
from turnstile.types import I32, Completion, Row, Sampling

VOCABULARY = 40


def ids(*values: int) -> I32:
    return np.asarray(values, dtype=np.int32)


def numbers(count: int, seed: int) -> I32:
    return np.random.default_rng(seed).integers(3, VOCABULARY, count).astype(np.int32)


def network(seed: int = 0, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Return a model with weights large enough that earlier tokens matter."""
    model = tiny_llama(VOCABULARY, context=2048, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    return model.to(dtype)


def stock(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return the same weights in a model with the attention of transformers."""
    config = type(model.config)(**{**model.config.to_dict(), "attn_implementation": "sdpa"})
    copy = LlamaForCausalLM(config).to(model.dtype).eval()
    copy.load_state_dict(model.state_dict())
    assert copy.config._attn_implementation == "sdpa"
    return copy


def sampling(seed: int = 0, n: int = 8, **knobs: Any) -> Sampling:
    return Sampling(max_tokens=n, seed=seed, **knobs)


async def once(engine: Engine, prompt: I32, how: Sampling, share: str = "g") -> Completion:
    session = engine.open(share)
    try:
        return await engine.generate(prompt, how, session)
    finally:
        engine.close(session)


@torch.no_grad()
def plain_logits(model: LlamaForCausalLM, prompt: I32, found: Completion) -> torch.Tensor:
    """Return logits [n, V] before each sampled token, from one row without a cache."""
    row = np.concatenate([prompt, found.token_ids])
    logits = model(torch.from_numpy(row).long()[None]).logits[0]
    return logits[len(prompt) - 1 : -1].double()


def allowed(probabilities: torch.Tensor, how: Sampling) -> torch.Tensor:
    """Return which tokens of one distribution [V] may be drawn, going through them from the likeliest down."""
    order = sorted(range(len(probabilities)), key=lambda token: -float(probabilities[token]))
    if how.top_k:
        order = order[: how.top_k]
    if how.top_p < 1:
        kept, mass = [], 0.0
        total = float(probabilities[order].sum())
        for token in order:
            if mass >= how.top_p * total:
                break
            kept.append(token)
            mass += float(probabilities[token])
        order = kept
    order = [token for token in order if probabilities[token] >= how.min_p * probabilities[order[0]]]
    mask = torch.zeros(len(probabilities), dtype=torch.bool)
    mask[order] = True
    return mask


def expected(logits: torch.Tensor, found: Completion) -> tuple[list[float], list[float]]:
    """Return log-probabilities of the sampled tokens, and entropies, by hand."""
    how, logprobs, entropies = found.sampling, [], []
    for row, token in zip(logits, found.token_ids.tolist(), strict=True):
        p = (row / how.temperature).softmax(dim=-1)
        p = torch.where(allowed(p, how), p, 0.0)
        p = p / p.sum()
        logprobs.append(float(p[token].log()))
        entropies.append(float(torch.special.entr(p).sum()))
    return logprobs, entropies


def prefixes(rows: Iterable[Sequence[int]]) -> set[tuple[int, ...]]:
    """Return the nodes of the trie of some rows."""
    return {tuple(row[: n + 1]) for row in rows for n in range(len(row))}


def computed(prompt: I32, found: Completion) -> list[int]:
    """Return the tokens that had to be computed: all but the last sampled one."""
    return [*prompt.tolist(), *found.token_ids.tolist()[:-1]]


HOW = [
    sampling(1),
    sampling(2, temperature=0.7),
    sampling(3, temperature=1.5, top_k=5),
    sampling(4, top_p=0.8),
    sampling(5, temperature=0.9, min_p=0.1),
    sampling(6, temperature=1.3, top_k=12, top_p=0.9, min_p=0.02),
]


@pytest.mark.slow
async def test_logprobs_match_a_stock_model(words):
    model = network()
    engine = TransformersEngine(model, words)
    prompts = [numbers(n, seed=n) for n in (3, 9, 1, 14, 9, PREFILL_TOKENS + 90)]
    jobs = [once(engine, prompt, how, f"g{how.seed}") for prompt, how in zip(prompts, HOW, strict=True)]
    found = await asyncio.gather(*jobs)
    plain = stock(model)
    for prompt, completion in zip(prompts, found, strict=True):
        logprobs, entropies = expected(plain_logits(plain, prompt, completion), completion)
        assert completion.finish == "length"
        assert len(completion.token_ids) == 8
        np.testing.assert_allclose(completion.logprobs, logprobs, atol=1e-5)
        np.testing.assert_allclose(completion.entropies, entropies, atol=1e-5)
    assert any(entropy > 0.5 for completion in found for entropy in completion.entropies)  # there was a choice


@pytest.fixture(params=[True, False], ids=["", "as without numba"])
def kernels(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr("turnstile.engines.local.cpu.compiled.is_available", lambda: False)


@pytest.mark.usefixtures("kernels")
async def test_samples_follow_the_distribution(words):
    model = network()
    engine = TransformersEngine(model, words)
    prompt, many = ids(5, 6, 7), 2000
    found = await asyncio.gather(*(once(engine, prompt, sampling(seed, 1, temperature=2.0)) for seed in range(many)))
    p = (plain_logits(stock(model), prompt, found[0])[0] / 2.0).softmax(dim=-1).numpy()
    counts = np.bincount([int(completion.token_ids[0]) for completion in found], minlength=VOCABULARY)
    assert (p > 0.01).sum() > 10
    assert np.all(np.abs(counts - many * p) < 4.5 * np.sqrt(many * p) + 1)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_kernels_draw_the_same_tokens(temperature, monkeypatch):
    torch.manual_seed(0)
    logits = 3 * torch.randn(5, 3001)
    rows = torch.arange(400) % 5
    draws = torch.rand(400, dtype=torch.float64).tolist()
    how = Sampling(temperature=temperature)
    compiled = draw(logits, rows, how, draws)
    monkeypatch.setattr("turnstile.engines.local.cpu.compiled.is_available", lambda: False)
    plain = draw(logits, rows, how, draws)
    same = [(a, b) for a, b in zip(compiled, plain, strict=True) if a[0] == b[0]]
    assert len(same) > 390  # a draw may fall on a border
    np.testing.assert_allclose(*(np.array(one) for one in zip(*same, strict=True)), atol=2e-4)


async def test_compilation_error_reaches_the_request(words, monkeypatch):
    def broken(x):
        raise OSError("No space left on device")

    monkeypatch.setattr(transformers, "can_compute", broken)
    engine = TransformersEngine(network(), words)
    with pytest.raises(Exception, match="No space left on device"):
        await asyncio.wait_for(once(engine, ids(4, 8), sampling()), 20)


async def test_greedy_takes_the_likeliest(words):
    model = network()
    prompt = ids(4, 8)
    found = await once(TransformersEngine(model, words), prompt, sampling(temperature=0))
    assert found.token_ids.tolist() == plain_logits(stock(model), prompt, found).argmax(dim=-1).tolist()
    assert found.logprobs.tolist() == [0.0] * 8


def test_excluded_tokens_are_never_drawn():
    """0.99999999 rounds to 1 in float32, and the tokens after the last allowed one have no mass."""
    logits = torch.tensor([[1.0, 0.0, 3.0, -1.0, -2.0, -3.0]])
    for number, token in ((0.0, 0), (0.999999999999, 2)):
        ((drawn, logprob, _),) = draw(logits, torch.tensor([0]), Sampling(top_k=2), [number])
        assert drawn == token
        assert np.isfinite(logprob)


async def test_every_prefix_of_a_group_is_computed_once(words):
    engine = TransformersEngine(network(), words)
    prompt = numbers(30, seed=0)
    seeds = [1, 1, 1, 2, 3, 3]
    found = await asyncio.gather(*(once(engine, prompt, sampling(seed)) for seed in seeds))
    assert found[0].token_ids.tolist() == found[2].token_ids.tolist() != found[3].token_ids.tolist()
    stats = engine.take_stats()
    nodes = prefixes(computed(prompt, completion) for completion in found)
    assert stats["tokens_computed"] == len(nodes) < 30 + 3 * 7 + 1
    assert stats["tokens_asked"] == 6 * 30
    assert stats["tokens_sampled"] == 6 * 8
    assert engine.take_stats()["tokens_computed"] == 0


async def test_groups_do_not_share(words):
    engine = TransformersEngine(network(), words)
    prompt = numbers(30, seed=0)
    found = await asyncio.gather(*(once(engine, prompt, sampling(1), share) for share in ("one", "two")))
    assert found[0].token_ids.tolist() == found[1].token_ids.tolist()
    assert engine.take_stats()["tokens_computed"] == 2 * (30 + 7)


async def test_a_second_turn_computes_only_what_is_new(words):
    model = network()
    engine = TransformersEngine(model, words)
    session, prompt = engine.open("g"), numbers(20, seed=1)
    first = await engine.generate(prompt, sampling(1), session)
    engine.take_stats()
    longer = np.concatenate([prompt, first.token_ids, numbers(5, seed=2)])
    second = await engine.generate(longer, sampling(2), session)
    assert engine.take_stats()["tokens_computed"] == 1 + 5 + 7  # the last sampled, the observation, all but the last
    logprobs, _ = expected(plain_logits(stock(model), longer, second), second)
    np.testing.assert_allclose(second.logprobs, logprobs, atol=1e-5)


async def test_steps_compare_only_new_tokens_of_a_long_history(words, monkeypatch):
    """Otherwise each token of a long context would cost as much as the context is long."""
    compared = 0

    def counting(one: Sequence[int], other: Sequence[int], begin: int = 0) -> int:
        nonlocal compared
        compared += max(0, min(len(one), len(other)) - begin)
        return common_prefix(one, other, begin)

    for module in (plan, prefix_tree, requests):
        monkeypatch.setattr(module, "common_prefix", counting)
    engine = TransformersEngine(network(), words)
    sessions, prompt = [engine.open("g") for _ in range(3)], numbers(1500, seed=1)
    for _ in range(2):
        compared = 0
        asked = [engine.generate(prompt, sampling(i, 60), session) for i, session in enumerate(sessions)]
        found = await asyncio.gather(*asked)
        # a few times for each session as it begins and parts, and never for each of its tokens
        assert compared < 10 * len(sessions) * len(prompt)
        prompt = np.concatenate([prompt, found[0].token_ids, numbers(9, seed=2)])


async def test_rewritten_context_is_sampled_correctly(words):
    model = network()
    engine = TransformersEngine(model, words)
    session, prompt = engine.open("g"), numbers(20, seed=1)
    await engine.generate(prompt, sampling(1), session)
    engine.take_stats()
    rewritten = np.concatenate([prompt[:12], numbers(4, seed=9)])
    found = await engine.generate(rewritten, sampling(2), session)
    assert engine.take_stats()["tokens_computed"] == 4 + 7
    logprobs, _ = expected(plain_logits(stock(model), rewritten, found), found)
    np.testing.assert_allclose(found.logprobs, logprobs, atol=1e-5)


async def test_seed_decides_tokens_whatever_else_is_sampled(words):
    model = network(dtype=torch.float64)
    prompt = ids(5, 6, 7, 8)
    alone = await once(TransformersEngine(model, words), prompt, sampling(11, 24))
    busy = TransformersEngine(model, words, max_batch=3)
    others = [once(busy, numbers(n, seed=n), sampling(n, n), f"g{n % 4}") for n in range(2, 12)]
    found, *_ = await asyncio.gather(once(busy, prompt, sampling(11, 24), "g1"), *others)
    assert found.token_ids.tolist() == alone.token_ids.tolist()
    np.testing.assert_allclose(found.logprobs, alone.logprobs, atol=1e-6)
    different = await once(busy, prompt, sampling(12, 24))
    assert different.token_ids.tolist() != alone.token_ids.tolist()


async def test_publish_drops_cached_values(words):
    model = network()
    engine = TransformersEngine(model, words)
    session, prompt = engine.open("g"), numbers(20, seed=1)
    before = await engine.generate(prompt, sampling(1), session)
    model.load_state_dict(network(seed=1).state_dict())
    engine.publish(7)
    engine.take_stats()
    after = await engine.generate(prompt, sampling(1), session)
    assert engine.take_stats()["tokens_computed"] == 20 + 7
    assert before.versions.tolist() == [0] * 8
    assert after.versions.tolist() == [7] * 8
    logprobs, _ = expected(plain_logits(stock(model), prompt, after), after)
    np.testing.assert_allclose(after.logprobs, logprobs, atol=1e-5)


async def test_activations_can_be_kept_from_mid_turn(words, monkeypatch):
    """A pass under way finishes as it was planned."""
    model, prompt = network(), numbers(6, seed=4)
    engine = TransformersEngine(model, words)
    begun, go, compute = threading.Event(), threading.Event(), engine._step

    def held_up(*arguments: Any) -> None:
        begun.set()
        assert go.wait(timeout=20)
        compute(*arguments)

    monkeypatch.setattr(engine, "_step", held_up)
    answer = asyncio.create_task(once(engine, prompt, sampling(1), "g"))
    await asyncio.to_thread(begun.wait, 20)
    engine.keep_activations(1)
    go.set()
    found = await answer
    logprobs, _ = expected(plain_logits(stock(model), prompt, found), found)
    np.testing.assert_allclose(found.logprobs, logprobs, atol=1e-5)


async def test_publish_in_the_middle_of_a_turn(words):
    """Both requests have three tokens when the shorter one is answered, and its caller publishes."""
    model = network()
    old = stock(model)
    engine = TransformersEngine(model, words)
    prompt = numbers(6, seed=4)
    long = asyncio.create_task(once(engine, prompt, sampling(1, 8), "long"))
    await asyncio.sleep(0)  # its request comes first
    await once(engine, prompt, sampling(2, 3), "short")
    model.load_state_dict(network(seed=1).state_dict())
    engine.publish(1)
    found = await long
    assert found.versions.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    before, _ = expected(plain_logits(old, prompt, found), found)
    after, _ = expected(plain_logits(stock(model), prompt, found), found)
    np.testing.assert_allclose(found.logprobs, before[:3] + after[3:], atol=1e-5)


async def test_weights_are_loaded_between_two_tokens(words):
    """Also while nothing is sampled; each token was sampled by the weights whose version it has."""
    model = network()
    networks = [stock(model), stock(network(seed=1)), stock(network(seed=2))]
    engine = TransformersEngine(model, words)

    def load(version: int) -> int:
        model.load_state_dict(networks[version].state_dict())
        return version

    assert await engine.update(lambda: load(1)) == 1
    prompt = numbers(6, seed=4)
    long = asyncio.create_task(once(engine, prompt, sampling(1, 30)))
    await once(engine, prompt, sampling(2, 3), "short")
    with pytest.raises(OSError, match="no such weights"):
        await engine.update(lambda: (_ for _ in ()).throw(OSError("no such weights")))
    assert await engine.update(lambda: load(2)) == 2
    found = await long
    versions = found.versions.tolist()
    first = versions.index(2)
    assert 3 <= first < 30
    assert versions == [1] * first + [2] * (30 - first)
    before, _ = expected(plain_logits(networks[1], prompt, found), found)
    after, _ = expected(plain_logits(networks[2], prompt, found), found)
    np.testing.assert_allclose(found.logprobs, before[:first] + after[first:], atol=1e-5)


async def test_little_memory_costs_only_time(words):
    model = network()
    engine = TransformersEngine(model, words, memory_mb=0)
    sessions = [engine.open(f"g{i}") for i in range(3)]
    held = [numbers(9, seed=i) for i in range(3)]
    plain = stock(model)
    for turn in range(3):
        for i, session in enumerate(sessions):
            found = await engine.generate(held[i], sampling(turn), session)
            logprobs, _ = expected(plain_logits(plain, held[i], found), found)
            np.testing.assert_allclose(found.logprobs, logprobs, atol=1e-5)
            held[i] = np.concatenate([held[i], found.token_ids, ids(turn + 3)])
    stats = engine.take_stats()
    assert stats["evicted"] == 8  # every turn but the first finds another group's keys and values there
    assert stats["tokens_computed"] == stats["tokens_asked"] + 9 * 7


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("deterministic", [True, False])
async def test_sampler_and_trainer_agree_on_two_hundred_tokens(words, deterministic):
    model = network()
    engine = TransformersEngine(model, words, deterministic=deterministic, max_batch=8)
    await assert_sampler_and_trainer_agree(engine, model, numbers(80, seed=3), attempts=8)


@pytest.mark.slow
async def test_sampler_and_trainer_agree_on_a_real_model(smollm2):
    """With drafts, on packed weights and the fused decoder, if the machine has the kernels."""
    model = load_model("smollm2-135m", device="cpu", dtype="float32").requires_grad_(False)
    prompt = np.array(smollm2.encode("def add(a, b):\n    return a + b\n\n" * 4), np.int32)
    await assert_sampler_and_trainer_agree(TransformersEngine(model, smollm2), model, prompt, attempts=2)


async def assert_sampler_and_trainer_agree(engine, model, prompt, *, attempts):
    """Compare 200 tokens of each attempt of a group, in float32 at temperature 1, with the trainer's forest of them."""
    found = await asyncio.gather(*(once(engine, prompt, sampling(seed, 200)) for seed in range(attempts)))
    rows = [row_of(prompt, completion) for completion in found]
    (forest,) = pack_prefix_trees(rows, [row.loss_mask.astype(np.float32) for row in rows], budget=8192)
    with torch.no_grad():
        hidden = forward_hidden(model, forest.tokens, forest.positions, ForestLayout(forest))
        logprobs, _ = token_logprobs(model, hidden[forest.source], forest.target, forest.temperature, Sampling())
    assert len(logprobs) == attempts * 200
    torch.testing.assert_close(logprobs, forest.logprobs, rtol=0, atol=1e-4)


def row_of(prompt: I32, found: Completion) -> Row:
    """Return a training row of one turn."""
    n, sampled = len(prompt) + len(found.token_ids), len(found.token_ids)
    mask = np.arange(n) >= len(prompt)
    return Row(
        token_ids=np.concatenate([prompt, found.token_ids]), loss_mask=mask, origin=("g", 0),
        logprobs=np.concatenate([np.zeros(n - sampled, np.float32), found.logprobs]),
        advantages=mask.astype(np.float32), turn_ids=mask.astype(np.int32) - 1, versions=np.zeros(n, np.int32),
    )  # fmt: skip


async def conversations(engine: TransformersEngine, model: LlamaForCausalLM, groups: int = 3) -> set[tuple[Any, ...]]:
    """Sample groups of sessions whose prompts share 0 to 90 tokens, several turns each, some rewritten.

    Every log-probability is compared with a stock model's. Returns the tokens that had to be computed, as nodes of the
    groups' tries.
    """
    plain, nodes = stock(model), set()

    async def talk(group: int, member: int) -> None:
        rng = np.random.default_rng(10 * group + member)
        session, held = engine.open(f"g{group}"), numbers(90, seed=group)
        if member % 3 == 2:
            held = np.concatenate([held[: int(rng.integers(1, 90))], numbers(9, seed=member)])
        for turn in range(4):
            found = await engine.generate(held, sampling(member // 2, int(rng.integers(2, 9))), session)
            logprobs, _ = expected(plain_logits(plain, held, found), found)
            np.testing.assert_allclose(found.logprobs, logprobs, atol=2e-5)
            nodes.update((group, *node) for node in prefixes([computed(held, found)]))
            cut = held[:40] if member == 1 and turn == 1 else np.concatenate([held, found.token_ids])
            held = np.concatenate([cut, numbers(1 + int(rng.integers(6)), seed=turn)])
        engine.close(session)

    guards = [engine.open(f"g{group}") for group in range(groups)]  # so that no group ends early
    await asyncio.gather(*(talk(group, member) for group in range(groups) for member in range(6)))
    for session in guards:
        engine.close(session)
    return nodes


@pytest.mark.parametrize("packed", [True, False])
async def test_shared_prefixes_do_not_change_samples(words, packed):
    model = network()
    engine = TransformersEngine(model, words, pack_weights=packed)
    nodes = await conversations(engine, model)
    stats = engine.take_stats()
    assert stats["tokens_computed"] == len(nodes)
    assert stats["tokens_rebuilt"] == stats["evicted"] == 0


@pytest.mark.parametrize("rows", [1, 4, 9])
async def test_memory_is_bounded(words, rows):
    model = network()
    engine = TransformersEngine(model, words)
    shape = engine._planner.cache.shape
    engine._planner.cache = KVCache(shape, rows * MIN_CAPACITY * shape.bytes_per_token)
    most = 0

    def watch(*_: Any) -> None:
        nonlocal most
        most = max(most, engine._planner.cache.bytes)

    model.get_input_embeddings().register_forward_pre_hook(watch)
    nodes = await conversations(engine, model)
    stats = engine.take_stats()
    least = 4  # whoever goes on alone may need a row of twice the size beside its old one and the one that it leans on
    assert 0 < most <= max(rows, least) * MIN_CAPACITY * shape.bytes_per_token
    assert stats["evicted"] > 0
    assert stats["tokens_rebuilt"] > 0
    assert stats["tokens_computed"] > len(nodes)


async def test_a_cancelled_request_leaves_the_others_alone(words):
    engine = TransformersEngine(network(), words)
    prompt = numbers(6, seed=4)
    alone = await once(engine, prompt, sampling(1, 12))
    doomed = asyncio.create_task(once(engine, numbers(5, seed=5), sampling(2, 1000), "doomed"))
    other = asyncio.create_task(once(engine, prompt, sampling(1, 12)))
    await once(engine, prompt, sampling(3, 2))  # both are under way
    doomed.cancel()
    found = await other
    with pytest.raises(asyncio.CancelledError):
        await doomed
    assert found.token_ids.tolist() == alone.token_ids.tolist()
    engine.take_stats()
    await once(engine, prompt, sampling(1, 1))
    assert engine.take_stats()["tokens_sampled"] == 1  # no other request is left


async def test_a_session_may_close_while_a_step_goes_on(words):
    """A timed-out episode cancels its request and closes its session, the last of its group, during a step."""
    model = network()
    engine = TransformersEngine(model, words, pack_weights=False)
    loop, steps = asyncio.get_running_loop(), 0

    async def give_up() -> None:
        doomed.cancel()
        await asyncio.wait([doomed])

    def computing(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            asyncio.run_coroutine_threadsafe(give_up(), loop).result()

    model.get_decoder().register_forward_pre_hook(computing)
    doomed = asyncio.create_task(once(engine, ids(4, 5), sampling(1, 1000), "doomed"))
    found = await once(engine, ids(6, 7), sampling(2, 6), "other")
    assert doomed.cancelled()
    logprobs, _ = expected(plain_logits(stock(model), ids(6, 7), found), found)
    np.testing.assert_allclose(found.logprobs, logprobs, atol=1e-5)


async def test_bugs_are_not_engine_errors(words):
    """An engine failure would be retried and then dropped. The engine continues after a bug."""
    model = network()
    engine = TransformersEngine(model, words, pack_weights=False)
    sessions = [engine.open("g") for _ in range(2)]

    def misspelt(*_: Any) -> None:
        raise AttributeError("wieght")

    hook = model.get_decoder().register_forward_pre_hook(misspelt)
    jobs = [engine.generate(ids(5, 6), sampling(seed), session) for seed, session in enumerate(sessions)]
    errors = await asyncio.gather(*jobs, return_exceptions=True)
    for error in errors:
        assert isinstance(error, AttributeError)
        assert "in misspelt" in "".join(traceback.format_exception(error))
    hook.remove()
    assert (await engine.generate(ids(5, 6), sampling(1), sessions[0])).finish


@pytest.mark.parametrize(
    ("error", "devices"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."), True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB)"), True),
        (MemoryError(), True),
        (FloatingPointError("not finite"), True),
        (OSError(5, "Input/output error"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"), False),
        (RuntimeError("Expected all tensors to be on the same device, but found cuda:0 and cpu"), False),
        (NotImplementedError("CUDA error"), False),
        (RecursionError("maximum recursion depth exceeded"), False),
        (IndexError("index out of range in self"), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
async def test_device_errors_are_engine_errors(words, error: Exception, devices: bool):
    model = network()
    engine = TransformersEngine(model, words, pack_weights=False)

    def breaks(*_: Any) -> None:
        raise error

    model.get_decoder().register_forward_pre_hook(breaks)
    with pytest.raises(EngineError if devices else type(error)) as caught:
        await once(engine, ids(5), sampling(1))
    assert isinstance(caught.value, EngineError) == devices
    assert (caught.value.__cause__ if devices else caught.value) is error


async def test_a_failing_model_reaches_every_waiting_request(words):
    model = network()
    engine = TransformersEngine(model, words, pack_weights=False)
    sessions = [engine.open("g") for _ in range(3)]
    steps = 0

    def breaks(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            torch.empty(2**50)  # more than there is

    model.get_decoder().register_forward_pre_hook(breaks)
    prompt = ids(5, 6, 7)
    jobs = [engine.generate(prompt, sampling(seed), session) for seed, session in enumerate(sessions)]
    errors = await asyncio.gather(*jobs, return_exceptions=True)
    assert all(str(error).startswith("sampling failed: RuntimeError: ") for error in errors)
    assert all(isinstance(error, EngineError) and isinstance(error.__cause__, RuntimeError) for error in errors)
    found = await engine.generate(prompt, sampling(1), sessions[1])
    logprobs, _ = expected(plain_logits(stock(model), prompt, found), found)
    np.testing.assert_allclose(found.logprobs, logprobs, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_nan_weights_are_an_error(words, temperature: float):
    model = network()
    with torch.no_grad():
        model.get_decoder().norm.weight.fill_(float("nan"))
    with pytest.raises(EngineError, match="not finite"):
        await once(TransformersEngine(model, words), ids(5), sampling(1, temperature=temperature))


async def test_unknown_token_fails_only_its_request(words):
    model = network()
    engine = TransformersEngine(model, words)
    asked = [once(engine, prompt, sampling(1)) for prompt in (ids(5, 6), ids(5, 10**6), ids(5, -1))]
    found, *refused = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(found, Completion)
    for error in refused:
        assert isinstance(error, ConfigError)
        assert "is not in the model's vocabulary" in str(error)


async def test_each_distribution_is_computed_for_its_requests_only(words, monkeypatch):
    """Each of many temperatures is computed for its own request alone, if passes have no fixed width."""
    heights = []

    def counted(logits: torch.Tensor, *more: Any) -> Any:
        heights.append(len(logits))
        return draw(logits, *more)

    monkeypatch.setattr(transformers, "draw", counted)
    hows = [sampling(seed, 6, temperature=0.5 + seed / 10) for seed in range(6)]
    engines = [
        TransformersEngine(network(), words, deterministic=wide, max_batch=8, speculative_tokens=0)
        for wide in (False, True)
    ]
    prompts = [numbers(5, seed=seed) for seed in range(6)]
    both = []
    for engine in engines:
        heights.clear()
        asked = [once(engine, prompt, how, str(how.seed)) for prompt, how in zip(prompts, hows, strict=True)]
        both.append((await asyncio.gather(*asked), list(heights)))
    (found, alone), (same, wide) = both
    assert [one.token_ids.tolist() for one in found] == [one.token_ids.tolist() for one in same]
    assert (set(alone), set(wide)) == ({1}, {8})


def test_event_loop_that_ends_in_mid_step_leaves_nothing_half_done(words):
    """The step fails after its event loop has ended."""
    model = network()
    engine = TransformersEngine(model, words, pack_weights=False)
    session, prompt, how = engine.open("g"), numbers(9, seed=3), sampling(1)
    begun, ended = threading.Event(), threading.Event()

    def failing(*_: Any) -> None:
        begun.set()
        ended.wait(60)
        raise RuntimeError("too late")

    async def leave() -> None:
        asking = asyncio.create_task(engine.generate(prompt, how, session))
        await asyncio.to_thread(begun.wait)
        assert not asking.done()

    hook = model.get_decoder().register_forward_pre_hook(failing)
    asyncio.run(leave())
    hook.remove()
    ended.set()
    found = asyncio.run(engine.generate(prompt, how, session))
    logprobs, _ = expected(plain_logits(stock(model), prompt, found), found)
    np.testing.assert_allclose(found.logprobs, logprobs, atol=1e-5)


async def test_stop_tokens_strings_and_length_end_a_turn(words):
    model = network()
    prompt, how = numbers(6, seed=4), sampling(5, 12, temperature=1.5)
    free = await once(TransformersEngine(model, words), prompt, how)
    token = int(free.token_ids[4])
    place = free.token_ids.tolist().index(token)
    stopped = await once(TransformersEngine(model, words, stop_ids=[token]), prompt, how)
    assert (stopped.token_ids.tolist(), stopped.finish) == (free.token_ids.tolist()[: place + 1], "stop")
    text = words.decode([token])
    by_text = await once(TransformersEngine(model, words), prompt, replace(how, stop=(text,)))
    assert by_text.finish == "stop"
    assert text in words.decode(by_text.token_ids.tolist())
    assert text not in words.decode(by_text.token_ids.tolist()[:-1])
    cut = await once(TransformersEngine(model, words), prompt, replace(how, max_tokens=3))
    assert (cut.token_ids.tolist(), cut.finish) == (free.token_ids.tolist()[:3], "length")


async def test_long_stop_strings(words):
    model = network()
    prompt, how = numbers(6, seed=4), sampling(5, 60, temperature=1.5)
    free = await once(TransformersEngine(model, words), prompt, how)
    text = words.decode(free.token_ids[:50].tolist())
    length = next(n for n in range(1, 51) if text in words.decode(free.token_ids[:n].tolist()))
    found = await once(TransformersEngine(model, words), prompt, replace(how, stop=(text,)))
    assert (found.finish, found.token_ids.tolist()) == ("stop", free.token_ids[:length].tolist())
    assert length > 40


async def among(others: int, engine: TransformersEngine) -> list[Completion]:
    """Sample three turns of one session while others of its group and of other groups sample."""
    session, held, turns = engine.open("g"), numbers(70, seed=0), []
    crowd = [
        asyncio.create_task(once(engine, numbers(3 + 7 * n, seed=n % 5), sampling(n, 40 - n), f"{'gh'[n % 2]}"))
        for n in range(others)
    ]
    for turn in range(3):
        turns.append(await engine.generate(held, sampling(turn, 12), session))
        held = np.concatenate([held, turns[-1].token_ids, numbers(5, seed=turn)])
    await asyncio.gather(*crowd)
    return turns


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("packed", [True, False])
async def test_deterministic_samples_repeat_bit_by_bit(words, packed):
    """Alone, in a crowd that does not fit into a pass, and computed again after eviction."""
    model = network()
    engines = [
        TransformersEngine(model, words, deterministic=True, max_batch=8, pack_weights=packed, memory_mb=memory)
        for memory in (64, 64, 0)
    ]
    alone, crowded, poor = [await among(n, engine) for n, engine in zip((0, 15, 6), engines, strict=True)]
    assert engines[2].take_stats()["evicted"] > 0
    for found in (crowded, poor):
        for one, other in zip(alone, found, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            assert one.logprobs.tolist() == other.logprobs.tolist()


async def test_deterministic_passes_have_one_width(words):
    model, fed = network(), []
    engine = TransformersEngine(model, words, deterministic=True, max_batch=8, pack_weights=False)
    model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    await among(9, engine)
    assert set(fed) == {8}


async def test_refuses_closed_sessions_and_empty_prompts(words):
    engine = TransformersEngine(network(), words)
    session = engine.open("g")
    with pytest.raises(EngineError, match="empty"):
        await engine.generate(ids(), sampling(), session)
    engine.close(session)
    with pytest.raises(EngineError, match="is not open"):
        await engine.generate(ids(1), sampling(), session)


@pytest.mark.parametrize("deterministic", [True, False])
async def test_passes_check_engine(words, deterministic):
    engine = TransformersEngine(network(dtype=torch.float64), words, deterministic=deterministic)
    prompts = [numbers(n, seed=n) for n in (3, 1, 7)]
    decode = lambda tokens: words.decode(tokens.tolist())  # noqa: E731
    assert await check_engine(engine, prompts, decode=decode) == []
