"""Several consumers of one engine: each gets its own progress, all of it, and nobody else's."""

from __future__ import annotations

from typing import Any

import pytest

import outpace
from outpace import Drafter, SamplingParams
from outpace.draft import NoneDrafter
from outpace.errors import ConfigError, DrafterError, ModelError, UnknownNameError
from outpace.tree import Verdicts

TEN = SamplingParams(max_tokens=10)


def tokens_of(progresses: list[Any]) -> list[int]:
    return [token for progress in progresses for token in progress.token_ids]


def test_streams_that_are_read_in_turn_get_their_own_tokens(tiny: Any) -> None:
    engine = tiny.engine(tiny.oracle())
    streams = [engine.stream(prompt, TEN) for prompt in tiny.prompts[:3]]
    found: list[list[Any]] = [[] for _ in streams]
    live = set(range(3))
    while live:
        for index in sorted(live):
            progress = next(streams[index], None)
            if progress is None:
                live.discard(index)
            else:
                found[index].append(progress)
    for prompt, own in zip(tiny.prompts, found, strict=False):
        assert tokens_of(own) == tiny.plain(prompt, TEN).token_ids
        assert own[-1].output is not None
        assert own[-1].output.token_ids == tokens_of(own)
    assert not engine.has_work


def test_leaving_a_stream_loses_nothing_of_others(tiny: Any) -> None:
    engine = tiny.engine("none")
    stream = engine.stream(tiny.prompts[0], TEN)
    next(stream)
    engine.submit(tiny.prompts[1], SamplingParams(max_tokens=1), request_id="short")
    next(stream)
    stream.close()
    [progress] = engine.step()
    assert (progress.request_id, progress.output.finish_reason) == ("short", "length")
    assert not engine.has_work


def test_what_is_refused_is_refused_before_the_stream_is_read(tiny: Any) -> None:
    with pytest.raises(ValueError, match="empty"):
        tiny.engine("none").stream([], TEN)


class Failing(NoneDrafter):
    """Raises when it is told of the third verdict."""

    seen = 0

    def observe(self, keys: Any, verdicts: Verdicts, signals: Any = None) -> None:
        self.seen += 1
        if self.seen == 3:
            raise RuntimeError("a drafter's mistake")


def test_what_was_committed_is_delivered_though_the_drafter_fails(tiny: Any) -> None:
    expected = tiny.plain(tiny.prompts[0], TEN).token_ids
    drafter: Drafter = Failing()
    engine = tiny.engine(drafter)
    engine.submit(tiny.prompts[0], SamplingParams(max_tokens=10, stop_token_ids=(expected[2],)), request_id="stops")
    engine.submit(tiny.prompts[0], TEN, request_id="goes on")
    delivered = [*engine.step(), *engine.step()]
    with pytest.raises(DrafterError, match=r"drafter 'none': observe raised RuntimeError: a drafter's mistake"):
        engine.step()
    while engine.has_work:
        delivered += engine.step()
    for request_id, wanted in (("stops", expected[:3]), ("goes on", expected)):
        own = [progress for progress in delivered if progress.request_id == request_id]
        assert tokens_of(own) == wanted
        assert own[-1].output.token_ids == wanted


def test_a_pass_that_fails_late_keeps_what_had_finished(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny.engine("none", max_batch_size=1)
    run = type(engine.target).run
    passes = 0

    def fail_later(*args: Any, **kwargs: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes == 14:
            raise RuntimeError("device lost")
        return run(*args, **kwargs)

    monkeypatch.setattr(type(engine.target), "run", fail_later)
    outputs = engine.generate(tiny.prompts[:2], TEN, errors="return")
    assert outputs[0].token_ids == tiny.plain(tiny.prompts[0], TEN).token_ids
    assert outputs[1].finish_reason == "error"
    assert isinstance(outputs[1].error, ModelError)
    assert 0 < len(outputs[1].token_ids) < 10
    assert not engine.has_work
    engine.arena.check()


class Boom(NoneDrafter):
    def propose(self, keys: Any, caps: Any) -> Any:
        raise ValueError("boom")


class Nothing(NoneDrafter):
    def propose(self, keys: Any, caps: Any) -> Any:
        return None


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (Boom(), "drafter 'none': propose raised ValueError: boom"),
        (Nothing(), "must return DraftTrees, found NoneType"),
    ],
)
def test_a_drafter_that_goes_wrong_is_named_and_what_there_is_is_kept(tiny: Any, drafter: Any, message: str) -> None:
    outputs = tiny.engine(drafter).generate(tiny.prompts[:2], TEN, errors="return")
    for output, prompt in zip(outputs, tiny.prompts, strict=False):
        assert output.finish_reason == "error"
        assert message in str(output.error)
        assert output.token_ids == tiny.plain(prompt, TEN).token_ids[: len(output.token_ids)]
        assert len(output.token_ids) >= 1


def test_arguments_of_a_wrong_kind(tiny: Any) -> None:
    with pytest.raises(ConfigError, match="an instance of Drafter, found int"):
        tiny.engine(5)
    with pytest.raises(ConfigError, match="an instance of Drafter, found Boom"):
        tiny.engine(Boom)
    with pytest.raises(ConfigError, match="model must be a folder, a hub id or a loaded model, found int"):
        outpace.Engine(5)
    with pytest.raises(UnknownNameError, match="unknown value of errors 'ignore'"):
        tiny.engine("none").generate(tiny.prompts[0], TEN, errors="ignore")
