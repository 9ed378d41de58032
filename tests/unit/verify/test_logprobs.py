import math

import numpy as np
import pytest
import torch

from outpace.config import SamplingParams
from outpace.verify import Chooser, token_logprobs, verify
from verify_support import make_tree

LOGITS = torch.tensor([[0.0, 1.0, 2.0, 1.0], [math.log(1), math.log(2), math.log(3), math.log(4)]])


def test_values_against_probabilities_by_hand():
    [entry] = token_logprobs(LOGITS[1:], [1], 2)
    assert entry.token == 1
    assert entry.logprob == pytest.approx(math.log(0.2), abs=1e-6)
    assert [token for token, _ in entry.top] == [3, 2]
    assert [math.exp(value) for _, value in entry.top] == pytest.approx([0.4, 0.3], abs=1e-6)


def test_equals_are_ordered_by_id_and_cut_at_the_lowest():
    [entry] = token_logprobs(LOGITS[:1], [0], 2)
    assert [token for token, _ in entry.top] == [2, 1]
    equal = torch.zeros(1, 1000)
    assert [token for token, _ in token_logprobs(equal, [5], 3)[0].top] == [0, 1, 2]


def test_zero_alternatives_and_more_than_there_are():
    assert token_logprobs(LOGITS, [0, 0], 0)[1].top == []
    assert sorted(token for token, _ in token_logprobs(LOGITS, [0, 0], 9)[1].top) == [0, 1, 2, 3]


def test_low_precision_logits_are_normalised_in_float32():
    logits = (torch.randn(1, 5000, generator=torch.Generator().manual_seed(0)) * 2).bfloat16()
    [entry] = token_logprobs(logits, [17], 0)
    exact = logits[0].double()
    assert entry.logprob == pytest.approx(float(exact[17] - torch.logsumexp(exact, 0)), abs=1e-5)


def test_they_show_the_model_before_processing_and_only_when_asked():
    tree = make_tree([3], [-1])
    logits = torch.cat([LOGITS[1:], LOGITS])[[0, 1]]
    greedy = Chooser(SamplingParams(logprobs=1), [0], 4)
    biased = Chooser(SamplingParams(logprobs=1, logit_bias={1: 50.0}, temperature=0.2), [0], 4, seed=1)
    silent = Chooser(SamplingParams(), [0], 4)
    found = [verify([chooser], tree, logits).logprobs[0] for chooser in (greedy, biased, silent)]
    second = round((math.e / (1 + math.e)) ** 2, 5)  # exp(2) / (1 + 2 exp(1) + exp(2))
    assert [(entry.token, round(math.exp(entry.logprob), 5)) for entry in found[0]] == [(3, 0.4), (2, second)]
    assert [(entry.token, round(math.exp(entry.logprob), 5)) for entry in found[1]] == [(1, 0.2)]
    assert [token for token, _ in found[1][0].top] == [3]
    assert found[2] is None


def test_one_entry_for_each_committed_token_of_its_own_row():
    tree = make_tree([2, 5, 3], [-1, -1, 0])
    logits = torch.full((4, 6), 0.0)
    for row, token in enumerate([2, 3, 4, 1]):
        logits[row, token] = row + 1.0
    outcome = verify([Chooser(SamplingParams(logprobs=0), [0], 6)], tree, logits)
    assert outcome.verdicts.tokens.tolist() == [2, 3, 1]
    expected = [value - math.log(math.exp(value) + 5) for value in (1.0, 2.0, 4.0)]
    np.testing.assert_allclose([entry.logprob for entry in outcome.logprobs[0]], expected, rtol=1e-5)
