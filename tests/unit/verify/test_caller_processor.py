"""`SamplingParams.processor`: a caller's own function over the scores of each reached position."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import families
from outpace.config import SamplingParams
from outpace.draft import OracleDrafter
from outpace.engine import Engine
from outpace.errors import ConfigError, ConstraintError

PROMPT = [7, 8, 9, 10]


class Penalty:
    """Lowers the last token's score and raises the first one's: the result depends on the order of the text."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def __call__(self, tokens: Any, scores: torch.Tensor) -> torch.Tensor:
        self.texts.append(tokens.tolist())
        scores[int(tokens[-1])] -= 5.0
        scores[int(tokens[0])] += 1.0
        return scores


def _outputs(model: Any, drafter: Any, temperature: float) -> tuple[list[int], list[list[int]]]:
    processor = Penalty()
    engine = Engine(model, drafter=drafter, guard=False, kv_tokens=512)
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3, processor=processor)
    [output] = engine.generate(PROMPT, params)
    return output.token_ids, processor.texts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_position_is_asked_once_with_its_own_text(temperature: float) -> None:
    model = families.build("llama")
    expected, texts = _outputs(model, "none", temperature)
    assert texts == [[*PROMPT, *expected[:i]] for i in range(40)]
    oracle = OracleDrafter(0.7, {tuple(PROMPT): expected}, vocab_size=families.VOCAB)
    found, texts = _outputs(model, oracle, temperature)
    assert found == expected
    assert texts[:40] == [[*PROMPT, *expected[:i]] for i in range(40)]


def test_it_changes_the_tokens() -> None:
    model = families.build("llama")
    engine = Engine(model, drafter="none", kv_tokens=512)

    def only_five(tokens: Any, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -torch.inf).index_fill(0, torch.tensor([5]), 0.0)

    assert engine.generate(PROMPT, SamplingParams(max_tokens=4, processor=only_five))[0].token_ids == [5] * 4


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda scores: None, "found NoneType"),
        (lambda scores: scores[:3], r"shape \[512\], found \[3\]"),
        (lambda scores: scores * torch.nan, "finite scores or minus infinity, found nan"),
        (lambda scores: torch.full_like(scores, -torch.inf), "excludes all 512 tokens"),
    ],
)
def test_wrong_scores_end_the_request(returned: Any, message: str) -> None:
    engine = Engine(families.build("llama"), drafter="none", kv_tokens=512)
    params = [SamplingParams(max_tokens=4, processor=lambda _, s: returned(s)), SamplingParams(max_tokens=4)]
    bad, good = engine.generate([PROMPT, PROMPT], params, errors="return")
    assert isinstance(bad.error, ConstraintError)
    with pytest.raises(ConstraintError, match=message):
        raise bad.error
    assert good.error is None
    assert len(good.token_ids) == 4


def test_what_it_raises_ends_the_request_with_its_cause() -> None:
    def fails(tokens: Any, scores: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    engine = Engine(families.build("llama"), drafter="none", kv_tokens=512)
    with pytest.raises(ConstraintError, match="raised KeyError") as caught:
        engine.generate(PROMPT, SamplingParams(max_tokens=4, processor=fails))
    assert isinstance(caught.value.__cause__, KeyError)


def test_forks_have_their_own_text() -> None:
    processor = Penalty()
    engine = Engine(families.build("llama"), drafter="none", kv_tokens=512)
    params = SamplingParams(max_tokens=6, n=2, temperature=1.0, seed=1, processor=processor)
    outputs = engine.generate(PROMPT, params)
    for output in outputs:
        for i in range(6):
            assert [*PROMPT, *output.token_ids[:i]] in processor.texts


def test_long_texts_grow() -> None:
    from outpace.verify.processors import Text

    text = Text(np.arange(3))
    for token in range(600):
        text.push(token)
    text.pop(598)
    assert text.tokens.tolist() == [0, 1, 2, 0, 1]
    twin = text.copy()
    twin.push(9)
    text.push(4)
    assert (twin.tokens[-1], text.tokens[-1]) == (9, 4)


def test_it_must_be_callable() -> None:
    with pytest.raises(ConfigError, match="processor must be callable, found int"):
        SamplingParams(processor=3)  # type: ignore[arg-type]
