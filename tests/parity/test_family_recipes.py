"""The recipes in `families` do what the parity tests rely on."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from families import FAMILIES, NEW_TOKENS, PROMPT_LENGTHS, REFUSED, VOCAB, build, distinct_ngrams, prompts

MIN_DISTINCT = 0.5
MIN_LEAD = 2e-4  # of the best logit over the second
MAX_NOISE = 5e-5  # a quarter of it, so that no difference in the parity tests can be a tie


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def test_greedy_output_does_not_loop(family, reference):
    _, texts, continuations = reference(family)
    assert [len(text) for text in texts] == list(PROMPT_LENGTHS)
    for continuation in continuations:
        assert len(continuation) == NEW_TOKENS
        assert distinct_ngrams(continuation, n=4) >= MIN_DISTINCT


@torch.no_grad()
def test_greedy_tokens_lead_by_more_than_the_noise(family, reference):
    model, texts, continuations = reference(family)
    whole = texts[-1] + continuations[-1][:-1]
    logits = model(torch.tensor([whole])).logits[0]  # [num_tokens, vocab]
    assert logits.shape == (len(whole), VOCAB)
    # One token at a time, starting within the continuation: past the switch of longrope, where a cache stays valid.
    start = len(texts[-1]) + 8
    cache = DynamicCache(config=model.config)
    model(torch.tensor([whole[:start]]), past_key_values=cache)
    stepwise = torch.cat([model(torch.tensor([[token]]), past_key_values=cache).logits[0] for token in whole[start:]])
    torch.testing.assert_close(stepwise, logits[start:], atol=MAX_NOISE, rtol=0)

    best = logits[start:].topk(2)
    assert best.indices[:, 0].tolist() == continuations[-1][9:]
    assert (best.values[:, 0] - best.values[:, 1]).min() > MIN_LEAD


@torch.no_grad()
def test_order_and_distant_tokens_matter(family, reference):
    model, texts, _ = reference(family)
    text = texts[-1]
    last = model(torch.tensor([text])).logits[0, -1]
    swapped = [*text[:-9], text[-4], *text[-8:-4], text[-9], *text[-3:]]
    assert sorted(swapped) == sorted(text)
    distant = [*text[:20], text[20] % (VOCAB - 1) + 1, *text[21:]]  # beyond the window: reached through the layers
    for changed in (swapped, distant):
        assert (model(torch.tensor([changed])).logits[0, -1] - last).abs().max() > 0.05


def test_the_same_name_gives_the_same_weights_and_leaves_the_global_generator():
    torch.manual_seed(1)
    first = build("llama")
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second = build("llama")
    assert torch.equal(torch.get_rng_state(), before)
    assert first.dtype == torch.float32
    assert not first.training
    for (name, left), (_, right) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(left, right), name


@pytest.mark.parametrize("name", REFUSED)
def test_models_to_refuse_can_be_built(name):
    model = REFUSED[name]()
    assert not model.training
    assert model.config.is_encoder_decoder == (name in {"t5", "bart"})


def test_prompts_hold_no_padding_and_follow_the_seed():
    texts = prompts(VOCAB, seed=3, lengths=(1, 7))
    assert [len(text) for text in texts] == [1, 7]
    assert texts == prompts(VOCAB, seed=3, lengths=(1, 7))
    assert texts != prompts(VOCAB, seed=4, lengths=(1, 7))
    assert 0 not in {token for text in prompts(4, seed=0, lengths=(200,)) for token in text}


def test_distinct_ngrams():
    assert distinct_ngrams([1, 2, 1, 2, 1], n=2) == 0.5
    assert distinct_ngrams([1, 2, 3, 4], n=4) == 1.0
    with pytest.raises(ValueError, match="3 tokens hold no 4-gram"):
        distinct_ngrams([1, 2, 3])
