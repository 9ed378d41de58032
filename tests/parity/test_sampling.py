"""Sampled output with speculation is, token for token, the engine's own without, whoever else is in the batch."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import numpy as np
import pytest

import families
from engine_support import assert_idle, collect, run_to_end, steps
from outpace.config import SamplingParams
from outpace.draft import Drafter, OracleDrafter
from outpace.engine import Engine

FAMILY = "qwen3"
TOKENS = 64
LENGTHS = (5, 17, 30, 48)


class EvenIds:
    """Only even ids, and after one that ends in 4 only ids above 100: a small automaton."""

    def start(self) -> bool:
        return False

    def allowed(self, state: bool) -> np.ndarray:
        ids = np.arange(families.VOCAB)
        return (ids % 2 == 0) & (~np.bool_(state) | (ids > 100))

    def advance(self, state: bool, token: int) -> bool:
        return token % 10 == 4


PARAMS = {
    "warm": SamplingParams(temperature=0.7, seed=11),
    "hot": SamplingParams(temperature=1.3, seed=12),
    "top-k": SamplingParams(temperature=1.0, top_k=8, seed=13),
    "top-p": SamplingParams(temperature=1.0, top_p=0.8, seed=14),
    "min-p": SamplingParams(temperature=1.3, min_p=0.05, seed=15),
    "penalties": SamplingParams(
        temperature=0.8, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4, seed=16
    ),
    "negative penalties": SamplingParams(temperature=0.8, presence_penalty=-1.5, frequency_penalty=-0.5, seed=17),
    "bias": SamplingParams(temperature=1.0, logit_bias={3: 4.0, 5: -100.0, 8: 2.5}, seed=18),
    "constraint": SamplingParams(temperature=1.0, constraint=EvenIds(), seed=19),
    "greedy penalties": SamplingParams(repetition_penalty=1.4, frequency_penalty=0.5),
    "greedy constraint": SamplingParams(constraint=EvenIds()),
    "everything": SamplingParams(
        temperature=0.9, top_k=50, top_p=0.95, min_p=0.01, repetition_penalty=1.1, frequency_penalty=0.2,
        logit_bias={7: 1.0}, constraint=EvenIds(), seed=20,
    ),
}  # fmt: skip
PARAMS = {name: dataclasses.replace(params, max_tokens=TOKENS) for name, params in PARAMS.items()}


@functools.cache
def _model() -> Any:
    return families.build(FAMILY)


@functools.cache
def _prompts() -> list[list[int]]:
    return families.prompts(families.VOCAB, seed=9, lengths=LENGTHS)


@functools.cache
def _plain_engine() -> Engine:
    return _engine("none")


def _engine(drafter: str | Drafter, **options: Any) -> Engine:
    options = {"guard": False, "debug": True, "kv_tokens": 2048, **options}
    return Engine(_model(), drafter=drafter, **options)


@functools.cache
def plain(index: int, name: str, seed: int | None = None) -> tuple[int, ...]:
    """One prompt alone, without drafts."""
    params = PARAMS[name] if seed is None else dataclasses.replace(PARAMS[name], seed=seed)
    [output] = _plain_engine().generate(_prompts()[index], params)
    return tuple(output.token_ids)


def oracle(truth: dict[int, tuple[int, ...]], accept: float = 0.85) -> OracleDrafter:
    """An oracle that knows what was *sampled* after each prompt."""
    known = {tuple(_prompts()[i]): tokens for i, tokens in truth.items()}
    return OracleDrafter(accept, known, vocab_size=families.VOCAB)


@pytest.mark.parametrize("name", PARAMS)
def test_same_tokens_as_without_speculation(name: str) -> None:
    expected = {i: plain(i, name) for i in range(len(LENGTHS))}
    assert all(len(tokens) == TOKENS for tokens in expected.values())
    for drafter in ("suffix", "lookup", oracle(expected)):
        engine = _engine(drafter)
        [alone] = engine.generate(_prompts()[2], PARAMS[name])
        assert tuple(alone.token_ids) == expected[2]
        outputs = engine.generate(_prompts(), PARAMS[name])
        assert {i: tuple(o.token_ids) for i, o in enumerate(outputs)} == expected
        if isinstance(drafter, OracleDrafter):
            for output in outputs:
                assert output.figures.mean_accepted_tokens > 2
        assert_idle(engine)


def test_parameters_do_what_they_say() -> None:
    """Else the tests here would compare one and the same text."""
    texts = {plain(0, name) for name in PARAMS}
    assert len(texts) == len(PARAMS)
    assert all(token % 2 == 0 for token in plain(0, "constraint"))
    assert plain(0, "warm") != plain(0, "warm", 1)
    assert plain(0, "warm") == plain(0, "warm", 11)


def test_any_batch_in_any_order() -> None:
    names = list(PARAMS)
    jobs = [(i, name) for i in range(len(LENGTHS)) for name in names]
    rng = random.Random(0)
    for drafter in ("suffix", "oracle"):
        rng.shuffle(jobs)
        batch = jobs[:14]
        truth = {i: plain(i, next(n for j, n in batch if j == i)) for i, _ in batch}
        engine = _engine(oracle(truth) if drafter == "oracle" else drafter, max_batch_size=5, max_step_tokens=24)
        outputs = engine.generate([_prompts()[i] for i, _ in batch], [PARAMS[name] for _, name in batch])
        for (i, name), output in zip(batch, outputs, strict=True):
            assert tuple(output.token_ids) == plain(i, name), (i, name)
        assert_idle(engine)


@pytest.mark.parametrize("drafter", ["none", "suffix", "oracle"])
@pytest.mark.parametrize("index", [0, 3])
def test_sample_i_is_a_request_of_its_own_with_seed_plus_i(drafter: str, index: int) -> None:
    params = dataclasses.replace(PARAMS["top-p"], n=4, seed=70)
    expected = [plain(index, "top-p", 70 + i) for i in range(4)]
    assert len(set(expected)) == 4
    engine = _engine(oracle({index: expected[2]}) if drafter == "oracle" else drafter, max_step_tokens=16)
    outputs = engine.generate(_prompts()[index], params)
    assert [o.sample_index for o in outputs] == [0, 1, 2, 3]
    assert [o.seed for o in outputs] == [70, 71, 72, 73]
    assert [tuple(o.token_ids) for o in outputs] == expected
    if drafter == "oracle":
        assert outputs[2].figures.mean_accepted_tokens > 2
    assert_idle(engine)


def test_samples_of_a_prompt_of_one_token() -> None:
    params = dataclasses.replace(PARAMS["hot"], n=3, seed=4)
    engine = _engine("suffix")
    outputs = engine.generate([5], params)
    for i, output in enumerate(outputs):
        [alone] = _plain_engine().generate([5], dataclasses.replace(params, n=1, seed=4 + i))
        assert output.token_ids == alone.token_ids
    assert_idle(engine)


def test_samples_never_run_beyond_the_batch_size() -> None:
    engine = _engine("suffix", max_batch_size=4)
    for i, count in enumerate((TOKENS, 10, 20)):
        engine.submit(_prompts()[i], dataclasses.replace(PARAMS["warm"], max_tokens=count))
    engine.submit(_prompts()[3], dataclasses.replace(PARAMS["warm"], n=3))
    most = 0
    outputs = []
    for progress in steps(engine):
        outputs += progress
        most = max(most, len(engine._core.scheduler.running))
    assert most == 4
    assert len(collect(outputs)) == 6


def test_a_fork_goes_on_from_there() -> None:
    """Up to the fork the text is the original's; from there the copy's seed decides, as it would alone."""
    expected = plain(1, "top-k")
    for drafter in ("suffix", oracle({1: expected, 2: plain(2, "warm")})):
        engine = _engine(drafter)
        first = engine.submit(_prompts()[1], PARAMS["top-k"])
        other = engine.submit(_prompts()[2], PARAMS["warm"])
        progress = [p for _ in range(4) for p in engine.step()]
        before = [t for p in progress if p.request_id == first for t in p.token_ids]
        assert 3 <= len(before) < TOKENS
        same = engine.fork(first, seed=PARAMS["top-k"].seed)
        twin = engine.fork(first)
        outputs = run_to_end(engine)
        assert tuple(outputs[first, 0].token_ids) == tuple(outputs[same, 0].token_ids) == expected
        assert tuple(outputs[other, 0].token_ids) == plain(2, "warm")
        found = outputs[twin, 0]
        assert found.seed == PARAMS["top-k"].seed + 1
        assert found.token_ids[: len(before)] == before
        assert tuple(found.token_ids) != expected
        rest = dataclasses.replace(PARAMS["top-k"], seed=found.seed, max_tokens=TOKENS - len(before))
        [alone] = _plain_engine().generate([*_prompts()[1], *before], rest)
        assert found.token_ids[len(before) :] == alone.token_ids
        assert_idle(engine)


def test_a_fork_keeps_penalties_and_the_constraints_state() -> None:
    for name in ("penalties", "everything"):
        expected = plain(3, name)
        engine = _engine(oracle({3: expected}))
        first = engine.submit(_prompts()[3], PARAMS[name])
        for _ in range(5):
            engine.step()
        same = engine.fork(first, seed=PARAMS[name].seed)
        outputs = run_to_end(engine)
        assert tuple(outputs[same, 0].token_ids) == tuple(outputs[first, 0].token_ids) == expected


def test_preempted_requests_go_on_with_the_same_tokens() -> None:
    names = ["everything", "penalties", "hot", "constraint"]
    expected = {i: plain(i, name) for i, name in enumerate(names)}
    engine = _engine(oracle(expected), kv_tokens=LENGTHS[-1] + TOKENS + 60, max_step_tokens=16)
    outputs = engine.generate(_prompts(), [PARAMS[name] for name in names])
    assert sum(o.figures.preemptions for o in outputs) > 0
    assert {i: tuple(o.token_ids) for i, o in enumerate(outputs)} == expected
    assert_idle(engine)


def test_a_drawn_seed_is_reported_and_gives_the_same_again() -> None:
    engine = _engine("suffix")
    [first] = engine.generate(_prompts()[0], SamplingParams(max_tokens=20, temperature=1.0))
    [other] = engine.generate(_prompts()[0], SamplingParams(max_tokens=20, temperature=1.0))
    assert first.seed is not None
    assert first.token_ids != other.token_ids
    [again] = _plain_engine().generate(_prompts()[0], SamplingParams(max_tokens=20, temperature=1.0, seed=first.seed))
    assert again.token_ids == first.token_ids
    [greedy] = engine.generate(_prompts()[0], SamplingParams(max_tokens=2, seed=5))
    assert greedy.seed is None


@pytest.mark.parametrize("length", [1, 40, 63, 64, 65, 80])
def test_samples_beside_each_other_where_rotation_switches(length: int) -> None:
    """Samples share the prompt's rows, and each crosses the switch at 64 tokens (or begins beyond it) by itself."""
    model = _longrope()
    plain_engine = Engine(model, drafter="none", kv_tokens=256)
    prompt = families.prompts(families.VOCAB, seed=length, lengths=[length])[0]
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=9)
    expected = [plain_engine.generate(prompt, dataclasses.replace(params, seed=9 + i))[0].token_ids for i in range(3)]
    truth = OracleDrafter(0.8, {tuple(prompt): expected[1], (3, 4): [5] * 40}, vocab_size=families.VOCAB)
    engine = Engine(model, drafter=truth, guard=False, debug=True, kv_tokens=420, max_step_tokens=32)
    engine.submit([3, 4], SamplingParams(max_tokens=20))  # stays on the other side
    outputs = engine.generate(prompt, dataclasses.replace(params, n=3))
    assert [output.token_ids for output in outputs] == expected
    run_to_end(engine)
    assert_idle(engine)


@functools.cache
def _longrope() -> Any:
    return families.build("phi3-longrope")
