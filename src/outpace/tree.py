"""Draft trees and verdicts: what is proposed for a batch, and what became of it.

Words (the same everywhere):

- **Root**: the last pending token of a sequence. A draft tree hangs under it; the root itself is no node.
- **Node**: one drafted token. Its parent comes before it in the arrays; ``-1`` is the root.
- **Committed**: what a verify step adds to a sequence, the accepted path and then one **bonus token**.

Example: under the root the drafter proposes ``7`` or ``9``, and ``8`` after ``7``::

    tokens  = [ 7,  8,  9]
    parents = [-1,  0, -1]

If the model chooses ``7`` after the root, ``8`` after that and ``5`` after that, the path is ``[0, 1]``, the bonus
token ``5``, and ``7 8 5`` is committed.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from outpace._compile import compiled
from outpace.errors import DrafterError

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt32Array = npt.NDArray[np.uint32]
UInt64Array = npt.NDArray[np.uint64]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


class Origin(enum.IntFlag):
    """Where a node came from, one bit each; a node that several drafters proposed carries several."""

    LOOKUP = 1  # prompt lookup decoding
    LLMA = 2  # copy spans after a short match
    DYNAMIC = 4  # suffix automaton over the request's own text
    ORACLE = 8  # test drafter that knows the continuation
    STATIC = 16  # frozen automata over corpora
    MEMORY = 32  # frozen automata over earlier responses
    RECYCLING = 64  # Token Recycling: the model's own candidates after earlier occurrences of a token


@dataclass(frozen=True, eq=False, slots=True)
class DraftTrees:
    """The draft trees of one batch, flat.

    Attributes:
        offsets: ``int32[B + 1]``, tree ``b`` holds nodes ``offsets[b]:offsets[b + 1]``.
        tokens: ``int32[n]``, token ids. Siblings never hold the same token.
        parents: ``int32[n]``, index within the tree, smaller than the node's own; ``-1`` under the root.
        log_probs: ``float32[n]``, at most 0: the estimated log-probability that the node is accepted given that its
            parent is.
        origins: ``uint32[n]``, bits of `Origin`.
    """

    offsets: Int32Array
    tokens: Int32Array
    parents: Int32Array
    log_probs: Float32Array
    origins: UInt32Array

    @property
    def batch_size(self) -> int:
        """Number of trees."""
        return len(self.offsets) - 1

    @property
    def num_nodes(self) -> int:
        """Nodes of all trees together, roots excluded."""
        return len(self.tokens)

    @property
    def sizes(self) -> Int32Array:
        """``int32[B]``, nodes of each tree."""
        return np.diff(self.offsets)

    def tree(self, index: int) -> DraftTrees:
        """Tree ``index`` alone, as a view (batch size 1)."""
        begin, end = int(self.offsets[index]), int(self.offsets[index + 1])
        return DraftTrees(
            np.array([0, end - begin], np.int32),
            self.tokens[begin:end],
            self.parents[begin:end],
            self.log_probs[begin:end],
            self.origins[begin:end],
        )

    @staticmethod
    def empty(batch_size: int) -> DraftTrees:
        """``batch_size`` trees without nodes: a plain autoregressive step."""
        return DraftTrees(
            np.zeros(batch_size + 1, np.int32),
            np.empty(0, np.int32),
            np.empty(0, np.int32),
            np.empty(0, np.float32),
            np.empty(0, np.uint32),
        )

    @staticmethod
    def concatenate(parts: SequenceOf[DraftTrees]) -> DraftTrees:
        """The trees of all parts, in order, as one batch."""
        if not parts:
            return DraftTrees.empty(0)
        if len(parts) == 1:
            return parts[0]
        sizes = np.concatenate([part.sizes for part in parts])
        offsets = np.zeros(len(sizes) + 1, np.int32)
        np.cumsum(sizes, out=offsets[1:])
        return DraftTrees(
            offsets,
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.parents for part in parts]),
            np.concatenate([part.log_probs for part in parts]),
            np.concatenate([part.origins for part in parts]),
        )

    def validate(self, vocab_size: int | None = None) -> DraftTrees:
        """Check every invariant of the class and return ``self``.

        Args:
            vocab_size: If given, tokens must be below it.

        Raises:
            DrafterError: With the first violation.
        """
        expected: dict[str, tuple[Any, Any]] = {
            "offsets": (self.offsets, np.int32),
            "tokens": (self.tokens, np.int32),
            "parents": (self.parents, np.int32),
            "log_probs": (self.log_probs, np.float32),
            "origins": (self.origins, np.uint32),
        }
        for name, (array, dtype) in expected.items():
            if array.dtype != dtype or array.ndim != 1:
                raise DrafterError(f"{name} must be a 1-D {np.dtype(dtype)} array, found {array.ndim}-D {array.dtype}")
        num_nodes = len(self.tokens)
        if len(self.offsets) == 0 or self.offsets[0] != 0 or self.offsets[-1] != num_nodes:
            raise DrafterError(
                f"offsets must run from 0 to {num_nodes}, found {self.offsets[:1]} to {self.offsets[-1:]}"
            )
        if not len(self.parents) == len(self.log_probs) == len(self.origins) == num_nodes:
            raise DrafterError(
                f"arrays of nodes differ in length: tokens {num_nodes}, parents {len(self.parents)}, "
                f"log_probs {len(self.log_probs)}, origins {len(self.origins)}"
            )
        limit = np.iinfo(np.int32).max if vocab_size is None else vocab_size
        problem, tree, node = _first_violation(self.offsets, self.tokens, self.parents, self.log_probs, limit)
        if problem:
            raise DrafterError(f"tree {tree}, node {node}: {_VIOLATIONS[problem]}")
        return self


_VIOLATIONS = {
    1: "offsets decrease",
    2: "the parent must come before the node (or be -1, the root)",
    3: "the token id is negative or not in the vocabulary",
    4: "log_probs must be at most 0 and not NaN",
    5: "a sibling holds the same token",
}


@compiled
def _first_violation(
    offsets: Int32Array, tokens: Int32Array, parents: Int32Array, log_probs: Float32Array, vocab_size: int
) -> tuple[int, int, int]:
    for b in range(len(offsets) - 1):
        begin, end = offsets[b], offsets[b + 1]
        if end < begin:
            return 1, b, 0
        for i in range(end - begin):
            node = begin + i
            if parents[node] < -1 or parents[node] >= i:
                return 2, b, i
            if tokens[node] < 0 or tokens[node] >= vocab_size:
                return 3, b, i
            if not log_probs[node] <= 0.0:
                return 4, b, i
            for j in range(i):
                if parents[begin + j] == parents[node] and tokens[begin + j] == tokens[node]:
                    return 5, b, i
    return 0, 0, 0


@compiled
def node_depths(offsets: Int32Array, parents: Int32Array) -> Int32Array:
    """Depth of every node, ``int32[n]``: 1 right under the root."""
    depths = np.empty(len(parents), np.int32)
    for b in range(len(offsets) - 1):
        begin = offsets[b]
        for node in range(begin, offsets[b + 1]):
            parent = parents[node]
            depths[node] = 1 if parent < 0 else depths[begin + parent] + 1
    return depths


@compiled
def ancestor_bits(offsets: Int32Array, parents: Int32Array) -> UInt64Array:
    """Who each node may attend to inside its tree.

    Returns:
        ``uint64[n, words]``: bit ``j % 64`` of word ``j // 64`` is set if node ``j`` of the same tree is an ancestor of
        the node, or the node itself. ``words`` fits the largest tree and is at least 1.
    """
    largest = 1
    for b in range(len(offsets) - 1):
        largest = max(largest, offsets[b + 1] - offsets[b])
    words = (largest + 63) // 64
    bits = np.zeros((len(parents), words), np.uint64)
    for b in range(len(offsets) - 1):
        begin = offsets[b]
        for node in range(begin, offsets[b + 1]):
            if parents[node] >= 0:
                bits[node] = bits[begin + parents[node]]
            own = node - begin
            bits[node, own // 64] |= np.uint64(1) << np.uint64(own % 64)
    return bits


@dataclass(frozen=True, eq=False, slots=True)
class Verdicts:
    """What became of one batch of draft trees.

    Attributes:
        path_offsets: ``int32[B + 1]`` into ``path``.
        path: ``int32[a]``, accepted nodes of each tree (index within the tree), from the root downwards.
        token_offsets: ``int32[B + 1]`` into ``tokens``.
        tokens: ``int32[c]``, committed tokens: those on the accepted path, then the bonus token. A stop condition may
            cut both lists short; then ``path`` ends where the tokens do.
    """

    path_offsets: Int32Array
    path: Int32Array
    token_offsets: Int32Array
    tokens: Int32Array

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        return len(self.path_offsets) - 1

    def path_of(self, index: int) -> Int32Array:
        """Accepted nodes of sequence ``index``, as a view."""
        return self.path[self.path_offsets[index] : self.path_offsets[index + 1]]

    def tokens_of(self, index: int) -> Int32Array:
        """Committed tokens of sequence ``index``, as a view."""
        return self.tokens[self.token_offsets[index] : self.token_offsets[index + 1]]
