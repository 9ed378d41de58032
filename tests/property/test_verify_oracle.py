"""Verification of a batch against the slow oracle, sequence by sequence."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from outpace.config import SamplingParams
from outpace.errors import ConstraintError, NonFiniteLogitsError
from outpace.tree import DraftTrees
from outpace.verify import Chooser, greedy_verdicts, verify
from outpace.verify.oracle import oracle_verify
from verify_support import random_tree, sampling_params

VOCAB = 6


@settings(max_examples=250, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    requests=st.lists(st.one_of(st.just(SamplingParams()), sampling_params(VOCAB)), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    bad_share=st.sampled_from([0.0, 0.0, 0.1]),
)
def test_a_mixed_batch_equals_the_oracle(seed, requests, dtype, bad_share):
    rng = np.random.default_rng(seed)
    parts = [random_tree(rng, VOCAB, 12) for _ in requests]
    trees = DraftTrees.concatenate(parts)
    logits = torch.from_numpy(rng.normal(0, 2, (trees.num_nodes + len(parts), VOCAB))).to(dtype)
    logits[torch.from_numpy(rng.random(logits.shape) < bad_share / VOCAB)] = math.nan
    prompts = [rng.integers(0, VOCAB, int(rng.integers(1, 5))).tolist() for _ in requests]
    # Even tokens at even positions, so that the constraint of some requests holds.
    outputs = [(2 * rng.integers(0, VOCAB // 2, n) + np.arange(n) % 2).tolist() for n in rng.integers(0, 4, len(parts))]
    choosers = []
    for b, params in enumerate(requests):
        choosers.append(Chooser(params, prompts[b], VOCAB, seed=b))
        choosers[b].commit(outputs[b])
    outcome = verify(choosers, trees, logits)

    for b, (params, tree) in enumerate(zip(requests, parts, strict=True)):
        rows = logits[trees.offsets[b] + b : trees.offsets[b + 1] + b + 1]
        path, tokens, error = [], [], type(None)
        try:
            path, tokens = oracle_verify(params, b, prompts[b], outputs[b], tree, rows)
        except (ConstraintError, NonFiniteLogitsError) as caught:
            error = type(caught)
        event(f"accepted {min(len(path), 3)}, {error.__name__}")
        assert outcome.verdicts.path_of(b).tolist() == path
        assert outcome.verdicts.tokens_of(b).tolist() == tokens
        assert type(outcome.errors[b]) is error
        assert (outcome.logprobs[b] is None) == (params.logprobs is None)
        if params.logprobs is not None:
            assert [entry.token for entry in outcome.logprobs[b]] == tokens


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**9), batch=st.integers(1, 6))
def test_greedy_verdicts_equal_the_oracle(seed, batch):
    rng = np.random.default_rng(seed)
    parts = [random_tree(rng, 4, 20) for _ in range(batch)]
    trees = DraftTrees.concatenate(parts)
    choices = rng.integers(0, 4, trees.num_nodes + batch).astype(np.int32)
    verdicts = greedy_verdicts(trees, choices)
    for b, tree in enumerate(parts):
        rows = torch.nn.functional.one_hot(torch.from_numpy(choices).long(), 4).float()
        rows = rows[trees.offsets[b] + b : trees.offsets[b + 1] + b + 1]
        path, tokens = oracle_verify(SamplingParams(), 0, [0], [], tree, rows)
        assert verdicts.path_of(b).tolist() == path
        assert verdicts.tokens_of(b).tolist() == tokens
