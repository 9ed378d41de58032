"""Verification written to be obviously right and not to be fast; tests compare `verify` with it.

It shares no code with the fast path: the whole prefix is gone through again at every node, the noise is computed in
Python integers, a constraint is run from its start.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outpace.config import SamplingParams
from outpace.errors import ConstraintError, NonFiniteLogitsError
from outpace.tree import DraftTrees

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def oracle_noise(seed: int, position: int, token: int) -> float:
    """The Gumbel noise of one token, in Python integers."""
    key = _mix(_mix(seed + _GOLDEN) + (position + 1) * _GOLDEN)
    bits = _mix(key + (token + 1) * _GOLDEN) >> 12
    return -math.log(-math.log((bits + 0.5) * 2.0**-52))


def _mix(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def oracle_scores(params: SamplingParams, prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """The processed logits after a prefix.

    Args:
        params: The request's parameters.
        prompt: Its prompt.
        output: What is generated so far, the draft's path included.
        logits: ``[V]``, the model's own.

    Returns:
        ``float32[V]``.

    Raises:
        NonFiniteLogitsError: NaN, +inf, or nothing but -inf.
        ConstraintError: No token is left.
    """
    row = logits.float().clone()
    if not math.isfinite(float(row.max())):
        raise NonFiniteLogitsError("logits are not finite")
    for token, bias in params.logit_bias.items():
        row[token] += bias
    prefix, scores = torch.tensor([prompt + output]), row[None]
    if params.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(prefix, scores)
    for token, count in Counter(output).items():
        scores[0, token] -= params.frequency_penalty * count + params.presence_penalty
    if params.constraint is not None:
        state: Any = params.constraint.start()
        for token in output:
            state = params.constraint.advance(state, token)
        scores[0, ~torch.from_numpy(params.constraint.allowed(state))] = -math.inf
    if bool((scores == -math.inf).all()):
        raise ConstraintError("no token is left")
    for warper in [] if params.greedy else _warpers(params):
        scores = warper(prefix, scores)
    return scores[0]


def oracle_choose(params: SamplingParams, seed: int, prompt: list[int], output: list[int], logits: torch.Tensor) -> int:
    """The token that plain decoding chooses after a prefix. Arguments and errors as in `oracle_scores`."""
    scores = [float(score) for score in oracle_scores(params, prompt, output, logits)]
    if not params.greedy:
        position = len(prompt) + len(output)
        scores = [score + oracle_noise(seed, position, token) for token, score in enumerate(scores)]
    return scores.index(max(scores))


def oracle_verify(
    params: SamplingParams, seed: int, prompt: list[int], output: list[int], tree: DraftTrees, logits: torch.Tensor
) -> tuple[list[int], list[int]]:
    """Verify one tree by recursion.

    Args:
        params: The request's parameters.
        seed: The seed in use.
        prompt: Its prompt.
        output: What is committed so far.
        tree: One tree with ``n`` nodes.
        logits: ``[n + 1, V]``, the root's row first.

    Returns:
        The accepted path and the committed tokens.

    Raises:
        NonFiniteLogitsError: At the root.
        ConstraintError: At the root.
    """

    def below(node: int, output: list[int]) -> tuple[list[int], list[int]]:
        token = oracle_choose(params, seed, prompt, output, logits[node + 1])
        for child in range(tree.num_nodes):
            if tree.parents[child] == node and tree.tokens[child] == token:
                try:
                    path, tokens = below(child, [*output, token])
                except (NonFiniteLogitsError, ConstraintError):
                    break  # the next step meets it at the root
                return [child, *path], [token, *tokens]
        return [], [token]

    return below(-1, output)


def _warpers(params: SamplingParams) -> list[LogitsProcessor]:
    return [
        TemperatureLogitsWarper(params.temperature),
        *([TopKLogitsWarper(params.top_k)] if params.top_k else []),
        TopPLogitsWarper(params.top_p),
        MinPLogitsWarper(params.min_p),
    ]
