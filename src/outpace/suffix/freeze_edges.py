"""The last part of freezing an automaton: each state's edges in order, with an index where they are many."""

from __future__ import annotations

import numpy as np

from outpace._compile import compiled, inner
from outpace.suffix import image as layout
from outpace.suffix.image import EDGE_SIZE, INDEXED, LINEAR, SCANNED, STATE_SIZE
from outpace.tree import Int32Array, Int64Array


@compiled
def arrange_edges(image: Int32Array, ends: Int32Array) -> None:
    """Sort every list of edges, index the long ones and write in the states where they begin.

    Args:
        image: The image, complete but for that; ``UNARY`` or ``NOTHING`` stands in a state's EDGES.
        ends: ``int32[S]``, the row after each state's list. The lists lie in the order of the states, a row is left free
            before each that needs an index, and the last token is not yet marked.
    """
    edges = layout.word(image, layout.EDGES_BEGIN)
    states = layout.word(image, layout.STATES_BEGIN)
    keys = np.empty(256, np.int64)
    row = slot = 0
    for state in range(len(ends)):
        end = layout.word(ends, state)
        degree = end - row
        at = states + state * STATE_SIZE + layout.EDGES
        if image[at] == layout.UNARY or degree == 0:
            continue
        first = row
        if degree > LINEAR:  # the free row counted
            first, degree = row + 1, degree - 1
        if degree > len(keys):
            keys = np.empty(2 * degree, np.int64)
        _sort_edges(image, edges + first * EDGE_SIZE, degree, keys)
        image[at] = row
        if degree > LINEAR:
            image[at] = INDEXED - row
            _write_index(image, edges + row * EDGE_SIZE, degree, slot)
            slot += degree + (degree >> 1)
        last = edges + (end - 1) * EDGE_SIZE
        image[last] = -1 - image[last]
        row = end


@inner
def _sort_edges(image: Int32Array, begin: int, degree: int, keys: Int64Array) -> None:
    """Sort rows by the target's count, highest first, then by where it ends first; by insertion, or a heap if many."""
    if degree == 1:
        return
    for i in range(degree):
        target = layout.word(image, begin + i * EDGE_SIZE + layout.TARGET)
        # Smaller keys come first.
        keys[i] = layout.endpos_of(image, target) - (layout.count_of(image, target) << 32)
    if degree > LINEAR:
        _heap_sort(image, begin, degree, keys)
        return
    for i in range(1, degree):
        key, token = keys[i], image[begin + i * EDGE_SIZE]
        target = layout.word(image, begin + i * EDGE_SIZE + 1)
        j = i
        while j > 0 and keys[j - 1] > key:
            keys[j] = keys[j - 1]
            image[begin + j * EDGE_SIZE] = image[begin + (j - 1) * EDGE_SIZE]
            image[begin + j * EDGE_SIZE + 1] = image[begin + (j - 1) * EDGE_SIZE + 1]
            j -= 1
        keys[j] = key
        image[begin + j * EDGE_SIZE] = token
        image[begin + j * EDGE_SIZE + 1] = target


@inner
def _swap(image: Int32Array, begin: int, keys: Int64Array, i: int, j: int) -> None:
    keys[i], keys[j] = keys[j], keys[i]
    for field in range(EDGE_SIZE):
        one, other = begin + i * EDGE_SIZE + field, begin + j * EDGE_SIZE + field
        image[one], image[other] = image[other], image[one]


@inner
def _heap_sort(image: Int32Array, begin: int, degree: int, keys: Int64Array) -> None:
    for step in range(degree // 2 + degree):
        # First every parent from the last to the first, then the largest goes to the end, one after the other.
        root, size = degree // 2 - 1 - step, degree
        if root < 0:
            size = degree - 1 - (step - degree // 2)
            root = 0
            _swap(image, begin, keys, 0, size)
        while 2 * root + 1 < size:
            child = 2 * root + 1
            if child + 1 < size and keys[child + 1] > keys[child]:
                child += 1
            if keys[child] <= keys[root]:
                break
            _swap(image, begin, keys, root, child)
            root = child


@inner
def _write_index(image: Int32Array, begin: int, degree: int, slot: int) -> None:
    """Fill the row before a sorted list, at word ``begin``, and index what comes after the first edges."""
    image[begin], image[begin + 1] = degree, slot
    num_slots = degree + (degree >> 1)
    slots = layout.word(image, layout.SLOTS_BEGIN) + slot
    for i in range(SCANNED, degree):
        at = layout.first_slot(layout.word(image, begin + (i + 1) * EDGE_SIZE), num_slots)
        while image[slots + at] != 0:
            at += 1
            if at == num_slots:
                at = 0
        image[slots + at] = i + 1
