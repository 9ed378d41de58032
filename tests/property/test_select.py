import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.reduce import select
from outpace.tree import DraftTrees
from verify_support import random_tree


def brute_force(parts, limits, total):
    """Node by node: the best node of all that still fits, by sorting everything in Python."""
    ranked = []
    for b, tree in enumerate(parts):
        path_log_probs = []
        for parent, log_prob in zip(tree.parents.tolist(), tree.log_probs.tolist(), strict=True):
            path_log_probs.append(log_prob + (0.0 if parent < 0 else path_log_probs[parent]))
        ranked += [(-value, index, b) for index, value in enumerate(path_log_probs)]
    kept = [set() for _ in parts]
    for _, index, b in sorted(ranked):
        if len(kept[b]) < limits[b] and sum(map(len, kept)) < total:
            kept[b].add(index)
    return kept


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    batch=st.integers(1, 5),
    limit=st.one_of(st.integers(0, 12), st.lists(st.integers(0, 12), min_size=5, max_size=5)),
    total=st.one_of(st.none(), st.integers(0, 40)),
)
def test_equal_to_brute_force_and_closed_under_parents(seed, batch, limit, total):
    rng = np.random.default_rng(seed)
    parts = [random_tree(rng, 5, 14) for _ in range(batch)]
    limits = [limit] * batch if isinstance(limit, int) else limit[:batch]
    trees = DraftTrees.concatenate(parts)
    kept = select(trees, limit if isinstance(limit, int) else np.array(limits, np.int32), total=total).validate(5)
    expected = brute_force(parts, limits, 10**6 if total is None else total)
    for b, tree in enumerate(parts):
        indices = sorted(expected[b])
        found = kept.tree(b)
        assert found.origins.tolist() == tree.origins[indices].tolist()
        assert found.tokens.tolist() == tree.tokens[indices].tolist()
        assert found.log_probs.tolist() == tree.log_probs[indices].tolist()
        old_parents = [indices[parent] if parent >= 0 else -1 for parent in found.parents]
        assert old_parents == tree.parents[indices].tolist()
    if sum(map(len, expected)) == trees.num_nodes:
        assert kept is trees
