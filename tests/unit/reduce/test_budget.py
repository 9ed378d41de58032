"""A budget of nodes a step on made-up offers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from outpace.errors import ConfigError
from outpace.reduce import NodeBudget, select
from outpace.tree import DraftTrees


def chain(p: float, nodes: int) -> DraftTrees:
    return DraftTrees(
        np.array([0, nodes], np.int32),
        np.arange(nodes, dtype=np.int32),
        np.arange(-1, nodes - 1, dtype=np.int32),
        np.full(nodes, math.log(p), np.float32),
        np.ones(nodes, np.uint32),
    )


def step(budget: NodeBudget, trees: DraftTrees, limit: int = 64) -> DraftTrees:
    min_path_prob, total = budget.offer(trees, limit)
    kept = select(trees, limit, total=total, min_path_prob=min_path_prob)
    budget.spend(kept.num_nodes)
    assert budget.mean <= budget.nodes_per_step
    return kept


def test_more_where_it_is_sure() -> None:
    """Nine unsure drafts, then a sure one, again and again: the sure one takes what the others leave."""
    budget = NodeBudget(4)
    sizes = [step(budget, chain(0.97 if i % 10 == 9 else 0.5, 30)).num_nodes for i in range(3000)]
    late = np.array(sizes[1000:]).reshape(-1, 10)
    assert late[:, 9].mean() > 20
    assert late[:, :9].mean() < 2.5
    assert 3.8 < budget.mean <= 4


def test_offers_within_the_budget_are_kept_whole() -> None:
    budget, trees = NodeBudget(5), chain(0.01, 5)
    assert all(step(budget, trees) is trees for _ in range(50))


def test_little_now_is_more_later() -> None:
    budget = NodeBudget(4)
    for _ in range(500):
        step(budget, chain(0.9, 1))
    assert budget.mean == 1.0
    assert step(budget, chain(0.9, 40)).num_nodes > 20


def test_no_budget_at_all() -> None:
    budget = NodeBudget(0)
    assert all(step(budget, chain(1.0, 8)).num_nodes == 0 for _ in range(20))


def test_less_than_one_node_a_step() -> None:
    budget = NodeBudget(0.3)
    sizes = [step(budget, chain(0.9, 8)).num_nodes for _ in range(2000)]
    assert sizes[:3] == [0, 0, 0]
    assert 0.25 < budget.mean <= 0.3


def test_steps_without_drafts_count() -> None:
    budget = NodeBudget(3)
    for _ in range(4):
        step(budget, DraftTrees.empty(1))
    _, total = budget.offer(chain(0.9, 8), 64)
    assert total == 15


def test_each_tree_of_a_batch_is_a_step() -> None:
    budget = NodeBudget(3)
    trees = DraftTrees.concatenate([chain(0.9, 8), chain(0.9, 8), DraftTrees.empty(1)])
    _, total = budget.offer(trees, 64)
    assert total == 9
    assert budget.mean == 0.0
    budget.spend(9)
    assert budget.mean == 3.0


def test_nodes_beyond_the_limit_are_no_offer() -> None:
    """Long chains of which a step may take 4: all of these fit into the mean, whatever comes behind them."""
    budget = NodeBudget(4)
    assert all(step(budget, chain(0.9, 60), limit=4).num_nodes == 4 for _ in range(300))


def test_the_threshold_follows_what_is_offered() -> None:
    budget = NodeBudget(4)
    for _ in range(3000):
        step(budget, chain(0.98, 40))
    rich = budget.mean
    for _ in range(12000):
        step(budget, chain(0.5, 40))
    assert rich > 3.5
    assert 3.8 < budget.mean <= 4


def test_impossible_nodes_wait_for_the_last() -> None:
    trees = chain(0.5, 2)
    trees.log_probs[1] = -math.inf
    budget = NodeBudget(1)
    assert [step(budget, trees).num_nodes for _ in range(20)] == [1] * 20
    budget = NodeBudget(2)
    assert step(budget, trees) is trees


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_budgets_that_make_no_sense(value: float) -> None:
    with pytest.raises(ConfigError, match="a budget must be a number of nodes a step"):
        NodeBudget(value)
