from __future__ import annotations

import math

import numpy as np
import pytest

from outpace.config import EngineConfig, SamplingParams, from_mapping
from outpace.errors import ArenaFullError, ConfigError, OutpaceError, TraceFormatError, UnknownNameError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", math.inf),
        ("seed", -1),
        ("seed", 2**63),
        ("n", 0),
        ("logprobs", -1),
        ("stop", ("",)),
        ("stop_token_ids", 5),
        ("stop_token_ids", ("a",)),
        ("stop", (1,)),
        ("logit_bias", {3: math.inf}),
        ("logit_bias", {-3: 1.0}),
        ("constraint", object()),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{field: value})
    assert field in str(caught.value)
    assert repr(value) in str(caught.value) or field in ("logit_bias", "stop", "stop_token_ids", "constraint")


def test_a_bound_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^max_tokens must be an integer at least 1 or None, found 0$"):
        SamplingParams(max_tokens=0)


def test_forms_that_are_accepted() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(max_tokens=None, seed=np.int64(3), top_k=np.int32(2)).top_k == 2
    assert SamplingParams(logit_bias={3: -math.inf}).logit_bias == {3: -math.inf}


@pytest.mark.parametrize(
    ("changes", "greedy", "plain"),
    [
        ({}, True, True),
        ({"temperature": 0.5}, False, False),
        ({"repetition_penalty": 1.1}, True, False),
        ({"presence_penalty": 0.1}, True, False),
        ({"frequency_penalty": 0.1}, True, False),
        ({"logit_bias": {1: 1.0}}, True, False),
    ],
)
def test_what_is_plain_greedy(changes: dict[str, object], greedy: bool, plain: bool) -> None:
    params = SamplingParams(**changes)
    assert (params.greedy, params.plain_greedy) == (greedy, plain)


def test_unknown_names_are_refused_with_close_ones() -> None:
    with pytest.raises(
        UnknownNameError, match=r"unknown parameter of SamplingParams 'temprature'; did you mean 'temperature'"
    ):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]
    assert SamplingParams(5, 0.5) == SamplingParams(max_tokens=5, temperature=0.5)
    with pytest.raises(UnknownNameError, match=r"unknown option 'temprature'; did you mean 'temperature'\?.*top_p"):
        from_mapping(SamplingParams, {"temprature": 1.0}, "option")
    assert from_mapping(EngineConfig, {"max_nodes": 3}, "option").max_nodes == 3


@pytest.mark.parametrize("field", ["max_batch_size", "max_step_tokens", "kv_tokens"])
def test_an_engine_cannot_be_without(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        EngineConfig(**{field: 0})


def test_every_error_has_one_root_and_says_what_it_carries() -> None:
    full = ArenaFullError(10, 4, 100, 2**20, "Shorten the prompt.")
    assert isinstance(full, OutpaceError)
    assert isinstance(full, MemoryError)
    assert "10 rows (10.0 MiB) needed, 4 of 100 free (100.0 MiB in all" in str(full)
    assert str(full).endswith("Shorten the prompt.")
    assert str(TraceFormatError("a.jsonl", 7, "expected X")) == "a.jsonl:7: expected X"
    assert isinstance(UnknownNameError("drafter", "sufix", ["suffix"]), ValueError)
