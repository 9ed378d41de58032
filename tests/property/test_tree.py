"""Draft trees against plain definitions of their parts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.errors import DrafterError
from outpace.tree import DraftTrees, Verdicts, ancestor_bits, node_depths

VOCAB = 12


@st.composite
def parent_lists(draw: st.DrawFn, most: int = 100) -> list[int]:
    size = draw(st.integers(0, most))
    return [draw(st.integers(-1, index - 1)) for index in range(size)]


@st.composite
def forests(draw: st.DrawFn) -> list[tuple[list[int], list[int]]]:
    """Trees as (parents, tokens); siblings hold different tokens."""
    trees = []
    for _ in range(draw(st.integers(1, 4))):
        parents, tokens, used = [], [], set()
        for parent in draw(parent_lists(30)):
            token = draw(st.integers(0, VOCAB - 1))
            remap = parent if parent < len(parents) else -1
            if (remap, token) not in used:
                used.add((remap, token))
                parents.append(remap)
                tokens.append(token)
        trees.append((parents, tokens))
    return trees


def build(trees: list[tuple[list[int], list[int]]], log_prob: float = -0.5) -> DraftTrees:
    offsets = np.cumsum([0, *(len(parents) for parents, _ in trees)]).astype(np.int32)
    count = int(offsets[-1])
    return DraftTrees(
        offsets,
        np.array([token for _, tokens in trees for token in tokens], np.int32),
        np.array([parent for parents, _ in trees for parent in parents], np.int32),
        np.full(count, log_prob, np.float32),
        np.ones(count, np.uint32),
    )


def ancestors(parents: list[int], node: int) -> set[int]:
    found = {node}
    while parents[node] >= 0:
        node = parents[node]
        found.add(node)
    return found


@given(st.lists(parent_lists(), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_ancestor_bits_and_depths_follow_the_parents(lists: list[list[int]]) -> None:
    offsets = np.cumsum([0, *map(len, lists)]).astype(np.int32)
    parents = np.array([parent for own in lists for parent in own], np.int32)
    bits = ancestor_bits(offsets, parents)
    depths = node_depths(offsets, parents)
    assert bits.shape == (len(parents), max(1, -(-max(map(len, lists)) // 64)))
    for begin, own in zip(offsets, lists, strict=False):
        for node in range(len(own)):
            row = bits[begin + node]
            found = {j for j in range(64 * bits.shape[1]) if int(row[j // 64]) >> (j % 64) & 1}
            assert found == ancestors(own, node)
            assert depths[begin + node] == len(found)


@given(forests())
@settings(max_examples=60, deadline=None)
def test_parts_joined_again_are_the_whole(trees: list[tuple[list[int], list[int]]]) -> None:
    whole = build(trees).validate(VOCAB)
    parts = [whole.tree(b) for b in range(whole.batch_size)]
    joined = DraftTrees.concatenate(parts).validate(VOCAB)
    for name in ("offsets", "tokens", "parents", "log_probs", "origins"):
        np.testing.assert_array_equal(getattr(joined, name), getattr(whole, name))
    assert whole.sizes.tolist() == [part.num_nodes for part in parts]


@given(forests(), st.data())
@settings(max_examples=60, deadline=None)
def test_every_violation_is_found(trees: list[tuple[list[int], list[int]]], data: st.DataObject) -> None:
    whole = build(trees)
    if whole.num_nodes == 0:
        return
    node = data.draw(st.integers(0, whole.num_nodes - 1))
    tree = int(np.searchsorted(whole.offsets, node, side="right")) - 1
    local = node - int(whole.offsets[tree])
    kind = data.draw(st.sampled_from(["parent", "low parent", "token", "log_prob", "nan", "sibling"]))
    broken = DraftTrees(*(np.copy(getattr(whole, f)) for f in ("offsets", "tokens", "parents", "log_probs", "origins")))
    if kind == "parent":
        broken.parents[node] = local
    elif kind == "low parent":
        broken.parents[node] = -2
    elif kind == "token":
        broken.tokens[node] = data.draw(st.sampled_from([-1, VOCAB, VOCAB + 5]))
    elif kind == "log_prob":
        broken.log_probs[node] = 0.25
    elif kind == "nan":
        broken.log_probs[node] = np.nan
    else:
        others = [i for i in range(local) if whole.parents[whole.offsets[tree] + i] == whole.parents[node]]
        if not others:
            return
        broken.tokens[node] = broken.tokens[whole.offsets[tree] + others[0]]
    with pytest.raises(DrafterError, match=f"tree {tree}, node {local}"):
        broken.validate(VOCAB)


def test_arrays_of_a_wrong_kind_are_named() -> None:
    good = build([([-1, 0], [1, 2])])
    with pytest.raises(DrafterError, match=r"tokens must be a 1-D int32 array, found 1-D int64"):
        DraftTrees(good.offsets, good.tokens.astype(np.int64), good.parents, good.log_probs, good.origins).validate()
    with pytest.raises(DrafterError, match="differ in length"):
        DraftTrees(good.offsets, good.tokens, good.parents[:1], good.log_probs, good.origins).validate()
    with pytest.raises(DrafterError, match="offsets must run from 0 to 2"):
        DraftTrees(good.offsets[:1], good.tokens, good.parents, good.log_probs, good.origins).validate()


def test_the_example_of_the_module() -> None:
    trees = build([([-1, 0, -1], [7, 8, 9])]).validate(VOCAB)
    assert node_depths(trees.offsets, trees.parents).tolist() == [1, 2, 1]
    offsets = np.array([0, 2], np.int32)
    verdicts = Verdicts(offsets, np.array([0, 1], np.int32), np.array([0, 3], np.int32), np.array([7, 8, 5], np.int32))
    assert trees.tokens[verdicts.path_of(0)].tolist() == verdicts.tokens_of(0)[:-1].tolist()
    assert verdicts.batch_size == 1
    assert DraftTrees.empty(3).validate().sizes.tolist() == [0, 0, 0]
