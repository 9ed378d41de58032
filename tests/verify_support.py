"""A toy target, random trees and strategies for the tests of verification and selection."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from outpace.config import SamplingParams
from outpace.tree import DraftTrees
from outpace.verify import Chooser, truncate, verify

NO_DRAFT = DraftTrees.empty(1)


class ToyTarget:
    """A model whose logits are a function of the whole prefix, and of nothing else."""

    def __init__(self, vocab_size: int, spread: float = 2.0, salt: int = 0) -> None:
        self.vocab_size, self.spread, self.salt = vocab_size, spread, salt

    def logits(self, prefix: list[int]) -> torch.Tensor:
        rng = np.random.default_rng([self.salt, len(prefix), *prefix])
        return torch.from_numpy(rng.normal(0.0, self.spread, self.vocab_size).astype(np.float32))

    def rows(self, prefix: list[int], tree: DraftTrees) -> torch.Tensor:
        """[1 + n, V]: after the root and after each node."""
        texts = [prefix]
        for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
            texts.append([*texts[parent + 1], token])
        return torch.stack([self.logits(text) for text in texts])


class AlternatingConstraint:
    """Even tokens at even output positions, odd ones at odd positions; counts how often it is asked."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.asked: list[Any] = []
        self.advanced: list[Any] = []

    def start(self) -> tuple[int, ...]:
        return ()

    def allowed(self, state: tuple[int, ...]) -> np.ndarray:
        self.asked.append(state)
        return np.arange(self.vocab_size) % 2 == len(state) % 2

    def advance(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        assert token % 2 == len(state) % 2, "a token that was not allowed"
        self.advanced.append((state, token))
        return (*state, token)


def make_tree(tokens: list[int], parents: list[int], log_probs: list[float] | None = None) -> DraftTrees:
    size = len(tokens)
    return DraftTrees(
        np.array([0, size], np.int32),
        np.array(tokens, np.int32),
        np.array(parents, np.int32),
        np.array([-0.5] * size if log_probs is None else log_probs, np.float32),
        np.arange(size, dtype=np.uint32),
    ).validate()


def random_tree(rng: np.random.Generator, vocab_size: int, most: int) -> DraftTrees:
    """A tree of up to ``most`` nodes; with a small vocabulary much of it is accepted."""
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(int(rng.integers(0, most + 1))):
        parent, token = int(rng.integers(-1, len(tokens))), int(rng.integers(vocab_size))
        if (parent, token) not in zip(parents, tokens, strict=True):
            parents.append(parent)
            tokens.append(token)
    # Multiples of 1/4, so that equal path probabilities are common.
    return make_tree(tokens, parents, (-rng.integers(0, 5, len(tokens)) / 4).tolist())


def drafted_tree(
    rng: np.random.Generator, target: ToyTarget, text: list[int], truth: list[int], most: int
) -> DraftTrees:
    """A random tree under ``text`` that also holds some of what really follows, so that walks go deep."""
    tree = random_tree(rng, target.vocab_size, most)
    tokens, parents, node = tree.tokens.tolist(), tree.parents.tolist(), -1
    for token in truth[: int(rng.integers(0, 6))]:
        known = [i for i in range(len(tokens)) if parents[i] == node and tokens[i] == token]
        if not known:
            tokens.append(token)
            parents.append(node)
        node = known[0] if known else len(tokens) - 1
    return make_tree(tokens, parents)


def decode(target: ToyTarget, prompt: list[int], params: SamplingParams, seed: int, length: int) -> list[int]:
    """Plain decoding: one token a step."""
    chooser, output = Chooser(params, prompt, target.vocab_size, seed), []
    for _ in range(length):
        outcome = verify([chooser], NO_DRAFT, target.logits(prompt + output)[None])
        assert outcome.errors == [None]
        output += outcome.verdicts.tokens.tolist()
        chooser.commit(outcome.verdicts.tokens, outcome.states[0])
    return output


def decode_batch(
    target: ToyTarget, requests: list[tuple[list[int], Chooser, list[int]]], length: int, rng: np.random.Generator
) -> tuple[list[list[int]], int]:
    """Speculative decoding with random trees; ``requests`` are (prompt, chooser, truth). Returns outputs and steps."""
    outputs: list[list[int]] = [[] for _ in requests]
    steps = 0
    while active := [i for i in range(len(requests)) if len(outputs[i]) < length]:
        # A random part of the batch takes part in a step, in a random order.
        chosen = rng.permutation(active)[: int(rng.integers(1, len(active) + 1))].tolist()
        texts = [requests[i][0] + outputs[i] for i in chosen]
        parts = [
            drafted_tree(rng, target, text, requests[i][2][len(outputs[i]) :], 6)
            for i, text in zip(chosen, texts, strict=True)
        ]
        rows = torch.cat([target.rows(text, tree) for text, tree in zip(texts, parts, strict=True)])
        choosers = [requests[i][1] for i in chosen]
        outcome = verify(choosers, DraftTrees.concatenate(parts), rows)
        assert outcome.errors == [None] * len(chosen)
        verdicts = truncate(outcome.verdicts, np.array([length - len(outputs[i]) for i in chosen], np.int32))
        for b, i in enumerate(chosen):
            outputs[i] += verdicts.tokens_of(b).tolist()
            choosers[b].commit(verdicts.tokens_of(b), outcome.states[b])
        steps += len(chosen)
    return outputs, steps


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Pearson's statistic; every cell must expect at least 5."""
    expected = probabilities * counts.sum()
    assert expected.min() >= 5, f"a cell expects only {expected.min():.2f}"
    return float(((counts - expected) ** 2 / expected).sum())


@st.composite
def sampling_params(draw: st.DrawFn, vocab_size: int) -> SamplingParams:
    number = st.floats(-2, 2, width=32)
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0, 1.7])),
        top_k=draw(st.sampled_from([0, 0, 1, 3, 100])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.4])),
        min_p=draw(st.sampled_from([0.0, 0.1, 0.6])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.8])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.3, -0.4])),
        logit_bias=draw(st.dictionaries(st.integers(0, vocab_size - 2), number, max_size=3)),
        constraint=AlternatingConstraint(vocab_size) if draw(st.integers(0, 3)) == 0 else None,
        logprobs=draw(st.sampled_from([None, None, 0, 2])),
    )
