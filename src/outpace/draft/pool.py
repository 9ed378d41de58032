"""Room for the nodes of trees, cut from larger arrays.

Four allocations for each call of ``propose`` take longer than filling them. What was cut off once is never written again, so
trees may be kept.
"""

from __future__ import annotations

import numpy as np

from outpace.draft.cursors import address_of
from outpace.tree import DraftTrees, Float32Array, Int32Array, Int64Array, UInt32Array

_NODES = 8192  # of one piece


class NodePool:
    """Arrays of nodes, and how far they are used up.

    Attributes:
        addresses: ``int64[4]``, where tokens, parents, log_probs and origins lie, for compiled code; changed in place.

    Args:
        addresses: The array to keep them in.
    """

    def __init__(self, addresses: Int64Array) -> None:
        self.addresses = addresses
        self._used, self._size = 0, 0
        self._arrays: tuple[Int32Array, Int32Array, Float32Array, UInt32Array]

    def reserve(self, room: int) -> int:
        """See that ``room`` more nodes fit; returns the number of the first of them."""
        if self._used + room > self._size or self._size == 0:
            self._used, self._size = 0, max(_NODES, room)
            tokens, parents = np.empty(self._size, np.int32), np.empty(self._size, np.int32)
            log_probs, origins = np.empty(self._size, np.float32), np.empty(self._size, np.uint32)
            self._arrays = tokens, parents, log_probs, origins
            arrays = (tokens, parents, log_probs.view(np.int32), origins.view(np.int32))
            self.addresses[:] = [address_of(array) for array in arrays]
        return self._used

    def take(self, offsets: Int32Array, count: int) -> DraftTrees:
        """Cut off the first ``count`` nodes that were reserved, as trees with these offsets."""
        begin = self._used
        end = self._used = begin + count
        tokens, parents, log_probs, origins = self._arrays
        return DraftTrees(offsets, tokens[begin:end], parents[begin:end], log_probs[begin:end], origins[begin:end])
