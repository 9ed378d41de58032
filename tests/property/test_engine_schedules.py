"""Random schedules of submit, step, abort and fork: every output is the request's own, and nothing is left behind."""

from __future__ import annotations

import dataclasses
import functools

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

import families
from engine_support import assert_idle, collect
from outpace.config import SamplingParams
from outpace.draft import OracleDrafter
from outpace.engine import Engine
from outpace.engine.output import Progress

LENGTHS = (1, 4, 11, 23, 40)
TOKENS = 24
VARIANTS = (
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=0.8, seed=4, top_k=20, frequency_penalty=0.3),
    SamplingParams(temperature=1.0, seed=3, n=2),
    SamplingParams(speculate=False),
)


@functools.cache
def model() -> PreTrainedModel:
    return families.build("llama", num_hidden_layers=2)


@functools.cache
def prompts() -> list[list[int]]:
    return families.prompts(families.VOCAB, seed=21, lengths=LENGTHS)


@functools.cache
def plain_engine() -> Engine:
    return Engine(model(), drafter="none", kv_tokens=256)


@functools.cache
def plain(text: tuple[int, ...], variant: int, seed: int | None, count: int) -> tuple[int, ...]:
    """The tokens of one request alone, without drafts."""
    params = dataclasses.replace(VARIANTS[variant], n=1, seed=seed, max_tokens=count)
    [output] = plain_engine().generate(text, params)
    return tuple(output.token_ids)


def oracle() -> OracleDrafter:
    """Knows the greedy continuations; for sampled texts it is wrong, for parts of them right."""
    known = {tuple(p): plain(tuple(p), 0, None, TOKENS + 8) for p in prompts()}
    return OracleDrafter(0.8, known, vocab_size=families.VOCAB, max_nodes=10)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, len(LENGTHS) - 1), st.integers(0, len(VARIANTS) - 1)),
        st.tuples(st.just("step"), st.integers(1, 6), st.just(0)),
        st.tuples(st.just("abort"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("fork"), st.integers(0, 20), st.integers(0, 1)),
    ),
    min_size=4,
    max_size=24,
)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    actions=ACTIONS,
    kv_tokens=st.sampled_from([70, 110, 200, 1000]),
    batch=st.integers(2, 5),
    chunk=st.sampled_from([3, 16, 512]),
)
def test_every_output_is_the_requests_own(
    actions: list[tuple[str, int, int]], kv_tokens: int, batch: int, chunk: int
) -> None:
    engine = Engine(
        model(), drafter=oracle(), guard=False, debug=True,
        kv_tokens=kv_tokens, max_batch_size=batch, max_step_tokens=chunk,
    )  # fmt: skip
    progress: list[Progress] = []
    of_request: dict[str, tuple[int, int]] = {}  # prompt and variant
    forked: dict[str, int] = {}  # tokens that the original had
    aborted: set[str] = set()

    def committed(request_id: str, sample: int = 0) -> list[int]:
        return [t for p in progress if (p.request_id, p.sample_index) == (request_id, sample) for t in p.token_ids]

    def active() -> list[str]:
        return sorted({request.request_id for request in engine._core.scheduler.active})

    def step() -> None:
        progress.extend(engine.step())
        engine.arena.check()

    for what, first, second in actions:
        if what == "submit":
            name = engine.submit(
                prompts()[first],
                dataclasses.replace(VARIANTS[second], max_tokens=TOKENS),
                request_id=f"r{len(of_request)}",
            )
            of_request[name] = (first, second)
        elif what == "step":
            for _ in range(first):
                step()
        elif what == "abort" and active():
            name = active()[first % len(active())]
            engine.abort(name)
            aborted.add(name)
        elif what == "fork":
            single = [name for name in active() if VARIANTS[of_request[name][1]].n == 1]
            if single:
                original = single[first % len(single)]
                name = engine.fork(original, new_request_id=f"r{len(of_request)}")
                of_request[name] = of_request[original]
                prefix = committed(original)
                forked[name] = len(prefix)
                progress.append(Progress(name, 0, prefix, [0] * len(prefix), ""))
    for _ in range(2000):
        if not engine.has_work:
            break
        step()
    outputs = collect(progress)
    assert_idle(engine)
    assert {name for name, _ in outputs} == set(of_request)
    for (name, sample), output in outputs.items():
        prompt, variant = of_request[name]
        text = prompts()[prompt]
        assert output.token_ids == committed(name, sample), name
        assert output.finish_reason == ("abort" if name in aborted else "length"), output.error
        begin = forked.get(name, 0)
        if begin and VARIANTS[variant].frequency_penalty:
            continue  # the penalty tells prompt and output apart, so no request alone would give the fork's text
        expected = plain((*text, *output.token_ids[:begin]), variant, output.seed, TOKENS - begin)
        found = tuple(output.token_ids[begin:])
        assert found == expected[: len(found)], name
        assert name in aborted or len(found) == len(expected)
