import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from outpace.config import SamplingParams
from outpace.errors import ConfigError, ConstraintError
from outpace.verify import LogitsPipeline
from outpace.verify.processors import History

VOCAB = 40


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )


def history(prompt, output=()):
    found = History(np.array(prompt))
    for token in output:
        found.push(token)
    return found


def random_logits(seed):
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@settings(max_examples=150, deadline=None)
@given(
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 7, 100]),
    top_p=st.sampled_from([1.0, 0.95, 0.3]),
    min_p=st.sampled_from([0.0, 0.05, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.2, 0.8]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), max_size=3),
    prefix=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
    num_prompt=st.integers(1, 30),
    seed=st.integers(0, 10**6),
)
def test_equal_to_what_transformers_builds(
    model, temperature, top_k, top_p, min_p, repetition_penalty, logit_bias, prefix, num_prompt, seed
):
    config = GenerationConfig(
        do_sample=temperature > 0,
        repetition_penalty=repetition_penalty,
        sequence_bias={(token,): bias for token, bias in logit_bias.items()} or None,
        **({"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p} if temperature else {}),
    )
    theirs = model._get_logits_processor(config, input_ids_seq_length=len(prefix))
    expected = theirs(torch.tensor([prefix]), random_logits(seed)[None])[0]

    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        logit_bias=logit_bias,
    )
    past = history(prefix[:num_prompt], prefix[num_prompt:])
    assert torch.equal(LogitsPipeline(params, VOCAB).process(random_logits(seed), past), expected)


def test_presence_and_frequency_count_the_output_alone():
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    scores = LogitsPipeline(params, VOCAB).process(torch.zeros(VOCAB), history([1, 2, 2], [2, 3, 3, 3]))
    expected = torch.zeros(VOCAB)
    expected[2], expected[3] = -0.75, -1.25
    assert torch.equal(scores, expected)


def test_the_order_is_bias_repetition_presence_constraint_temperature():
    params = SamplingParams(
        temperature=0.5, repetition_penalty=2.0, presence_penalty=0.25, logit_bias={0: 3.0, 1: math.inf * -1}
    )
    logits = torch.tensor([1.0, 9.0, 4.0, 8.0])
    allowed = np.array([True, True, True, False])
    scores = LogitsPipeline(params, 4).process(logits, history([0], [0]), allowed)
    # (1 + 3) / 2 - 0.25 = 1.75, then divided by the temperature.
    assert scores.tolist() == [3.5, -math.inf, 8.0, -math.inf]


def test_the_constraint_comes_before_top_k():
    """Top-k takes the best of the allowed tokens; taken first, it could leave none."""
    params = SamplingParams(temperature=1.0, top_k=1)
    scores = LogitsPipeline(params, 3).process(torch.tensor([3.0, 2.0, 1.0]), None, np.array([False, True, True]))
    assert scores.tolist() == [-math.inf, 2.0, -math.inf]


def test_greedy_needs_no_warpers():
    params = SamplingParams(temperature=0.0, top_k=1, top_p=0.1, min_p=0.9)
    assert LogitsPipeline(params, VOCAB).process(random_logits(0)).isfinite().all()


def test_prompt_tokens_beyond_the_vocabulary_are_ignored():
    """Some embeddings are wider than the head, and image placeholders lie beyond both."""
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0)
    scores = LogitsPipeline(params, 3).process(torch.ones(3), history([1, 7], [2, 9]))
    assert scores.tolist() == [1.0, 0.5, -0.5]


def test_a_bias_beyond_the_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="below the vocabulary size 40, found 40"):
        LogitsPipeline(SamplingParams(logit_bias={3: 1.0, 77: 1.0, 40: 1.0}), VOCAB)


def test_a_mask_of_the_wrong_length_names_both_numbers():
    with pytest.raises(ConstraintError, match=r"bool\[40\].*bool\[39\]"):
        LogitsPipeline(SamplingParams(), VOCAB).process(random_logits(0), None, np.ones(39, np.bool_))
    with pytest.raises(ConstraintError, match=r"bool\[40\].*int64\[40\]"):
        LogitsPipeline(SamplingParams(), VOCAB).process(random_logits(0), None, np.ones(40, np.int64))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_left_is_an_error(temperature):
    pipeline = LogitsPipeline(SamplingParams(temperature=temperature, logit_bias={2: -math.inf}), 4)
    with pytest.raises(ConstraintError, match="all 4 tokens"):
        pipeline.process(torch.zeros(4), None, np.array([False, False, True, False]))
    banned = SamplingParams(temperature=temperature, logit_bias=dict.fromkeys(range(4), -math.inf))
    with pytest.raises(ConstraintError):
        LogitsPipeline(banned, 4).process(torch.zeros(4))


@pytest.mark.parametrize("temperature", [1e-320, 1e-50, 1e-8, 1e-4])
def test_a_tiny_temperature_is_greedy_and_not_nan(temperature):
    params = SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1)
    scores = LogitsPipeline(params, 3).process(torch.tensor([5.0, 90.0, -90.0]))
    assert scores.tolist() == [-math.inf, 0.0, -math.inf]


@pytest.mark.parametrize(
    "extreme",
    [
        {"logit_bias": {0: 1e300}},
        {"logit_bias": {0: -1e300}},
        {"presence_penalty": 1e300, "frequency_penalty": -1e300},
        {"presence_penalty": -1e300, "frequency_penalty": -1e300},
        {"repetition_penalty": 1e300},
        {"repetition_penalty": 1e-300},
    ],
)
def test_extreme_parameters_leave_no_nan(extreme):
    params = SamplingParams(temperature=0.7, top_p=0.9, **extreme)
    scores = LogitsPipeline(params, 3).process(torch.tensor([5.0, -4.0, 0.0]), history([0, 1], [0, 1, 1]))
    assert not scores.isnan().any()
    assert scores.max().isfinite()


def test_history_takes_back_what_was_pushed():
    past = history(range(60), [5, 99])
    before = dict(zip(past.tokens.tolist(), past.output_counts.tolist(), strict=True))
    pushed = [5, 200, 200, *range(1000, 1200), 7]
    steps = [(token, past.push(token)) for token in pushed]
    assert [new for _, new in steps[:3]] == [False, True, False]
    counts = dict(zip(past.tokens.tolist(), past.output_counts.tolist(), strict=True))
    assert (counts[5], counts[200], counts[7], counts[1100], counts[8]) == (2, 2, 1, 1, 0)
    for token, new in reversed(steps):
        past.pop(token, new)
    assert dict(zip(past.tokens.tolist(), past.output_counts.tolist(), strict=True)) == before


def test_a_copied_history_is_independent():
    past = history([1], [2])
    twin = past.copy()
    twin.push(3)
    twin.push(2)
    assert past.tokens.tolist() == [1, 2]
    assert past.output_counts.tolist() == [0, 1]
