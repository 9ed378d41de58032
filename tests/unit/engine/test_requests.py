"""Life of a request: how it ends, what it counts, who is there beside it."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch

import families
from engine_support import assert_idle, collect, plain_logits, run_to_end
from outpace.config import SamplingParams
from outpace.engine import Engine, total_figures
from outpace.errors import (
    ArenaFullError,
    ConfigError,
    ConstraintError,
    LifecycleError,
    NonFiniteLogitsError,
    PromptError,
)
from outpace.tree import Origin

P40 = SamplingParams(max_tokens=40)


def greedy(tiny: Any, index: int, count: int = 40) -> list[int]:
    return tiny.plain(tiny.prompts[index], SamplingParams(max_tokens=count)).token_ids


# --- how a request ends ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["none", "oracle"])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_max_tokens(tiny: Any, drafter: str, count: int) -> None:
    engine = tiny.engine(tiny.oracle() if drafter == "oracle" else drafter)
    [output] = engine.generate(tiny.prompts[1], SamplingParams(max_tokens=count))
    assert output.token_ids == greedy(tiny, 1)[:count]
    assert (output.finish_reason, output.stop_reason) == ("length", None)
    assert_idle(engine)


def test_the_context_ends_a_request(tiny: Any) -> None:
    engine = tiny.engine(tiny.oracle(), context_length=30)
    prompts = [families.prompts(tiny.model.config.vocab_size, 5, [length])[0] for length in (30, 31, 29, 28)]
    with pytest.raises(PromptError, match=r"30 tokens, and the context of 30"):
        engine.submit(prompts[0])
    with pytest.raises(PromptError, match=r"31 tokens, and the context of 30"):
        engine.submit(prompts[1])
    quiet = tiny.engine("none", context_length=30)
    for prompt, room in ((prompts[2], 1), (prompts[3], 2)):
        for limit in (None, room + 1, 200):
            [output] = quiet.generate(prompt, SamplingParams(max_tokens=limit))
            assert len(output.token_ids) == room
            assert (output.finish_reason, output.stop_reason) == ("length", "context")
        [exact] = quiet.generate(prompt, SamplingParams(max_tokens=room))
        assert (exact.finish_reason, exact.stop_reason) == ("length", None)
    # Drafts never reach beyond the context.
    [output] = engine.generate(tiny.prompts[3], SamplingParams(max_tokens=None))
    assert output.token_ids == greedy(tiny, 3)[:6]
    assert output.stop_reason == "context"
    assert_idle(engine)


@pytest.mark.parametrize("listed", [False, True])
def test_end_of_sequence_ids_of_the_generation_config(tiny: Any, listed: bool) -> None:
    expected = greedy(tiny, 2)
    eos = expected[9]
    place = expected.index(eos)
    model = copy.copy(tiny.model)
    model.generation_config = copy.deepcopy(tiny.model.generation_config)
    model.generation_config.eos_token_id = [3, eos] if listed else eos
    engine = Engine(model, drafter=tiny.oracle(), guard=False, debug=True, kv_tokens=1024)
    [output] = engine.generate(tiny.prompts[2], P40)
    assert output.token_ids == expected[: place + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", eos)
    [ignored] = engine.generate(tiny.prompts[2], SamplingParams(max_tokens=40, ignore_eos=True))
    assert ignored.token_ids == expected
    later = next(t for t in expected[20:] if t != eos and t not in expected[: expected.index(t)])
    [own] = engine.generate(
        tiny.prompts[2], SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=(later, 100_000))
    )
    assert own.token_ids == expected[: expected.index(later) + 1]
    assert own.stop_reason == later
    assert_idle(engine)


@pytest.mark.parametrize("accept", [0.0, 0.9])
def test_stop_strings_end_token_and_text(tiny: Any, accept: float) -> None:
    whole = tiny.plain(tiny.prompts[4], SamplingParams(max_tokens=60))
    stop = next(
        whole.text[i : i + 4] for i in range(12, len(whole.text) - 4) if whole.text.find(whole.text[i : i + 4]) == i
        and "�" not in whole.text[i : i + 4]
    )  # fmt: skip
    engine = tiny.engine(tiny.oracle(accept=accept))
    for include in (False, True):
        params = SamplingParams(max_tokens=60, stop=("never here", stop), include_stop=include)
        pieces = list(engine.stream(tiny.prompts[4], params))
        output = pieces[-1].output
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        end = whole.text.find(stop)
        assert output.text == whole.text[: end + (len(stop) if include else 0)]
        assert "".join(p.text for p in pieces) == output.text
        assert [t for p in pieces for t in p.token_ids] == output.token_ids
        assert output.token_ids == whole.token_ids[: len(output.token_ids)]
        decode = lambda ids: tiny.tokenizer.decode(ids, skip_special_tokens=True)  # noqa: E731
        assert stop in decode(output.token_ids)
        assert stop not in decode(output.token_ids[:-1])
    assert_idle(engine)


def test_stop_string_and_end_of_sequence_in_one_step(tiny: Any) -> None:
    """The token that comes first decides; in one and the same token the string does."""
    expected = greedy(tiny, 4)
    texts = [tiny.tokenizer.decode([t]) for t in expected]
    at = next(i for i in range(5, 30) if texts[i].strip() and "�" not in texts[i] and expected.index(expected[i]) == i)
    stop = texts[at]
    first = tiny.tokenizer.decode(expected).find(stop)
    at = next(i for i in range(len(expected)) if len(tiny.tokenizer.decode(expected[: i + 1])) >= first + len(stop))
    engine = tiny.engine(tiny.oracle(accept=1.0))
    for eos, reason in ((expected[at], stop), (expected[at + 1], stop)):
        if eos in expected[:at]:
            continue
        [output] = engine.generate(tiny.prompts[4], SamplingParams(max_tokens=40, stop=(stop,), stop_token_ids=(eos,)))
        assert output.token_ids == expected[: at + 1]
        assert output.stop_reason == reason
    before = next(i for i in range(at - 1, -1, -1) if expected.index(expected[i]) == i)
    [output] = engine.generate(
        tiny.prompts[4], SamplingParams(max_tokens=40, stop=(stop,), stop_token_ids=(expected[before],))
    )
    assert output.token_ids == expected[: before + 1]
    assert output.stop_reason == expected[before]


# --- what it counts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [None, 5, 9, 14, 23])
def test_figures_add_up(tiny: Any, cut: int | None) -> None:
    expected = greedy(tiny, 3)
    engine = tiny.engine(tiny.oracle(accept=0.8), max_step_tokens=7)
    stop = () if cut is None else (expected[cut],)
    progress = []
    engine.submit(tiny.prompts[3], SamplingParams(max_tokens=40, stop_token_ids=stop))
    while engine.has_work:
        progress += engine.step()
    output = progress[-1].output
    figures = output.figures
    committing = [p for p in progress if p.token_ids]
    assert sum(len(p.token_ids) for p in committing) == len(output.token_ids)
    assert figures.steps == len(committing) - 1  # prefill's step is not counted, nor is its token
    assert figures.tokens == len(output.token_ids) - 1
    assert figures.mean_accepted_tokens == figures.tokens / figures.steps
    assert figures.accepted_nodes == sum(origin != 0 for p in committing for origin in p.origins)
    # Each step ends with a bonus token, but for the last one if the stop token was on the accepted path.
    assert figures.tokens - figures.accepted_nodes in (figures.steps, figures.steps - 1)
    assert figures.tokens - figures.accepted_nodes == sum(0 in p.origins for p in committing[1:])
    assert figures.accepted_nodes <= figures.verified_nodes <= figures.drafted_nodes
    assert figures.prefill_tokens == len(tiny.prompts[3])
    assert figures.preemptions == 0
    assert figures.prefill_s > 0
    assert figures.decode_s >= figures.draft_s > 0
    assert figures.to_dict()["mean_accepted_tokens"] == figures.mean_accepted_tokens


def test_origins_say_which_tokens_were_drafted(tiny: Any) -> None:
    engine = tiny.engine(tiny.oracle(accept=0.8))
    plain = engine.submit(tiny.prompts[1], SamplingParams(max_tokens=30, speculate=False))
    for i in (0, 2, 3):
        engine.submit(tiny.prompts[i], SamplingParams(max_tokens=30))
    drafted = 0
    while engine.has_work:
        for progress in engine.step():
            count = len(progress.token_ids)
            assert progress.origins == [int(Origin.ORACLE)] * (count - 1) + [0]  # the last one is the bonus token
            assert count == 1 or progress.request_id != plain
            drafted += count - 1
    assert drafted > 40


def test_totals_are_the_sum_over_finished_samples(tiny: Any) -> None:
    engine = tiny.engine("suffix")
    outputs = engine.generate(tiny.prompts, [SamplingParams(max_tokens=n) for n in (1, 5, 9, 20, 30)])
    engine.submit(tiny.prompts[0], request_id="a")
    figures = engine.figures()
    assert figures.active == 1
    engine.abort("a")
    engine.step()
    figures = engine.figures()
    assert figures.total.tokens == total_figures(outputs).tokens == 4 + 8 + 19 + 29
    assert figures.finished == {"length": 5, "abort": 1}
    assert (figures.active, figures.cached_rows) == (0, 0)
    assert figures.arena_rows == engine.arena.capacity


@pytest.mark.parametrize("drafter", ["none", "oracle"])
def test_logprobs_are_the_models_own(tiny: Any, drafter: str) -> None:
    expected = greedy(tiny, 2)
    params = SamplingParams(max_tokens=40, logprobs=3, logit_bias={expected[0]: 4.0}, stop_token_ids=(expected[17],))
    reference = tiny.plain(tiny.prompts[2], SamplingParams(max_tokens=40, logit_bias={expected[0]: 4.0}))
    engine = tiny.engine(tiny.oracle(params) if drafter == "oracle" else "none")
    [output] = engine.generate(tiny.prompts[2], params)
    count = len(output.token_ids)
    assert output.token_ids == reference.token_ids[:count]
    assert output.logprobs is not None
    assert [entry.token for entry in output.logprobs] == output.token_ids
    logits = plain_logits(tiny.model, [*tiny.prompts[2], *output.token_ids])[len(tiny.prompts[2]) - 1 : -1]
    wanted = torch.log_softmax(torch.from_numpy(logits), dim=-1).numpy()
    for entry, row in zip(output.logprobs, wanted, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token], abs=1e-4)
        assert [token for token, _ in entry.top] == np.argsort(-row, kind="stable")[:3].tolist()
        assert [value for _, value in entry.top] == pytest.approx(np.sort(row)[::-1][:3].tolist(), abs=1e-4)
    [none] = engine.generate(tiny.prompts[2], SamplingParams(max_tokens=4, logprobs=0))
    assert [entry.top for entry in none.logprobs] == [[]] * 4
    [off] = engine.generate(tiny.prompts[2], SamplingParams(max_tokens=4))
    assert off.logprobs is None


# --- abort and misuse ------------------------------------------------------------------------------------------------


def test_abort_running_waiting_and_several_samples(tiny: Any) -> None:
    engine = tiny.engine(tiny.oracle(), max_batch_size=2)
    running = engine.submit(tiny.prompts[0], P40)
    waiting = engine.submit(tiny.prompts[1], SamplingParams(max_tokens=40, n=2, temperature=1.0, seed=5))
    kept = engine.submit(tiny.prompts[2], P40)
    progress = [*engine.step(), *engine.step()]
    engine.abort(running)
    engine.abort(waiting)
    outputs = collect([*progress, *engine.step()])
    tokens = [t for p in progress if p.request_id == running for t in p.token_ids]
    assert len(tokens) >= 2
    assert outputs[running, 0].finish_reason == "abort"
    assert outputs[running, 0].token_ids == tokens == greedy(tiny, 0)[: len(tokens)]
    assert [(outputs[waiting, i].finish_reason, outputs[waiting, i].token_ids) for i in (0, 1)] == [("abort", [])] * 2
    assert [outputs[waiting, i].seed for i in (0, 1)] == [5, 6]
    with pytest.raises(LifecycleError, match="is not active"):
        engine.abort(running)
    assert run_to_end(engine)[kept, 0].token_ids == greedy(tiny, 2)
    assert_idle(engine)


def test_abort_of_running_samples(tiny: Any) -> None:
    engine = tiny.engine("suffix")
    name = engine.submit(tiny.prompts[3], SamplingParams(max_tokens=40, n=3, temperature=1.0, seed=1))
    for _ in range(4):
        engine.step()
    engine.abort(name)
    outputs = run_to_end(engine)
    assert sorted(outputs) == [(name, 0), (name, 1), (name, 2)]
    assert all(o.finish_reason == "abort" and o.token_ids for o in outputs.values())
    assert_idle(engine)


def test_ids_must_be_free_and_known(tiny: Any) -> None:
    engine = tiny.engine()
    engine.submit(tiny.prompts[0], P40, request_id="a")
    with pytest.raises(LifecycleError, match="'a' is in use"):
        engine.submit(tiny.prompts[1], request_id="a")
    with pytest.raises(LifecycleError, match="'a' is in use"):
        engine.fork("a", new_request_id="a")
    for call in (engine.abort, engine.fork):
        with pytest.raises(LifecycleError, match=r"'b' is not active \(active: a\)"):
            call("b")
    assert engine.figures().active == 1
    engine.abort("a")
    assert [p.request_id for p in engine.step()] == ["a"]
    engine.submit(tiny.prompts[1], SamplingParams(max_tokens=2), request_id="a")  # free again
    run_to_end(engine)
    assert_idle(engine)


def test_requests_may_enter_at_any_time(tiny: Any) -> None:
    engine = tiny.engine(tiny.oracle(accept=0.5))
    ids = {}
    outputs = []
    for i in range(5):
        ids[engine.submit(tiny.prompts[i], P40)] = i
        outputs += [p for _ in range(3) for p in engine.step()]
    while engine.has_work:
        outputs += engine.step()
    found = collect(outputs)
    assert {ids[name]: output.token_ids for (name, _), output in found.items()} == {
        i: greedy(tiny, i) for i in range(5)
    }
    assert_idle(engine)


def test_a_step_without_work_does_nothing(tiny: Any) -> None:
    engine = tiny.engine()
    assert not engine.has_work
    assert engine.step() == []


# --- generate and stream beside other requests -------------------------------------------------------------------------


def test_requests_of_others_keep_their_progress(tiny: Any) -> None:
    engine = tiny.engine(tiny.oracle(accept=0.5))
    foreign = engine.submit(tiny.prompts[4], SamplingParams(max_tokens=12), stream=True)
    [own] = engine.generate(tiny.prompts[0], P40)
    assert own.token_ids == greedy(tiny, 0)
    kept = []
    while engine.has_work:
        kept += engine.step()
    assert {p.request_id for p in kept} == {foreign}
    assert [t for p in kept for t in p.token_ids] == greedy(tiny, 4)[:12] == kept[-1].output.token_ids
    assert "".join(p.text for p in kept) == kept[-1].output.text
    assert_idle(engine)


def test_a_stream_that_is_left_early_frees_everything(tiny: Any) -> None:
    engine = tiny.engine(tiny.oracle())
    foreign = engine.submit(tiny.prompts[1], P40)
    for progress in engine.stream(tiny.prompts[0], SamplingParams(max_tokens=100, n=2, temperature=1.0)):
        if progress.token_ids:
            break
    assert engine.figures().active == 1
    outputs = run_to_end(engine)
    assert list(outputs) == [(foreign, 0)]
    assert outputs[foreign, 0].token_ids == greedy(tiny, 1)
    assert_idle(engine)


def test_an_interrupted_generate_frees_everything(tiny: Any) -> None:
    engine = tiny.engine()

    def interrupt(_progress: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(tiny.prompts, P40, on_progress=interrupt)
    assert_idle(engine)


def test_stream_gives_tokens_text_and_origins(tiny: Any) -> None:
    engine = tiny.engine(tiny.oracle())
    progress = list(engine.stream(tiny.prompts[3], P40))
    output = progress[-1].output
    assert all(p.output is None for p in progress[:-1])
    assert [t for p in progress for t in p.token_ids] == output.token_ids == greedy(tiny, 3)
    assert all(len(p.token_ids) == len(p.origins) for p in progress)
    assert "".join(p.text for p in progress) == output.text
    assert output.text == tiny.tokenizer.decode(output.token_ids, skip_special_tokens=True)
    assert len(progress) < len(output.token_ids) / 2


# --- errors of one request ---------------------------------------------------------------------------------------------


def test_good_and_bad_prompts_together(tiny: Any) -> None:
    engine = tiny.engine("suffix", context_length=64)
    long = families.prompts(tiny.model.config.vocab_size, 1, [64])[0]
    prompts: list[Any] = [tiny.prompts[0], [], tiny.prompts[1], long, [0, 10**6], 5, None, {"role": "user"}, b"x", ""]
    outputs = engine.generate(prompts, P40, errors="return")
    assert [output.prompt_index for output in outputs] == list(range(10))
    assert [output.token_ids for output in outputs[:3:2]] == [greedy(tiny, 0), greedy(tiny, 1)]
    for index in (1, 3, 4, 5, 6, 7, 8, 9):
        assert outputs[index].finish_reason == "error"
        assert isinstance(outputs[index].error, PromptError), (index, outputs[index].error)
    with pytest.raises(PromptError, match="empty") as caught:
        engine.generate(prompts, P40)
    assert [o.token_ids for o in caught.value.outputs] == [o.token_ids for o in outputs]
    assert_idle(engine)


def test_as_many_params_as_prompts(tiny: Any) -> None:
    engine = tiny.engine()
    with pytest.raises(ConfigError, match="one SamplingParams for each of 2 prompts, found 3"):
        engine.generate(tiny.prompts[:2], [P40] * 3)
    for wrong in ("max_tokens", {"max_tokens": 3}, [P40, None]):
        with pytest.raises(ConfigError, match="must be SamplingParams"):
            engine.generate(tiny.prompts[:2], wrong)
    assert engine.generate([], P40) == []
    with pytest.raises(ConfigError, match="n must be at most max_batch_size"):
        engine.submit(tiny.prompts[0], SamplingParams(n=33))
    with pytest.raises(ConfigError, match="logit_bias"):
        engine.submit(tiny.prompts[0], SamplingParams(logit_bias={4000: 1.0}))
    assert_idle(engine)


def test_nan_for_one_request_leaves_the_others_alone(tiny: Any) -> None:
    poison = 7
    assert not any(poison in [*p, *greedy(tiny, i)] for i, p in enumerate(tiny.prompts[:4]))
    oracle = tiny.oracle()
    model = copy.deepcopy(tiny.model)
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = math.nan
    engine = Engine(model, drafter=oracle, guard=False, debug=True, kv_tokens=1024)
    bad = [*tiny.prompts[4][:-1], poison]
    outputs = engine.generate([tiny.prompts[0], bad, *tiny.prompts[1:4]], P40, errors="return")
    assert isinstance(outputs[1].error, NonFiniteLogitsError)
    assert (outputs[1].finish_reason, outputs[1].token_ids) == ("error", [])
    assert [o.token_ids for o in outputs if o.error is None] == [greedy(tiny, i) for i in range(4)]
    with pytest.raises(NonFiniteLogitsError, match="NaN"):
        list(engine.stream(bad, SamplingParams(max_tokens=3, n=2, temperature=1.0)))
    assert_idle(engine)
    # The rows that held NaN are used again.
    assert [o.token_ids for o in engine.generate(tiny.prompts[:4], P40)] == [greedy(tiny, i) for i in range(4)]


def test_a_drafted_token_with_nan_never_harms(tiny: Any) -> None:
    """A wrong draft's keys and values are NaN, which spoils its whole tree; plain decoding would not have met it."""
    model = copy.deepcopy(tiny.model)
    used = {t for i in range(4) for t in [*tiny.prompts[i], *greedy(tiny, i)]}
    engine = Engine(model, drafter=tiny.oracle(accept=0.5), guard=False, debug=True, kv_tokens=1024)
    poison = sorted(set(range(model.config.vocab_size)) - used)[::8]
    assert len(poison) > 5
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = math.nan
    outputs = engine.generate(tiny.prompts[:4], P40)
    assert [o.token_ids for o in outputs] == [greedy(tiny, i) for i in range(4)]
    assert total_figures(outputs).verified_nodes > total_figures(outputs).accepted_nodes


def test_a_prompt_that_can_never_fit(tiny: Any) -> None:
    engine = tiny.engine(kv_tokens=33)
    with pytest.raises(ArenaFullError, match="34 rows") as caught:
        engine.submit(tiny.prompts[4])
    assert (caught.value.needed, caught.value.capacity) == (34, 33)
    outputs = engine.generate(tiny.prompts, SamplingParams(max_tokens=4), errors="return")
    assert [type(o.error).__name__ for o in outputs] == ["NoneType"] * 4 + ["ArenaFullError"]
    assert_idle(engine)


def test_a_request_that_outgrows_the_arena_alone(tiny: Any) -> None:
    engine = tiny.engine(tiny.oracle(), kv_tokens=50)
    grown, small = engine.generate(
        [tiny.prompts[4], tiny.prompts[0]],
        [SamplingParams(max_tokens=40), SamplingParams(max_tokens=8)],
        errors="return",
    )
    assert isinstance(grown.error, ArenaFullError)
    assert grown.finish_reason == "error"
    assert grown.token_ids == greedy(tiny, 4)[: len(grown.token_ids)]
    assert len(grown.token_ids) == 50 - 33 + 1  # every row is used; the last token needs none yet
    assert small.token_ids == greedy(tiny, 0)[:8]
    assert_idle(engine)


class _Bad:
    """A constraint that goes wrong at the given output position."""

    def __init__(self, vocab_size: int, what: str, at: int) -> None:
        self.vocab_size, self.what, self.at = vocab_size, what, at

    def start(self) -> int:
        return 0

    def allowed(self, state: int) -> np.ndarray:
        if state == self.at and self.what == "raise":
            raise RuntimeError("no idea")
        if state == self.at and self.what == "shape":
            return np.ones(3, np.bool_)
        return np.full(self.vocab_size, not (state == self.at and self.what == "nothing"))

    def advance(self, state: int, token: int) -> int:
        return state + 1


@pytest.mark.parametrize("what", ["raise", "shape", "nothing"])
@pytest.mark.parametrize("at", [0, 5])
def test_constraint_errors_end_one_request(tiny: Any, what: str, at: int) -> None:
    engine = tiny.engine(tiny.oracle())
    bad = SamplingParams(max_tokens=40, constraint=_Bad(tiny.model.config.vocab_size, what, at))
    outputs = engine.generate(tiny.prompts[:3], [P40, bad, P40], errors="return")
    assert isinstance(outputs[1].error, ConstraintError)
    assert outputs[1].token_ids == greedy(tiny, 1)[:at]
    assert [outputs[0].token_ids, outputs[2].token_ids] == [greedy(tiny, 0), greedy(tiny, 2)]
    assert_idle(engine)


# --- forks -----------------------------------------------------------------------------------------------------------


def test_forks_share_nothing_that_grows(tiny: Any) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, logprobs=1, stop=("never here",))
    engine = tiny.engine("suffix")
    first = engine.submit(tiny.prompts[3], params, stream=True)
    before = [p for _ in range(6) for p in engine.step()]
    twin = engine.fork(first)
    later = engine.fork(first, seed=99)
    with pytest.raises(LifecycleError, match="is in use"):
        engine.fork(first, new_request_id=twin)
    with pytest.raises(ConfigError, match="seed must be at least 0"):
        engine.fork(first, seed=-1)
    outputs = run_to_end(engine)
    assert outputs[first, 0].token_ids == tiny.plain(tiny.prompts[3], params).token_ids
    tokens = [t for p in before for t in p.token_ids]
    for name, seed in ((first, 3), (twin, 4), (later, 99)):
        output = outputs[name, 0]
        assert output.seed == seed
        assert output.token_ids[: len(tokens)] == tokens
        assert len(output.token_ids) == 40
        assert [entry.token for entry in output.logprobs] == output.token_ids
        assert output.text == tiny.tokenizer.decode(output.token_ids, skip_special_tokens=True)
        assert output.figures.tokens == 39
    assert len({tuple(o.token_ids) for o in outputs.values()}) == 3
    assert_idle(engine)


def test_a_waiting_request_can_be_forked_and_several_samples_cannot(tiny: Any) -> None:
    engine = tiny.engine("suffix", max_batch_size=2)
    engine.submit(tiny.prompts[0], P40)
    name = engine.submit(tiny.prompts[1], SamplingParams(max_tokens=5, n=2, temperature=1.0, seed=1))
    with pytest.raises(LifecycleError, match="several samples"):
        engine.fork(name)
    waiting = engine.submit(tiny.prompts[2], SamplingParams(max_tokens=20, temperature=1.0, seed=8))
    twin = engine.fork(waiting, seed=8)
    outputs = run_to_end(engine)
    assert outputs[waiting, 0].token_ids == outputs[twin, 0].token_ids
    assert len(outputs) == 5
    assert_idle(engine)
