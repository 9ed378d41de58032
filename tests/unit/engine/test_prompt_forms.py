"""Prompts in every form that a caller may give, and the ones that are none."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from engine_support import assert_idle
from outpace.config import SamplingParams
from outpace.engine import Engine
from outpace.errors import ConfigError, PromptError, UnknownNameError

P3 = SamplingParams(max_tokens=3)
TEXT = "Every morning the keeper"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many ships?"}]


def prompts_of(engine: Engine, prompts: Any) -> list[list[int]]:
    return [output.prompt_token_ids for output in engine.generate(prompts, P3)]


def test_one_prompt_in_every_form(tiny: Any) -> None:
    engine = tiny.engine()
    ids = tiny.tokenizer(TEXT)["input_ids"]
    chat = tiny.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    forms = [
        TEXT,
        ids,
        tuple(ids),
        np.array(ids),
        np.array(ids, np.uint16),
        torch.tensor(ids),
        [np.int64(i) for i in ids],
    ]
    for form in forms:
        assert prompts_of(engine, form) == [ids], form
    assert prompts_of(engine, CHAT) == prompts_of(engine, tuple(CHAT)) == [chat]
    assert chat[-2:] == tiny.tokenizer("<|assistant|>\n")["input_ids"][-2:]


def test_several_prompts_in_every_form(tiny: Any) -> None:
    engine = tiny.engine()
    ids = tiny.tokenizer(TEXT)["input_ids"]
    chat = tiny.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert prompts_of(engine, [TEXT, CHAT, ids, torch.tensor(ids), np.array(ids)]) == [ids, chat, ids, ids, ids]
    assert prompts_of(engine, (TEXT, TEXT)) == [ids, ids]
    assert prompts_of(engine, torch.tensor([ids, ids])) == prompts_of(engine, np.array([ids, ids])) == [ids, ids]
    assert prompts_of(engine, [ids[:2], ids[:3]]) == [ids[:2], ids[:3]]
    assert engine.generate([]) == []


def test_every_prompt_has_its_own_parameters(tiny: Any) -> None:
    outputs = tiny.engine().generate(tiny.prompts, [SamplingParams(max_tokens=n) for n in range(1, 6)])
    assert [len(output.token_ids) for output in outputs] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ("", "empty"),
        (np.empty(0, np.int64), "empty"),
        ([0.5, 1.5], "flat list of token ids, found list"),
        (["a", "b"], "flat list of token ids"),
        ([[1, 2], [3, 4]], "flat list of token ids"),
        ([[1, 2], [3]], "flat list of token ids"),
        ([True, False], "dtype bool"),
        (torch.tensor([[1, 2]]), r"shape \[1, 2\]"),
        (torch.tensor(3), "flat list of token ids"),
        ([-1, 3], "from 0 to .*, found -1 to 3"),
        ([3, 10**5], "from 0 to .*, found 3 to 100000"),
        ([2**70], "flat list of token ids"),
        (7, "found int"),
        (None, "found NoneType"),
        (b"bytes", "found bytes"),
        ({"role": "user", "content": "x"}, "found dict"),
        ("a \udcff b", r"character 2 is '\\udcff'"),
        ([{"role": "user", "content": "\ud800"}], "chat template refused"),
        ([{"content": "x"}], "message 0 must be a mapping with 'role'"),
        ([{"role": "user", "content": "x"}, "y"], "message 1"),
    ],
)
def test_what_is_no_prompt(tiny: Any, prompt: Any, message: str) -> None:
    engine = tiny.engine()
    with pytest.raises(PromptError, match=message):
        engine.submit(prompt)
    [good, output] = engine.generate([[1, 2], prompt], P3, errors="return")
    assert isinstance(output.error, PromptError)
    assert len(good.token_ids) == 3
    assert_idle(engine)


def test_text_without_a_tokenizer(tiny: Any) -> None:
    engine = Engine(tiny.model, drafter="none", kv_tokens=128)
    for prompt in (TEXT, CHAT):
        with pytest.raises(ConfigError, match="needs a tokenizer"):
            engine.submit(prompt)
    with pytest.raises(ConfigError, match="stop strings need a tokenizer"):
        engine.submit([1], SamplingParams(stop="x"))
    [output] = engine.generate([1, 2], P3)
    assert output.text == ""
    assert len(output.token_ids) == 3


def test_chat_without_a_template(tiny: Any) -> None:
    bare = copy.deepcopy(tiny.tokenizer)
    bare.chat_template = None
    engine = Engine(tiny.model, bare, drafter="none", kv_tokens=128)
    with pytest.raises(ConfigError, match="no chat template"):
        engine.submit(CHAT)


def test_unknown_options(tiny: Any) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'max_batch_size'"):
        Engine(tiny.model, max_batchsize=3)
    with pytest.raises(UnknownNameError, match="did you mean 'suffix'"):
        Engine(tiny.model, drafter="sufix")
    with pytest.raises(ConfigError, match="already loaded"):
        Engine(tiny.model, dtype="float32")
    with pytest.raises(ConfigError, match="known before"):
        Engine(tiny.model, drafter="oracle(.3)")
