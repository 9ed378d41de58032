"""Uniting draft trees: what several drafters proposed for one sequence, as one tree with one estimate for each node.

**Union.** A node is the tokens on its path. Each path that any part proposed is in the union once, with the origins of all
parts that proposed it.

**Mixed estimate.** Under one parent, each part that proposed children gives each of them a probability; what is left to 1 is
its own doubt. A part knows nothing of tokens that it did not propose, so it leaves its doubt to the others, in the
proportions in which they would share it:

    p_k(t) = the part's estimate                                           if it proposed t
           = doubt_k * others(t) / (1 - sum of others(u) over its own u)   otherwise

where ``others`` is the mean of the other parts. The estimate for ``t`` is then the mean of all ``p_k(t)``. In both means a
part counts by the odds of its surest child: one that says 0.9 for some token knows more than one that spreads its guesses.
Siblings sum to at most 1, since each ``p_k`` does.

Example: one part says 0.9 for ``7``; another, 0.5 for ``7`` and 0.3 for ``8``. Their odds are 9 and 1. The first leaves its
doubt of 0.1 to the second, which gives ``8`` 0.3 of the 0.5 that are not ``7``'s: 0.06. So ``7`` is mixed to 0.86, ``8`` to
0.084.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

from outpace._compile import compiled, inner
from outpace.tree import DraftTrees, Float32Array, Int32Array, UInt32Array

_Float64Array = npt.NDArray[np.float64]

_NOT_PROPOSED = -1.0
_LEAST_CHANCE = 1e-9
_SUREST = 0.98  # beyond it, odds would leave other parts no say at all


def unite(parts: SequenceOf[DraftTrees]) -> DraftTrees:
    """The union of each sequence's trees, with mixed estimates; see the module.

    Args:
        parts: What each drafter proposed for the same ``B`` sequences; at least one.

    Returns:
        ``B`` trees. Nodes stand in the order in which the parts name them first, so a tree begins with the first part's.
    """
    return DraftTrees(
        *_unite(
            np.concatenate([part.offsets for part in parts]),
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.parents for part in parts]),
            np.concatenate([part.log_probs for part in parts]),
            np.concatenate([part.origins for part in parts]),
            len(parts),
        )
    )


@compiled
def _unite(
    part_offsets: Int32Array,
    part_tokens: Int32Array,
    part_parents: Int32Array,
    part_log_probs: Float32Array,
    part_origins: UInt32Array,
    num_parts: int,
) -> tuple[Int32Array, Int32Array, Int32Array, Float32Array, UInt32Array]:
    stride = len(part_offsets) // num_parts
    batch, total = stride - 1, len(part_tokens)
    offsets = np.zeros(stride, np.int32)
    tokens, parents = np.empty(total, np.int32), np.empty(total, np.int32)
    log_probs, origins = np.empty(total, np.float32), np.empty(total, np.uint32)
    largest = _most_nodes(part_offsets, num_parts)
    # Of one tree, by node plus 1; the root comes first. 0 ends a list of siblings.
    first_child, last_child = np.empty(largest + 1, np.int32), np.empty(largest + 1, np.int32)
    next_sibling, place = np.empty(largest + 1, np.int32), np.empty(largest + 1, np.int32)
    chances = np.empty((num_parts, largest + 1))
    mixer = np.empty((num_parts, 3))
    used = 0
    for b in range(batch):
        count, part_base = 0, 0
        first_child[0] = 0
        for k in range(num_parts):
            begin = part_base + part_offsets[k * stride + b]
            end = part_base + part_offsets[k * stride + b + 1]
            part_base += part_offsets[k * stride + batch]
            for node in range(begin, end):
                token = part_tokens[node]
                parent = 0 if part_parents[node] < 0 else place[part_parents[node]]
                child = first_child[parent]
                while child > 0 and tokens[used + child - 1] != token:
                    child = next_sibling[child]
                if child == 0:
                    count += 1
                    child = count
                    if first_child[parent] == 0:
                        first_child[parent] = child
                    else:
                        next_sibling[last_child[parent]] = child
                    last_child[parent] = child
                    first_child[child], next_sibling[child] = 0, 0
                    tokens[used + child - 1], parents[used + child - 1] = token, parent - 1
                    origins[used + child - 1] = 0
                    for other in range(num_parts):
                        chances[other, child] = _NOT_PROPOSED
                place[node - begin] = child
                origins[used + child - 1] |= part_origins[node]
                chances[k, child] = max(math.exp(part_log_probs[node]), _LEAST_CHANCE)
        for parent in range(count + 1):
            if first_child[parent] > 0:
                _mix(chances, mixer, first_child[parent], next_sibling, log_probs[used:])
        used += count
        offsets[b + 1] = used
    return offsets, tokens[:used], parents[:used], log_probs[:used], origins[:used]


@inner
def _most_nodes(part_offsets: Int32Array, num_parts: int) -> int:
    """Nodes of the parts' trees for one sequence together, at most."""
    stride, largest = len(part_offsets) // num_parts, 0
    for b in range(stride - 1):
        size = 0
        for k in range(num_parts):
            size += part_offsets[k * stride + b + 1] - part_offsets[k * stride + b]
        largest = max(largest, size)
    return largest


@inner
def _mix(
    chances: _Float64Array, mixer: _Float64Array, first: int, next_sibling: Int32Array, log_probs: Float32Array
) -> None:
    """Mix the estimates of one node's children.

    Args:
        chances: ``float64[K, nodes + 1]``: each part's estimate for each node, negative where it did not propose it.
        mixer: ``float64[K, 3]``, scratch: of each part its weight (0 if it proposed none of the children), its doubt, and
            what a unit of its doubt is worth to the tokens of others.
        first: The first child, the others follow in ``next_sibling``.
        next_sibling: ``int32[nodes + 1]``.
        log_probs: Where the estimate of node ``i`` (child ``i + 1``) goes.
    """
    num_parts = len(chances)
    total_weight = 0.0
    for k in range(num_parts):
        mass, best = 0.0, 0.0
        child = first
        while child > 0:
            mass += max(chances[k, child], 0.0)
            best = max(best, chances[k, child])
            child = next_sibling[child]
        if mass > 1.0:
            child = first
            while child > 0:
                if chances[k, child] > 0.0:
                    chances[k, child] /= mass
                child = next_sibling[child]
            best /= mass
            mass = 1.0
        best = min(best, _SUREST)
        mixer[k, 0], mixer[k, 1] = best / (1.0 - best), 1.0 - mass
        total_weight += mixer[k, 0]
    for k in range(num_parts):
        weight, known = mixer[k, 0], 0.0  # what the others think of this part's own tokens
        if 0.0 < weight < total_weight:
            child = first
            while child > 0:
                if chances[k, child] >= 0.0:
                    known += _by_others(chances, mixer, k, child) / (total_weight - weight)
                child = next_sibling[child]
        mixer[k, 2] = 1.0 / max(1.0 - known, _LEAST_CHANCE)
    child = first
    while child > 0:
        mixed = 0.0
        for k in range(num_parts):
            weight, own = mixer[k, 0], chances[k, child]
            if weight > 0.0:
                if own < 0.0:
                    others = _by_others(chances, mixer, k, child) / (total_weight - weight)
                    own = mixer[k, 1] * others * mixer[k, 2]
                mixed += weight / total_weight * own
        log_probs[child - 1] = math.log(min(max(mixed, _LEAST_CHANCE), 1.0))
        child = next_sibling[child]


@inner
def _by_others(chances: _Float64Array, mixer: _Float64Array, k: int, child: int) -> float:
    """Weighted sum of the other parts' estimates for a child."""
    total = 0.0
    for other in range(len(chances)):
        if other != k:
            total += mixer[other, 0] * max(chances[other, child], 0.0)
    return total
