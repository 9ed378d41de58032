"""Streamers, stopping criteria and errors of the Transformers hook."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import transformers as hf

import checkpoints
import families
import outpace
from hooked import LENGTHS, assert_same, batch, both, oracle_of

NEW = 30


@pytest.fixture(scope="module")
def model() -> hf.PreTrainedModel:
    return families.build("llama")


@pytest.fixture(scope="module")
def tokenizer() -> hf.PreTrainedTokenizerFast:
    return checkpoints.train_tokenizer()


class Recorder(hf.generation.streamers.BaseStreamer):
    """Remembers what it is given."""

    def __init__(self) -> None:
        self.puts: list[Any] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        assert not self.ends
        self.puts.append(value.tolist())

    def end(self) -> None:
        self.ends += 1


def _hooked(model: hf.PreTrainedModel, inputs: dict[str, torch.Tensor], **arguments: Any) -> Any:
    plain = model.generate(**inputs, max_new_tokens=NEW)
    arguments = {"max_new_tokens": NEW, "drafter": oracle_of(inputs, plain), "guard": False, **arguments}
    return model.generate(**inputs, custom_generate=outpace.generate, **arguments)


@pytest.mark.parametrize("lengths", [[9], LENGTHS])
def test_a_streamer_gets_what_generate_gives_it(model: hf.PreTrainedModel, lengths: list[int]) -> None:
    inputs, mine, theirs = batch(lengths), Recorder(), Recorder()
    plain = model.generate(**inputs, max_new_tokens=NEW)
    eos = [int(row[-12 - 3 * i]) for i, row in enumerate(plain)]
    ends = {"eos_token_id": eos, "pad_token_id": 0, "max_new_tokens": NEW}
    expected = model.generate(**inputs, **ends, streamer=theirs)
    found = _hooked(model, inputs, **ends, streamer=mine)
    assert found.tolist() == expected.tolist()
    assert found.shape[1] < plain.shape[1]
    assert mine.puts == theirs.puts
    assert mine.ends == theirs.ends == 1


def test_text_streamers(
    model: hf.PreTrainedModel, tokenizer: hf.PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = batch([9])
    model.generate(**inputs, max_new_tokens=NEW, streamer=hf.TextStreamer(tokenizer, skip_prompt=True))
    expected = capsys.readouterr().out
    _hooked(model, inputs, streamer=hf.TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out == expected
    outpace.generate(model, **inputs, max_new_tokens=NEW, streamer=hf.TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out == expected
    with pytest.raises(ValueError, match="only supports batch size 1"):
        _hooked(model, batch(), streamer=hf.TextStreamer(tokenizer))


def test_an_iterator_in_another_thread_comes_to_its_end(
    model: hf.PreTrainedModel, tokenizer: hf.PreTrainedTokenizerFast
) -> None:
    streamer = hf.TextIteratorStreamer(tokenizer, timeout=60)
    arguments = {"max_new_tokens": NEW, "streamer": streamer, "custom_generate": outpace.generate}
    thread = threading.Thread(target=model.generate, kwargs={**batch([9]), **arguments})
    thread.start()
    text = "".join(streamer)
    thread.join()
    expected = model.generate(**batch([9]), max_new_tokens=NEW)
    assert text == tokenizer.decode(expected[0])


class Watch(hf.StoppingCriteria):
    """Stops a row at a length of its own, and remembers what it was asked."""

    def __init__(self, *stops: int) -> None:
        self.stops = torch.tensor(stops)
        self.seen: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        assert input_ids.is_contiguous()
        self.seen.append((input_ids.tolist(), None if scores is None else [s.shape for s in scores]))
        return input_ids.shape[1] >= self.stops


@pytest.mark.parametrize("eos", [None, 511])
def test_criteria_are_asked_once_a_token_about_the_whole_batch(model: hf.PreTrainedModel, eos: int | None) -> None:
    """Without an end-of-sequence id, rows that have stopped go on until all have."""
    stops = [max(LENGTHS) + n for n in (4, 19, 11)]
    mine, theirs = Watch(*stops), Watch(*stops)
    end = {"eos_token_id": eos, "pad_token_id": 0}
    expected = model.generate(**batch(), max_new_tokens=NEW, stopping_criteria=[theirs], **end)
    found = _hooked(model, batch(), stopping_criteria=[mine], **end)
    assert found.tolist() == expected.tolist()
    assert found.shape[1] == max(LENGTHS) + 19
    assert mine.seen == theirs.seen


def test_criteria_may_look_at_scores(model: hf.PreTrainedModel) -> None:
    class Sure(hf.StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.softmax(scores[-1], -1).amax(-1) > 0.2

    arguments = {"return_dict_in_generate": True, "output_scores": True, "eos_token_id": 511, "pad_token_id": 0}
    plain, found = both(model, batch(), max_new_tokens=NEW, stopping_criteria=[Sure()], **arguments)
    assert found.sequences.tolist() == plain.sequences.tolist()
    assert max(LENGTHS) + 1 < found.sequences.shape[1] < max(LENGTHS) + NEW
    assert len(found.scores) == len(plain.scores)


def test_stop_strings(model: hf.PreTrainedModel, tokenizer: hf.PreTrainedTokenizerFast) -> None:
    inputs = batch([9])
    plain = model.generate(**inputs, max_new_tokens=NEW)
    # Ids beyond the tokenizer's have no text.
    place = next(i for i in range(14, 9 + NEW) if tokenizer.decode(plain[0, i : i + 1]).strip())
    stop = tokenizer.decode(plain[0, place : place + 1])
    ends = {"stop_strings": [stop], "tokenizer": tokenizer, "max_new_tokens": NEW}
    expected = model.generate(**inputs, **ends)
    assert expected.shape[1] < plain.shape[1]
    criteria = hf.StoppingCriteriaList([hf.StopStringCriteria(tokenizer, [stop])])
    assert _hooked(model, inputs, stopping_criteria=criteria).tolist() == expected.tolist()
    assert outpace.generate(model, **inputs, **ends).tolist() == expected.tolist()
    config = hf.GenerationConfig(stop_strings=[stop], max_new_tokens=NEW)
    found = outpace.generate(model, **inputs, tokenizer=tokenizer, generation_config=config)
    assert found.tolist() == expected.tolist()
    assert config.stop_strings == [stop]
    with pytest.raises(outpace.errors.ConfigError, match="pass tokenizer="):
        outpace.generate(model, **inputs, stop_strings=[stop])


def test_time_ends_a_call(model: hf.PreTrainedModel) -> None:
    def slow(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return scores

    found = _hooked(model, batch([9]), max_time=0.1, logits_processor=[slow])
    assert 9 < found.shape[1] < 9 + NEW


def test_the_end_of_the_context_ends_a_row(model: hf.PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    context = families.MAX_POSITIONS
    inputs = batch([context - 3, 9])
    for criteria in ([], [Watch(10_000)]):
        found = model.generate(
            **inputs, max_new_tokens=8, stopping_criteria=criteria, custom_generate=outpace.generate, pad_token_id=0
        )
        assert found.shape == (2, context + 5)
        assert found[0, context:].tolist() == [0] * 5
        assert found[1].tolist() == model.generate(**inputs, max_new_tokens=8)[1].tolist()
    assert "end of the model's context" in caplog.text


def test_errors_of_the_callers_own_code_come_as_they_are(model: hf.PreTrainedModel) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise KeyError("mine")

    for arguments in ({"logits_processor": [fails]}, {"stopping_criteria": [fails]}):
        for inputs in (batch([9]), batch()):
            with pytest.raises(KeyError, match="mine"):
                _hooked(model, inputs, **arguments)
    assert_same(model, batch(), max_new_tokens=NEW)


def test_called_directly(model: hf.PreTrainedModel) -> None:
    expected = model.generate(**batch(), max_new_tokens=NEW).tolist()
    assert outpace.generate(model, **batch(), max_new_tokens=NEW).tolist() == expected
    assert outpace.generate(torch.compile(model), **batch(), max_new_tokens=NEW, drafter="none").tolist() == expected
    compiled = torch.compile(model)
    assert compiled.generate(**batch(), max_new_tokens=NEW, custom_generate=outpace.generate).tolist() == expected
    config = hf.GenerationConfig(max_new_tokens=NEW)
    assert outpace.generate(model, **batch(), generation_config=config).tolist() == expected


def test_a_callback_may_use_the_model_itself(model: hf.PreTrainedModel) -> None:
    class Curious(hf.StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            model(input_ids)
            model.generate(input_ids, max_new_tokens=2, custom_generate=outpace.generate)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    expected = model.generate(**batch([9]), max_new_tokens=6).tolist()
    found = _hooked(model, batch([9]), max_new_tokens=6, stopping_criteria=[Curious()])
    assert found.tolist() == expected
