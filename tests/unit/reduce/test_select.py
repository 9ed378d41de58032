import math

import numpy as np
import pytest

from outpace.errors import ConfigError
from outpace.reduce import select
from outpace.tree import DraftTrees
from verify_support import make_tree


def logs(*probabilities):
    return [math.log(p) for p in probabilities]


EXAMPLE = make_tree([7, 8, 9], [-1, 0, -1], logs(0.5, 0.9, 0.4))


def test_the_most_probable_paths_stay():
    kept = select(EXAMPLE, 2).validate()
    assert kept.tokens.tolist() == [7, 8]  # 0.5 and 0.45, before 0.4
    assert kept.parents.tolist() == [-1, 0]
    assert kept.log_probs.tolist() == EXAMPLE.log_probs[:2].tolist()
    assert kept.origins.tolist() == [0, 1]


def test_parents_are_indexed_anew():
    tree = make_tree([1, 2, 3, 4, 5], [-1, -1, 1, 0, 2], logs(0.1, 0.9, 0.8, 0.9, 0.7))
    kept = select(tree, 3).validate()
    assert kept.tokens.tolist() == [2, 3, 5]
    assert kept.parents.tolist() == [-1, 0, 1]
    assert kept.origins.tolist() == [1, 2, 4]


def test_equals_go_to_the_earlier_node_then_to_the_earlier_tree():
    chain = make_tree([1, 2, 3], [-1, 0, 1], [0.0, 0.0, 0.0])
    assert select(chain, 2).tokens.tolist() == [1, 2]
    kept = select(DraftTrees.concatenate([chain, chain]), 3, total=3)
    assert kept.sizes.tolist() == [2, 1]


def test_trees_compete_for_the_total():
    weak = make_tree([1, 2], [-1, 0], logs(0.2, 0.5))
    strong = make_tree([3, 4, 5], [-1, 0, 1], logs(0.9, 0.9, 0.9))
    kept = select(DraftTrees.concatenate([weak, strong, DraftTrees.empty(1)]), 10, total=4).validate()
    assert kept.sizes.tolist() == [1, 3, 0]
    kept = select(DraftTrees.concatenate([weak, strong]), 2, total=3).validate()
    assert kept.sizes.tolist() == [1, 2]


def test_one_limit_for_each_tree():
    kept = select(DraftTrees.concatenate([EXAMPLE, EXAMPLE, EXAMPLE]), np.array([0, 3, 1], np.int32)).validate()
    assert kept.sizes.tolist() == [0, 3, 1]
    assert kept.tokens.tolist() == [7, 8, 9, 7]


def test_nodes_deeper_than_the_depth_go_first():
    chain = make_tree([1, 2, 3], [-1, 0, 1], [0.0, 0.0, 0.0])
    trees = DraftTrees.concatenate([chain, EXAMPLE, chain])
    kept = select(trees, 9, max_depth=np.array([2, 1, 3], np.int32)).validate()
    assert kept.tokens.tolist() == [1, 2, 7, 9, 1, 2, 3]
    assert select(trees, 9, max_depth=np.array([3, 2, 9], np.int32)) is trees
    # What is too deep takes nobody's place: 9 stays although 8 is more likely.
    assert select(EXAMPLE, 2, max_depth=np.array([1], np.int32)).tokens.tolist() == [7, 9]
    with pytest.raises(ConfigError, match=r"each of 1 trees, found \(2,\)"):
        select(EXAMPLE, 2, max_depth=np.array([1, 1], np.int32))


def test_nodes_of_no_probability_keep_their_parents():
    tree = make_tree([1, 2, 3], [-1, 0, 1], [-math.inf, 0.0, -math.inf])
    assert select(tree, 2).validate().tokens.tolist() == [1, 2]


@pytest.mark.parametrize(("limit", "total"), [(3, None), (2**40, None), (3, 3), (5, 2**40)])
def test_without_a_cut_the_same_object_returns(limit, total):
    assert select(EXAMPLE, limit, total=total) is EXAMPLE


@pytest.mark.parametrize(("limit", "total"), [(0, None), (3, 0)])
def test_a_limit_of_zero_leaves_empty_trees(limit, total):
    kept = select(DraftTrees.concatenate([EXAMPLE, EXAMPLE]), limit, total=total).validate()
    assert kept.offsets.tolist() == [0, 0, 0]


def test_an_empty_batch():
    empty = DraftTrees.empty(0)
    assert select(empty, 3, total=2) is empty


def test_the_input_stays_unchanged():
    before = [array.copy() for array in (EXAMPLE.offsets, EXAMPLE.tokens, EXAMPLE.parents, EXAMPLE.log_probs)]
    select(EXAMPLE, 1)
    for array, old in zip((EXAMPLE.offsets, EXAMPLE.tokens, EXAMPLE.parents, EXAMPLE.log_probs), before, strict=True):
        np.testing.assert_array_equal(array, old)


@pytest.mark.parametrize(
    ("limit", "total"), [(-1, None), (3, -1), (np.array([1, -1], np.int32), None), (np.array([1], np.int32), None)]
)
def test_limits_that_make_no_sense_are_refused(limit, total):
    with pytest.raises(ConfigError):
        select(DraftTrees.concatenate([EXAMPLE, EXAMPLE]), limit, total=total)


def test_nodes_below_the_least_path_probability_go():
    assert select(EXAMPLE, 3, min_path_prob=0.42).validate().tokens.tolist() == [7, 8]
    assert select(EXAMPLE, 1, min_path_prob=0.42).tokens.tolist() == [7]
    assert select(EXAMPLE, 3, min_path_prob=0.38) is EXAMPLE
    certain = make_tree([1, 2], [-1, 0], [0.0, -1e-3])
    assert select(certain, 3, min_path_prob=1.0).tokens.tolist() == [1]
    for value in (-0.1, 1.1, math.nan):
        with pytest.raises(ConfigError, match="min_path_prob must be from 0 to 1"):
            select(EXAMPLE, 3, min_path_prob=value)
