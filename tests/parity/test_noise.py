"""The noise floor of a packed pass: its logits against the model's own plain pass over the same text, family by family."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from families import FAMILIES, VOCAB, reference
from outpace.model import KVArena, Target, pack, probe
from outpace.tree import DraftTrees
from outpace.verify import verdicts_of
from verify_support import make_tree

MAX_NOISE = 5e-5  # a quarter of the least lead of the recipes' greedy tokens
CHUNKS = (1, 7, 20)  # tokens of each prefill step


def paths_under(text: list[int]) -> tuple[DraftTrees, list[list[int]]]:
    """A tree with branches, wrong tokens and depth; and for each node the tokens from the root to it."""
    parents = [-1, -1, 0, 1, 1, 3, 5, 2, 6, -1, 8, 8]
    tokens = [(text[-1] + 37 * i * i + 11) % (VOCAB - 1) + 1 for i in range(1, len(parents) + 1)]
    routes: list[list[int]] = []
    for token, parent in zip(tokens, parents, strict=True):
        routes.append([*(routes[parent] if parent >= 0 else []), token])
    return make_tree(tokens, parents).validate(VOCAB), routes


def run(target: Target, arena: KVArena, keys: list[int], pending: list[list[int]], trees: DraftTrees) -> torch.Tensor:
    """One step; ``[T, vocab]``, every row."""
    for key, tokens, size in zip(keys, pending, trees.sizes, strict=True):
        arena.prepare(key, len(tokens) + int(size))
    plan = pack(
        [np.array(tokens, np.int32) for tokens in pending],
        [arena.cached_length(key) for key in keys],
        trees,
        [arena.segments(key) for key in keys],
        [arena.write_start(key) for key in keys],
        [True for _ in keys],
        every_row=True,
    )
    logits, _ = target.run(plan, arena)
    assert logits.shape == (plan.num_tokens, target.vocab_size)
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_are_the_plain_ones(family: str) -> None:
    model, prompts, continuations = reference(family)
    target = probe(model)
    limit = None if target.rope_switch is None else target.rope_switch.length  # steps do not mix the two sides
    texts = [(prompts[i] + continuations[i])[:length] for i, length in ((6, 55), (4, 44), (2, 31))]
    assert limit is None or max(map(len, texts)) + 7 <= limit  # six nodes deep, and one token after them
    wanted = [target.plain_logits(np.array(text)) for text in texts]
    arena = KVArena(target.layers, max_rows=400, initial_rows=32)
    for key in range(3):
        arena.open(key)
    worst = 0.0

    def compare(found: torch.Tensor, expected: torch.Tensor) -> None:
        nonlocal worst
        assert found.shape == expected.shape
        worst = max(worst, float((found - expected).abs().max()))

    # Prefill in chunks, the sequences at different places, all across the border of a window or chunk.
    done = [0, 0, 0]
    for chunk in CHUNKS:
        counts = [chunk, chunk + 1, chunk]
        pending = [text[at : at + count] for text, at, count in zip(texts, done, counts, strict=True)]
        logits = run(target, arena, [0, 1, 2], pending, DraftTrees.empty(3)).split(counts)
        for b in range(3):
            compare(logits[b], wanted[b][done[b] : done[b] + counts[b]])
            done[b] += counts[b]
        arena.commit([0, 1, 2], counts, None)
        arena.check()

    # The rest of each text (27, 13 and 3 tokens) with a tree under it; then one token after an accepted branch.
    keys = [2, 0, 1]
    assert [len(text) - at for text, at in zip(texts, done, strict=True)] == [27, 13, 3]
    pending = [texts[2][done[2] :], texts[0][done[0] :], texts[1][done[1] :]]
    drafted = [paths_under(texts[key]) for key in keys]
    counts = [len(tokens) + 12 for tokens in pending]
    logits = run(target, arena, keys, pending, DraftTrees.concatenate([tree for tree, _ in drafted])).split(counts)
    for place, key in enumerate(keys):
        given = len(pending[place])
        compare(logits[place][:given], wanted[key][done[key] :])
        for node, route in enumerate(drafted[place][1]):
            compare(logits[place][given + node], target.plain_logits(np.array(texts[key] + route))[-1])
    branches = [[1, 3, 5, 6, 8, 11], [0, 2], []]
    bonus = [[9] * (len(branch) + 1) for branch in branches]
    arena.commit(keys, [len(tokens) for tokens in pending], verdicts_of(branches, bonus))
    arena.check()
    logits = run(target, arena, keys, [[9], [9], [9]], DraftTrees.empty(3))
    for place, key in enumerate(keys):
        route = drafted[place][1][branches[place][-1]] if branches[place] else []
        compare(logits[place], target.plain_logits(np.array([*texts[key], *route, 9]))[-1])

    assert 0 < worst < MAX_NOISE, f"{family}: {worst:.2e}"
