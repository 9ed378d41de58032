"""Static draft trees as they were published: which candidates of which candidates are drafted.

A node of a shape is named by its path: the rank of the candidate at each step from the root. A shape is written level by
level: for each node of the level above, in order, how many of its best candidates it has as children; zeros at the end of a
level are left out. Example: ``((2,), (2, 1))`` has the nodes ``0 1`` (below the root), ``00 01`` (below ``0``) and ``10``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from outpace.errors import ConfigError, UnknownNameError
from outpace.tree import Int32Array

_Levels = tuple[tuple[int, ...], ...]

# Token Recycling (Luo et al., 2024), section 3.3; the published code calls it 2.2.2. 80 nodes, 6 levels.
_TOKEN_RECYCLING: _Levels = (
    (8,),
    (8, 4, 3, 2, 1, 1, 1, 1),
    (8, 3, 2, 1, 1, 1, 1, 1, 2, 1, 0, 0, 1, 0, 0, 1, 0, 1, 1),
    (5, 2, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1),
    (3, 1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1),
    (2, 0, 0, 1),
)
# What SAM-Decoding gives Token Recycling (section 4); default_tree_6_60 in the published code. 60 nodes, 5 levels.
_SAM_DECODING: _Levels = (
    (7,),
    (6, 5, 3, 2, 2, 1, 1),
    (3, 2, 2, 1, 1, 0, 3, 2, 1, 1, 0, 1, 1, 0, 1, 0, 1, 0, 1),
    (2, 1, 0, 1, 0, 0, 0, 0, 0, 2, 0, 0, 1, 0, 0, 0, 1),
    (2, 0, 1, 0, 1),
)
_SHAPES = {"token-recycling": _TOKEN_RECYCLING, "sam-decoding": _SAM_DECODING}
_BY_SIZE = {80: "token-recycling", 60: "sam-decoding"}


@dataclass(frozen=True, eq=False, slots=True)
class Shape:
    """A static tree, its nodes breadth-first.

    Attributes:
        name: As options name it.
        parents: ``int32[n]``, index of the parent; ``-1`` under the root.
        ranks: ``int32[n]``, which of its parent's candidates a node holds; 0 is the best.
        depths: ``int32[n]``, 1 right under the root.
    """

    name: str
    parents: Int32Array
    ranks: Int32Array
    depths: Int32Array

    def __len__(self) -> int:
        """Nodes, the root excluded."""
        return len(self.parents)

    def paths(self) -> list[tuple[int, ...]]:
        """The path of each node, in order."""
        found: list[tuple[int, ...]] = []
        for parent, rank in zip(self.parents.tolist(), self.ranks.tolist(), strict=True):
            found.append((*(found[parent] if parent >= 0 else ()), rank))
        return found


def find_shape(name: str | int) -> Shape:
    """A published shape by name (``token-recycling``, ``sam-decoding``) or number of nodes (80, 60).

    Raises:
        UnknownNameError: There is none of this name.
        ConfigError: Neither a name nor a number.
    """
    if isinstance(name, bool) or not isinstance(name, str | int | np.integer):
        raise ConfigError(f"a tree shape is a name or a number of nodes, found {name!r}")
    known = name if isinstance(name, str) else _BY_SIZE.get(int(name), "")
    if known not in _SHAPES:
        raise UnknownNameError("tree shape", str(name), (*_SHAPES, *map(str, _BY_SIZE)))
    return _shape(known, _SHAPES[known])


def _shape(name: str, levels: _Levels) -> Shape:
    parents: list[int] = []
    ranks: list[int] = []
    depths: list[int] = []
    above = [-1]
    for depth, counts in enumerate(levels, 1):
        begin = len(parents)
        for parent, count in zip_longest(above, counts, fillvalue=0):
            parents += [parent] * count
            ranks += range(count)
            depths += [depth] * count
        above = list(range(begin, len(parents)))
    return Shape(name, np.array(parents, np.int32), np.array(ranks, np.int32), np.array(depths, np.int32))
