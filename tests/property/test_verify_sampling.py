"""Sampling that speculation cannot change: exact for every seed, and of the model's distribution."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.config import SamplingParams
from outpace.tree import DraftTrees
from outpace.verify import Chooser, gumbel_argmax, verify
from outpace.verify.oracle import oracle_choose, oracle_scores
from verify_support import ToyTarget, chi_square, decode, decode_batch, drafted_tree, sampling_params

LENGTH = 16


@settings(max_examples=60, deadline=None)
@given(requests=st.lists(sampling_params(8), min_size=1, max_size=4), seed=st.integers(0, 10**6))
def test_the_output_is_that_of_plain_decoding_in_any_batch(requests, seed):
    rng = np.random.default_rng(seed)
    target = ToyTarget(8, salt=seed)
    prompts = [rng.integers(0, 8, int(rng.integers(1, 6))).tolist() for _ in requests]
    plain = [decode(target, prompts[b], params, seed + b, LENGTH) for b, params in enumerate(requests)]
    speculated, steps = decode_batch(
        target,
        [(prompts[b], Chooser(params, prompts[b], 8, seed + b), plain[b]) for b, params in enumerate(requests)],
        LENGTH,
        rng,
    )
    assert speculated == plain
    assert steps <= LENGTH * len(requests)


def test_drafts_are_accepted_in_these_tests():
    """Otherwise the test above would compare plain decoding with itself."""
    target, params = ToyTarget(8), SamplingParams(temperature=1.0, frequency_penalty=0.3)
    plain = decode(target, [1], params, 3, 200)
    rng = np.random.default_rng(0)
    [speculated], steps = decode_batch(target, [([1], Chooser(params, [1], 8, 3), plain)], 200, rng)
    assert speculated == plain
    assert 200 / steps > 2.5


def test_plain_decoding_equals_the_oracle_token_by_token():
    target = ToyTarget(12)
    params = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.4, min_p=0.02)
    output: list[int] = []
    for _ in range(60):
        output.append(oracle_choose(params, 9, [3, 1], output, target.logits([3, 1, *output])))
    assert decode(target, [3, 1], params, 9, 60) == output
    assert len(set(output)) > 4


def test_seeds_give_different_outputs():
    target, params = ToyTarget(12), SamplingParams(temperature=1.0)
    assert len({tuple(decode(target, [3], params, seed, 12)) for seed in range(50)}) == 50


# The distribution of three tokens of a vocabulary of four, enumerated.
VOCAB, POSITIONS, PROMPT = 4, 3, [2, 0]
QUANTILE_63 = 103.44  # chi-square, 63 degrees of freedom, 0.999
NUM_SEEDS = 6000
TOY = ToyTarget(VOCAB, spread=0.6, salt=1)


def enumerate_distribution(params: SamplingParams) -> dict[tuple[int, ...], float]:
    found = {}
    for output in itertools.product(range(VOCAB), repeat=POSITIONS):
        probability = 1.0
        for i, token in enumerate(output):
            scores = oracle_scores(params, PROMPT, list(output[:i]), TOY.logits([*PROMPT, *output[:i]]))
            probability *= float(torch.softmax(scores.double(), 0)[token])
        found[output] = probability
    assert sum(found.values()) == pytest.approx(1.0)
    return found


def statistic(outputs: list[tuple[int, ...]], distribution: dict[tuple[int, ...], float]) -> tuple[float, int]:
    """Chi-square over the outputs that can occur, and its degrees of freedom."""
    possible = [output for output, probability in distribution.items() if probability > 0]
    assert set(outputs) <= set(possible)
    counts = np.array([outputs.count(output) for output in possible])
    return chi_square(counts, np.array([distribution[output] for output in possible])), len(possible) - 1


def sample_speculated(params: SamplingParams) -> list[tuple[int, ...]]:
    """The first three tokens for every seed, with random trees, all seeds in one batch."""
    rng = np.random.default_rng(0)
    choosers = [Chooser(params, PROMPT, VOCAB, seed) for seed in range(NUM_SEEDS)]
    outputs: list[list[int]] = [[] for _ in choosers]
    rows_of: dict[tuple[int, ...], torch.Tensor] = {}
    while active := [i for i in range(NUM_SEEDS) if len(outputs[i]) < POSITIONS]:
        parts, rows = [], []
        for i in active:
            guess = rng.integers(0, VOCAB, POSITIONS - len(outputs[i])).tolist()
            parts.append(drafted_tree(rng, TOY, PROMPT + outputs[i], guess, 3))
            texts = [(*PROMPT, *outputs[i])]
            for token, parent in zip(parts[-1].tokens.tolist(), parts[-1].parents.tolist(), strict=True):
                texts.append((*texts[parent + 1], token))
            for text in texts:
                if text not in rows_of:
                    rows_of[text] = TOY.logits(list(text))
                rows.append(rows_of[text])
        outcome = verify([choosers[i] for i in active], DraftTrees.concatenate(parts), torch.stack(rows))
        for b, i in enumerate(active):
            outputs[i] += outcome.verdicts.tokens_of(b).tolist()
            choosers[i].commit(outcome.verdicts.tokens_of(b), outcome.states[b])
    return [tuple(output[:POSITIONS]) for output in outputs]


def test_samples_follow_the_enumerated_distribution():
    params = SamplingParams(temperature=1.2, presence_penalty=0.3, repetition_penalty=1.1)
    value, freedom = statistic(sample_speculated(params), enumerate_distribution(params))
    assert freedom == 63
    assert value < QUANTILE_63


def test_samples_follow_a_truncated_distribution():
    """With top-k 2 of 4 eight outputs are possible: 7 degrees of freedom, 0.999 quantile 24.32."""
    params = SamplingParams(temperature=1.5, top_k=2)
    value, freedom = statistic(sample_speculated(params), enumerate_distribution(params))
    assert freedom == 7
    assert value < 24.32


@pytest.mark.parametrize(
    "biased",
    [
        lambda logits, seed, position: gumbel_argmax(logits, seed, 0),  # the same noise at every position
        lambda logits, seed, position: gumbel_argmax(logits, 0, position),  # the same noise for every seed
        lambda logits, seed, position: gumbel_argmax(logits * np.float32(1.3), seed, position),  # noise too weak
        lambda logits, seed, position: gumbel_argmax(logits, (seed + position) % 1000, 0),  # keys that collide
    ],
)
def test_the_statistic_finds_a_biased_sampler(biased):
    params = SamplingParams(temperature=1.2)
    tables: dict[tuple[int, ...], np.ndarray] = {}
    outputs = []
    for seed in range(NUM_SEEDS):
        output: tuple[int, ...] = ()
        for position in range(len(PROMPT), len(PROMPT) + POSITIONS):
            if output not in tables:
                logits = TOY.logits([*PROMPT, *output])
                tables[output] = oracle_scores(params, PROMPT, list(output), logits).numpy()
            output = (*output, biased(tables[output], seed, position))
        outputs.append(output)
    value, freedom = statistic(outputs, enumerate_distribution(params))
    assert freedom == 63
    assert value > 1.2 * QUANTILE_63
