"""The drafter that asks all contexts."""

from __future__ import annotations

import numpy as np
import pytest

from drafting import committed, draft_one
from outpace.draft import build_drafter
from outpace.draft.escape import NUM_CLASSES, OWN, class_of, first_trials
from outpace.draft.sources import Sources
from outpace.draft.suffix_tree import SuffixTreeDrafter
from outpace.errors import ConfigError, LifecycleError
from outpace.suffix.memory import ResponseMemory
from outpace.tree import Origin


def test_both_continuations_are_drafted_the_more_frequent_one_first() -> None:
    tree = draft_one("suffix-tree", [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 3, 8, 1, 2], cap=2)
    assert tree.tokens.tolist() == [3, 4]
    assert tree.parents.tolist() == [-1, -1]
    assert tree.log_probs[0] > tree.log_probs[1]
    assert tree.origins.tolist() == [Origin.DYNAMIC] * 2


def test_a_sure_path_goes_deep() -> None:
    tree = draft_one("suffix-tree", [*range(30), 99, *range(15)], cap=8)
    assert tree.tokens.tolist() == list(range(15, 23))
    assert tree.parents.tolist() == [-1, *range(7)]


def test_shorter_contexts_have_a_say() -> None:
    """``5 6`` was followed by 7; ``6`` alone also by 8."""
    tree = draft_one("suffix-tree", [5, 6, 7, 1, 6, 8, 2, 5, 6])
    assert {7, 8} <= {t for t, p in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True) if p < 0}


def test_unlikely_nodes_are_left_out() -> None:
    text = [5, 6, 7, 1, 6, 8, 2, 5, 6]
    assert draft_one("suffix-tree(min_prob=0.3)", text).num_nodes < draft_one("suffix-tree", text).num_nodes
    assert draft_one("suffix-tree(draft_size=1)", text).num_nodes == 1
    assert draft_one("suffix-tree", [1, 2, 3]).num_nodes == 0


def test_a_namespace_drafts_from_its_own_memory_only() -> None:
    memory = ResponseMemory(background=False)
    memory.remember("a", np.array([5, 6, 7, 8], np.int32))
    memory.flush()
    drafter = build_drafter("suffix-tree", sources=Sources(memory))
    for key, namespace in enumerate(["a", "b", ""]):
        drafter.open(key, np.array([1, 5, 6], np.int32), namespace)
    trees = drafter.propose([0, 1, 2], np.full(3, 10, np.int32)).validate()
    assert trees.sizes.tolist() == [2, 0, 0]
    assert trees.tokens.tolist() == [7, 8]
    assert trees.origins.tolist() == [Origin.MEMORY] * 2
    without = build_drafter("suffix-tree(memory=false)", sources=Sources(memory))
    without.open(0, np.array([1, 5, 6], np.int32), "a")
    assert without.propose([0], np.array([10], np.int32)).num_nodes == 0


def test_without_its_own_text() -> None:
    drafter = SuffixTreeDrafter(dynamic=False)
    drafter.open(0, np.array([1, 2, 1, 2, 1], np.int32))
    drafter.observe([0], committed([[2, 1]]))
    assert drafter.propose([0], np.array([10], np.int32)).num_nodes == 0


def test_forks_go_their_own_ways() -> None:
    drafter = SuffixTreeDrafter()
    drafter.open(0, np.array([1, 2, 3, 1], np.int32))
    drafter.fork(0, 1)
    drafter.observe([0, 1], committed([[2], [7, 1, 7, 1]]))
    trees = drafter.propose([0, 1], np.full(2, 1, np.int32))
    assert trees.tokens.tolist() == [3, 7]
    drafter.close(0)
    drafter.close(1)


def test_misuse() -> None:
    drafter = SuffixTreeDrafter()
    with pytest.raises(LifecycleError, match="not open"):
        drafter.propose([3], np.array([1], np.int32))
    for spec in ("suffix-tree(draft_size=0)", "suffix-tree(min_prob=2)", "suffix-tree(memory=3)"):
        with pytest.raises(ConfigError, match="suffix-tree"):
            build_drafter(spec)


def test_every_kind_of_context_has_a_row() -> None:
    table = first_trials()
    assert table.shape == (NUM_CLASSES, 2)
    rows = {
        class_of.py_func(source, length, occurrences, different, rank)
        for source in range(3)
        for length in (*range(1, 12), 17, 500)
        for occurrences in (1, 2, 3, 5, 9, 21, 10**6)
        for different in (1, 2, 3, 5, 24)
        for rank in range(6)
    }
    assert min(rows) >= 0
    assert max(rows) < NUM_CLASSES
    share = table[:, 0] / table[:, 1]
    longer = share[class_of.py_func(OWN, 9, 1, 1, 0)]
    assert longer > share[class_of.py_func(OWN, 2, 1, 1, 0)] > share[class_of.py_func(OWN, 2, 1, 1, 3)]
