"""The union of trees against its slow twin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from drafting import committed
from mergetwin import Node, Path, nodes_by_path, trees_from, united
from outpace.draft import NoneDrafter
from outpace.draft.merge import MergeDrafter
from outpace.draft.union import unite
from outpace.reduce import select
from outpace.tree import DraftTrees, Int32Array

CHANCES = st.floats(0.001, 1.0)


class Fixed(NoneDrafter):
    """Proposes what it is given."""

    trees = DraftTrees.empty(0)

    def propose(self, keys: Sequence[int], caps: Int32Array) -> DraftTrees:
        return self.trees


@st.composite
def tree(draw: Any, origin: int) -> dict[Path, Node]:
    """A random tree over few tokens, so that trees overlap; siblings' chances may sum to more than 1."""
    nodes: dict[Path, Node] = {}
    for _ in range(draw(st.integers(0, 12))):
        above = draw(st.sampled_from([(), *nodes]))
        path = (*above, draw(st.integers(0, 3)))
        nodes.setdefault(path, Node(math.log(draw(CHANCES)), origin))
    return nodes


@st.composite
def batches(draw: Any) -> list[list[dict[Path, Node]]]:
    """For each part a batch of trees."""
    batch = draw(st.integers(1, 3))
    return [[draw(tree(1 << k)) for _ in range(batch)] for k in range(draw(st.integers(1, 4)))]


def assert_equal(trees: DraftTrees, index: int, expected: dict[Path, Node]) -> None:
    found = nodes_by_path(trees, index)
    assert list(found) == list(expected)
    assert [node.origins for node in found.values()] == [node.origins for node in expected.values()]
    np.testing.assert_allclose(
        [node.log_prob for node in found.values()], [node.log_prob for node in expected.values()], rtol=1e-4, atol=1e-5
    )


def assert_siblings_share_at_most_one(trees: DraftTrees) -> None:
    for index in range(trees.batch_size):
        sums: dict[Path, float] = {}
        for path, node in nodes_by_path(trees, index).items():
            sums[path[:-1]] = sums.get(path[:-1], 0.0) + math.exp(node.log_prob)
        assert max(sums.values(), default=0.0) <= 1 + 1e-5


@settings(max_examples=400, deadline=None, derandomize=True)
@given(parts=batches())
def test_the_union_holds_every_path_once(parts: list[list[dict[Path, Node]]]) -> None:
    trees = unite([trees_from(part) for part in parts]).validate()
    assert trees.batch_size == len(parts[0])
    for index in range(trees.batch_size):
        assert_equal(trees, index, united([nodes_by_path(trees_from(part), index) for part in parts]))
    assert_siblings_share_at_most_one(trees)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data(), parts=batches())
def test_merged_trees_are_the_best_of_the_union(data: Any, parts: list[list[dict[Path, Node]]]) -> None:
    drafters = [Fixed() for _ in parts]
    merge = MergeDrafter(drafters)
    batch = len(parts[0])
    keys = list(range(batch))
    for key in keys:
        merge.open(key, np.array([1], np.int32))
    for drafter, part in zip(drafters, parts, strict=True):
        drafter.trees = trees_from(part)
    caps = np.array([data.draw(st.integers(0, 20)) for _ in keys], np.int32)
    everything = unite([drafter.trees for drafter in drafters])
    first = merge.propose(keys, caps).validate()
    for index in range(batch):  # nothing was learned yet
        assert nodes_by_path(first, index) == nodes_by_path(select(everything, caps), index)
    for _ in range(3):
        tokens = [data.draw(st.lists(st.integers(0, 3), max_size=4)) for _ in keys]
        merge.observe(keys, committed(tokens))
        trees = merge.propose(keys, np.full(batch, 1000, np.int32)).validate()
        for index in range(batch):
            assert list(nodes_by_path(trees, index)) == list(nodes_by_path(everything, index))
        assert_siblings_share_at_most_one(trees)
