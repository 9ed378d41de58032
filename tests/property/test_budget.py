"""The mean over a run never exceeds the budget, and what is cut equals brute force."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.reduce import NodeBudget, select
from outpace.tree import DraftTrees
from verify_support import random_tree


def path_probs(tree: DraftTrees) -> list[float]:
    """In float64 logarithms, as the brute force of `select` has them."""
    found: list[float] = []
    for parent, log_prob in zip(tree.parents.tolist(), tree.log_probs.tolist(), strict=True):
        found.append(log_prob + (0.0 if parent < 0 else found[parent]))
    return found


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    budget=st.floats(0, 12),
    batch=st.integers(1, 4),
    limit=st.integers(0, 20),
    steps=st.integers(1, 60),
)
def test_the_mean_never_exceeds_the_budget(seed: int, budget: float, batch: int, limit: int, steps: int) -> None:
    rng = np.random.default_rng(seed)
    bounded = NodeBudget(budget)
    spent = 0
    for number in range(1, steps + 1):
        trees = DraftTrees.concatenate([random_tree(rng, 5, 14) for _ in range(batch)])
        min_path_prob, total = bounded.offer(trees, limit)
        assert 0.0 <= min_path_prob <= 1.0
        assert total == math.floor(budget * number * batch) - spent >= 0
        kept = select(trees, limit, total=total, min_path_prob=min_path_prob).validate(5)
        bounded.spend(kept.num_nodes)
        spent += kept.num_nodes
        assert bounded.mean <= budget
        assert spent <= budget * number * batch


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    batch=st.integers(1, 4),
    limit=st.integers(0, 12),
    total=st.one_of(st.none(), st.integers(0, 40)),
    quarters=st.integers(0, 12),
)
def test_a_least_path_probability_equal_to_brute_force(
    seed: int, batch: int, limit: int, total: int | None, quarters: int
) -> None:
    rng = np.random.default_rng(seed)
    parts = [random_tree(rng, 5, 14) for _ in range(batch)]
    trees = DraftTrees.concatenate(parts)
    # Between two levels of the trees, whose log_probs are quarters, so that no rounding decides.
    least = -quarters / 4 - 0.1
    ranked = []
    for b, tree in enumerate(parts):
        ranked += [(-value, index, b) for index, value in enumerate(path_probs(tree)) if value >= least]
    expected: list[list[int]] = [[] for _ in parts]
    for _, index, b in sorted(ranked):
        if len(expected[b]) < limit and sum(map(len, expected)) < (10**6 if total is None else total):
            expected[b].append(index)
    kept = select(trees, limit, total=total, min_path_prob=math.exp(least)).validate(5)
    for b, tree in enumerate(parts):
        indices = sorted(expected[b])
        assert kept.tree(b).tokens.tolist() == tree.tokens[indices].tolist()
        old_parents = [indices[parent] if parent >= 0 else -1 for parent in kept.tree(b).parents]
        assert old_parents == tree.parents[indices].tolist()
    if sum(map(len, expected)) == trees.num_nodes:
        assert kept is trees
