"""``torch.compile`` as an option: the same tokens, and out of the way where it fails."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from families import build
from outpace import Engine, SamplingParams

PROMPT = [5, 6, 7, 8]
PARAMS = SamplingParams(max_tokens=8)


@pytest.fixture
def plain_tokens() -> list[int]:
    return Engine(build("llama"), drafter="none").generate([PROMPT], PARAMS)[0].token_ids


def test_a_compiler_that_fails_is_given_up(
    plain_tokens: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_model: torch.nn.Module, **_options: Any) -> Any:
        def call(**_inputs: Any) -> Any:
            raise RuntimeError("no C++ compiler found")

        return call

    monkeypatch.setattr(torch, "compile", fails)
    with caplog.at_level(logging.WARNING):
        engine = Engine(build("llama"), drafter="none", compile=True)
    assert "no C++ compiler found" in caplog.text
    assert engine.target.compiled is not None
    assert not engine.target.compiled.works
    assert engine.generate([PROMPT], PARAMS)[0].token_ids == plain_tokens


def test_wrong_logits_are_given_up(plain_tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: torch.nn.Module, **_options: Any) -> Any:
        def call(**inputs: Any) -> Any:
            output = model(**inputs)
            output.logits = output.logits + torch.linspace(0, 50, output.logits.shape[-1])
            return output

        return call

    monkeypatch.setattr(torch, "compile", wrong)
    engine = Engine(build("llama"), drafter="none", compile=True)
    assert engine.target.compiled is not None
    assert not engine.target.compiled.works
    assert engine.generate([PROMPT], PARAMS)[0].token_ids == plain_tokens


def test_compiled_by_dynamo_gives_the_same_tokens(plain_tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    compile_model = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **options: compile_model(model, backend="eager", **options))
    engine = Engine(build("llama"), drafter="suffix", compile=True)
    assert engine.target.compiled is not None
    assert engine.target.compiled.works
    assert engine.generate([PROMPT], PARAMS)[0].token_ids == plain_tokens
