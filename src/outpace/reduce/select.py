"""Selection: which drafted nodes are verified.

Drafters propose; this alone cuts. The **path probability** of a node is the probability that the walk reaches it: the
product of ``exp(log_prob)`` from the root down to the node. It never grows downwards, so the most probable nodes, with
ties decided for the earlier node, always hold their own parents.

Example: with at most two nodes, ``7 (0.5) -> 8 (0.9)`` beside ``9 (0.4)`` keeps ``7`` (0.5) and ``8`` (0.45); so does a
least path probability of 0.42.
"""

from __future__ import annotations

import math

import numpy as np

from outpace._compile import compiled
from outpace.errors import ConfigError
from outpace.tree import BoolArray, DraftTrees, Float32Array, Int32Array, UInt32Array, node_depths

_UNLIMITED = np.iinfo(np.int32).max


def select(
    trees: DraftTrees,
    limit: int | Int32Array,
    *,
    total: int | None = None,
    max_depth: Int32Array | None = None,
    min_path_prob: float = 0.0,
) -> DraftTrees:
    """Keep the nodes with the highest path probability.

    Trees compete for ``total`` by path probability alone. Equal probabilities are decided for the node that comes
    first within its tree, then for the earlier tree, so that no tree starves another. Everything after ``limit`` is
    keyword-only, each cutting further: ``total`` serves a cost in step time (`Guard`), and with ``min_path_prob`` a
    mean over the run (`NodeBudget`).

    Args:
        trees: What the drafters proposed. Unchanged.
        limit: Most nodes of each tree, one number or ``int32[B]``.
        total: Most nodes of the batch, or None for no such limit.
        max_depth: ``int32[B]``, deepest level of each tree that may be kept (1 is right under the root), or None. For
            sequences that end soon, where deeper nodes could not be committed.
        min_path_prob: Least path probability of a node that is kept, from 0 (no such limit) to 1.

    Returns:
        The kept nodes in their old order, with parents re-indexed; ``trees`` itself where nothing has to be cut.

    Raises:
        ConfigError: A limit is negative, there is not one limit or depth for each tree, or ``min_path_prob`` is no
            probability.
    """
    if isinstance(limit, np.ndarray):
        if limit.shape != (trees.batch_size,):
            raise ConfigError(
                f"limit must be one number or one for each of {trees.batch_size} trees, found {limit.shape}"
            )
        limits = limit.astype(np.int32, copy=False)
    else:
        limits = np.full(trees.batch_size, min(limit, _UNLIMITED), np.int32)
    most = _UNLIMITED if total is None else min(total, _UNLIMITED)
    if most < 0 or (len(limits) and limits.min() < 0):
        raise ConfigError(f"limits on nodes must be at least 0, found limit {limit}, total {total}")
    if not 0.0 <= min_path_prob <= 1.0:
        raise ConfigError(f"min_path_prob must be from 0 to 1, found {min_path_prob}")
    if max_depth is not None:
        if max_depth.shape != (trees.batch_size,):
            raise ConfigError(f"max_depth must hold one for each of {trees.batch_size} trees, found {max_depth.shape}")
        depths = node_depths(trees.offsets, trees.parents)
        shallow = depths <= np.repeat(max_depth, trees.sizes)
        if not shallow.all():
            trees = DraftTrees(
                *_keep_nodes(trees.offsets, trees.tokens, trees.parents, trees.log_probs, trees.origins, shallow)
            )
    if min_path_prob == 0.0 and not _cuts(trees.offsets, limits, most):
        return trees
    dearest = -math.log(min_path_prob) if min_path_prob else math.inf
    keep, count = _best_nodes(trees.offsets, trees.parents, trees.log_probs, limits, most, dearest)
    if count == trees.num_nodes:
        return trees
    return DraftTrees(*_keep_nodes(trees.offsets, trees.tokens, trees.parents, trees.log_probs, trees.origins, keep))


@compiled
def _cuts(offsets: Int32Array, limits: Int32Array, total: int) -> bool:
    for b in range(len(limits)):
        if offsets[b + 1] - offsets[b] > limits[b]:
            return True
    return bool(offsets[len(limits)] > total)


@compiled
def _best_nodes(
    offsets: Int32Array, parents: Int32Array, log_probs: Float32Array, limits: Int32Array, total: int, dearest: float
) -> tuple[BoolArray, int]:
    """Which nodes stay, and how many; a node's cost is minus the logarithm of its path probability."""
    num_nodes, batch = len(parents), len(limits)
    # float64, and parent plus a number that is at most 0: rounding cannot lift a child over its parent.
    cost = np.empty(num_nodes, np.float64)
    largest = 0
    for b in range(batch):
        begin = offsets[b]
        largest = max(largest, offsets[b + 1] - begin)
        for node in range(begin, offsets[b + 1]):
            parent = parents[node]
            cost[node] = -np.float64(log_probs[node]) + (0.0 if parent < 0 else cost[begin + parent])

    by_index = np.empty(num_nodes, np.int64)
    owner = np.empty(num_nodes, np.int64)
    filled = 0
    for index in range(largest):
        for b in range(batch):
            if offsets[b] + index < offsets[b + 1]:
                by_index[filled], owner[filled] = offsets[b] + index, b
                filled += 1

    keep = np.zeros(num_nodes, np.bool_)
    kept = np.zeros(batch, np.int64)
    count = 0
    # mergesort is stable: equal costs stay in the order of by_index.
    for place in np.argsort(cost[by_index], kind="mergesort"):
        if count == total or cost[by_index[place]] > dearest:
            break
        b = owner[place]
        if kept[b] < limits[b]:
            keep[by_index[place]] = True
            kept[b] += 1
            count += 1
    return keep, count


@compiled
def _keep_nodes(
    offsets: Int32Array,
    tokens: Int32Array,
    parents: Int32Array,
    log_probs: Float32Array,
    origins: UInt32Array,
    keep: BoolArray,
) -> tuple[Int32Array, Int32Array, Int32Array, Float32Array, UInt32Array]:
    count = 0
    for node in range(len(keep)):
        count += keep[node]
    new_offsets = np.zeros(len(offsets), np.int32)
    new_tokens = np.empty(count, np.int32)
    new_parents = np.empty(count, np.int32)
    new_log_probs = np.empty(count, np.float32)
    new_origins = np.empty(count, np.uint32)
    new_index = np.empty(len(keep), np.int32)
    write = 0
    for b in range(len(offsets) - 1):
        begin, new_begin = offsets[b], write
        for node in range(begin, offsets[b + 1]):
            if keep[node]:
                new_index[node] = write - new_begin
                new_tokens[write] = tokens[node]
                new_parents[write] = -1 if parents[node] < 0 else new_index[begin + parents[node]]
                new_log_probs[write] = log_probs[node]
                new_origins[write] = origins[node]
                write += 1
        new_offsets[b + 1] = write
    return new_offsets, new_tokens, new_parents, new_log_probs, new_origins
