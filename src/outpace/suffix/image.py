"""A frozen suffix automaton as one flat array, and the compiled code that follows it.

The words are defined in `outpace.suffix.frozen`.

Layout of an **image**, ``int32[...]``, one array so that a file is one memory map and a call into compiled code unpacks
only one::

    header     [32]         fields below
    documents  [D + 1]      text position of the separator before each document, then of the last separator
    text       [L]          a separator, the first document, a separator, ..., the last document, a separator;
                            two uint16 to a word (the lower half first) if all ids are below 65,535, else a word each
    links      [L]          for the leaf at each position its link, an inner state
    states     [S, 5]       LENGTH, LINK, ENDPOS, COUNT, EDGES of each inner state
    edges      [E, 2]       TOKEN, TARGET
    slots      [K]          hash indexes over long lists of edges

The edges of a state are a list of consecutive rows: the target with the highest count first, of equal ones that which
occurs first. The TOKEN of the last row is stored as ``-1 - token``. EDGES says where the list begins, or

- ``UNARY``: every occurrence is followed by the same token, so the only target has the same count. It has the next
  state's number, and its token is that after ENDPOS. Most states are of this kind or leaves, and need no edges;
- ``NOTHING``: every occurrence ends a document;
- ``-3 - row``: a list of more than 32 edges. This row holds the number of edges and the begin of a hash index in
  ``slots``, and the list begins in the next. The index has ``number + number // 2`` slots; each holds 0 or the
  position of an edge in its list, plus one. The first 8 edges are the most frequent, and are not in it.
"""

from __future__ import annotations

import numpy as np

from outpace._compile import compiled
from outpace.tree import Int32Array

MAGIC = 0x5A46504F  # "OPFZ" in a file; other byte orders read another number
VERSION = 1
HEADER_SIZE = 32
(
    MAGIC_AT,
    VERSION_AT,
    NUM_WORDS,
    NUM_TOKENS,
    NUM_DOCUMENTS,
    TEXT_LENGTH,
    NUM_STATES,
    NUM_EDGES,
    NUM_SLOTS,
    NARROW,
    DOCUMENTS_BEGIN,
    TEXT_BEGIN,
    LINKS_BEGIN,
    STATES_BEGIN,
    EDGES_BEGIN,
    SLOTS_BEGIN,
) = range(16)
CHECKSUM = HEADER_SIZE - 1
STATE_SIZE = 5
LENGTH, LINK, ENDPOS, COUNT, EDGES = range(STATE_SIZE)
EDGE_SIZE = 2
TOKEN, TARGET = range(EDGE_SIZE)
ROOT = 0
UNARY, NOTHING, INDEXED = -1, -2, -3
LINEAR = 32  # most edges of a list without an index
SCANNED = 8  # edges of an indexed list that are looked through first
NARROW_SEPARATOR = 0xFFFF

_MIX = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)


@compiled
def word(image: Int32Array, at: int) -> int:
    """A word of the image, as a number that sums with others do not overflow."""
    return int(np.int64(image[at]))


@compiled
def text_at(image: Int32Array, position: int) -> int:
    """The token at a text position, from 0 to ``image[TEXT_LENGTH] - 1``; -1 for a separator."""
    begin = word(image, TEXT_BEGIN)
    if image[NARROW] == 0:
        return word(image, begin + position)
    token = (word(image, begin + (position >> 1)) >> ((position & 1) << 4)) & NARROW_SEPARATOR
    return -1 if token == NARROW_SEPARATOR else token


@compiled
def link_of(image: Int32Array, state: int) -> int:
    """The inner state of the longest suffix that occurs more often; never ask for the root's."""
    if state < 0:
        return word(image, word(image, LINKS_BEGIN) - 1 - state)
    return word(image, word(image, STATES_BEGIN) + state * STATE_SIZE + LINK)


@compiled
def length_of(image: Int32Array, state: int) -> int:
    """Tokens of the longest string of a state; for a leaf from the begin of its document, found by bisection."""
    if state >= 0:
        return word(image, word(image, STATES_BEGIN) + state * STATE_SIZE + LENGTH)
    position = -1 - state
    begin = word(image, DOCUMENTS_BEGIN)
    low, high = 0, word(image, NUM_DOCUMENTS)
    while low < high:  # the last separator that is at or before the position
        middle = (low + high + 1) >> 1
        if image[begin + middle] <= position:
            low = middle
        else:
            high = middle - 1
    return position - word(image, begin + low)


@compiled
def count_of(image: Int32Array, state: int) -> int:
    """How often the strings of a state occur; for the root the number of tokens."""
    if state < 0:
        return 1
    return word(image, word(image, STATES_BEGIN) + state * STATE_SIZE + COUNT)


@compiled
def endpos_of(image: Int32Array, state: int) -> int:
    """Text position of the last token where a state's strings end first; -1 for the root."""
    if state < 0:
        return -1 - state
    return word(image, word(image, STATES_BEGIN) + state * STATE_SIZE + ENDPOS)


@compiled
def first_slot(token: int, num_slots: int) -> int:
    """Where the search in an index begins."""
    mixed = (np.uint64(token) * _MIX) >> _HALF
    return int(np.int64((mixed * np.uint64(num_slots)) >> _HALF))


@compiled
def _indexed(image: Int32Array, row: int, token: int) -> tuple[bool, int]:
    """The target on ``token`` in a list with an index, whose first row has word number ``row``."""
    edge = row + EDGE_SIZE
    for _ in range(SCANNED):
        if image[edge] == token:
            return True, word(image, edge + TARGET)
        edge += EDGE_SIZE
    num_edges = word(image, row)
    num_slots = num_edges + (num_edges >> 1)
    begin = word(image, SLOTS_BEGIN) + image[row + 1]
    slot = first_slot(token, num_slots)
    found = word(image, begin + slot)
    while found != 0:
        edge = row + found * EDGE_SIZE
        other = word(image, edge)
        if other == token or other == -1 - token:
            return True, word(image, edge + TARGET)
        slot += 1
        if slot == num_slots:
            slot = 0
        found = word(image, begin + slot)
    return False, ROOT


@compiled
def next_of(image: Int32Array, state: int, token: int) -> tuple[bool, int]:
    """Whether a state has a transition on a token, and where it leads (any number if not); a negative token has none."""
    if token < 0:
        return False, ROOT
    if state < 0:
        return text_at(image, -state) == token, state - 1
    row = word(image, STATES_BEGIN) + state * STATE_SIZE
    begin = word(image, row + EDGES)
    if begin == UNARY:
        return text_at(image, word(image, row + ENDPOS) + 1) == token, state + 1
    if begin == NOTHING:
        return False, ROOT
    if begin <= INDEXED:
        return _indexed(image, word(image, EDGES_BEGIN) + (INDEXED - begin) * EDGE_SIZE, token)
    edge = word(image, EDGES_BEGIN) + begin * EDGE_SIZE
    other = word(image, edge)
    while other >= 0:
        if other == token:
            return True, word(image, edge + TARGET)
        edge += EDGE_SIZE
        other = word(image, edge)
    return other == -1 - token, word(image, edge + TARGET)


@compiled
def step_frozen(image: Int32Array, state: int, length: int, token: int) -> tuple[int, int]:
    """Match one more token of some other text (Algorithm 1): follow links until there is a transition.

    Args:
        image: The automaton.
        state: Where the text's longest suffix that occurs in the automaton ends; 0 to begin with.
        length: Tokens of that suffix.
        token: The text's next token.

    Returns:
        The same two for the text with ``token`` appended; ``(0, 0)`` if the token occurs nowhere.
    """
    found, target = next_of(image, state, token)
    while not found:
        if state == ROOT:
            return ROOT, 0
        state = link_of(image, state)
        length = length_of(image, state)
        found, target = next_of(image, state, token)
    return target, length + 1


@compiled
def continuations(
    image: Int32Array, state: int, most: int, tokens_out: Int32Array, counts_out: Int32Array, states_out: Int32Array
) -> int:
    """The most frequent next tokens of a state, most frequent first; of equal ones, that which followed first.

    Args:
        image: The automaton.
        state: A state.
        most: How many to write at most.
        tokens_out: ``int32[>= most]``, receives the tokens.
        counts_out: ``int32[>= most]``, receives how often each follows.
        states_out: ``int32[>= most]``, receives the transitions' targets.

    Returns:
        How many were written.
    """
    if most <= 0:
        return 0
    begin = UNARY if state < 0 else word(image, word(image, STATES_BEGIN) + state * STATE_SIZE + EDGES)
    if begin == NOTHING:
        return 0
    if begin == UNARY:
        token = text_at(image, endpos_of(image, state) + 1)
        if token < 0:  # only after a leaf
            return 0
        tokens_out[0] = token
        counts_out[0] = count_of(image, state)
        states_out[0] = state - 1 if state < 0 else state + 1
        return 1
    if begin <= INDEXED:
        begin = INDEXED - begin + 1
    edge = word(image, EDGES_BEGIN) + begin * EDGE_SIZE
    written = 0
    token = 0
    while written < most and token >= 0:
        token = word(image, edge)
        target = word(image, edge + TARGET)
        tokens_out[written] = token if token >= 0 else -1 - token
        counts_out[written] = count_of(image, target)
        states_out[written] = target
        written += 1
        edge += EDGE_SIZE
    return written
