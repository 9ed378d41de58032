"""A suffix automaton as one flat array, and the compiled code that extends and follows it.

The words are defined in `outpace.suffix.growing`.

Layout of a **block**, ``int32[...]``, one array so that a call into compiled code unpacks only one::

    header  [16]                    counts and capacities, fields below
    text    [capacity]              the tokens
    states  [state_capacity, 5]     LENGTH, LINK, MIN_ENDPOS, NEXT, EDGES
    edges   [capacity, 4]           SOURCE, TOKEN, TARGET, SIBLING
    slots   [2 * capacity]          hash index over edges: edge + 1, or 0 where free
    counts  [state_capacity]        end positions of each state, as far as they are kept; only if COUNT_WALK > 0

A state's first transition lies in the state itself: its token is the one after min_endpos, so only the target (NEXT) is
stored. Most states have no other. The rest are edges, found by hash and listed for each state (EDGES, then SIBLING).
A text of n tokens has at most 2 n states, and since transitions number at most states + n - 2, at most n edges: room
is checked once before each token and never runs out within one.

`SEPARATOR` stands in the text before a document. It counts as a token that occurs nowhere else: nothing has a transition
on it, so no match reaches from one document into the next, and every prefix of a document is a state of its own. Where a
state's min_endpos is the end of a document, NEXT is free (ROOT), and all its transitions are edges.

Counting costs a walk along the links for each token, to every suffix that ends there. On text that repeats itself without
end the walk grows with the text, so it stops after COUNT_WALK links: short contexts are then counted too low, never too
high, and the longest ones, which weigh most, exactly.
"""

from __future__ import annotations

import numpy as np

from outpace._compile import compiled
from outpace.errors import InputError
from outpace.tree import Int32Array

HEADER_SIZE = 16
CAPACITY, STATE_CAPACITY, NUM_TOKENS, NUM_STATES, NUM_EDGES, LAST, COUNT_WALK = range(7)
STATE_SIZE = 5
LENGTH, LINK, MIN_ENDPOS, NEXT, EDGES = range(STATE_SIZE)
EDGE_SIZE = 4
SOURCE, TOKEN, TARGET, SIBLING = range(EDGE_SIZE)
ROOT = 0
NO_EDGE = -1
SEPARATOR = np.iinfo(np.int32).min  # stands before a document; no token id

_MIN_CAPACITY = 64
_MAX_CAPACITY = 2**29  # so that twice as many states and slots still have int32 numbers
_PRIMARY = -1  # results of `_find` that are no edge number
_MISSING = -2
_MIX_STATE = np.uint64(0x9E3779B97F4A7C15)
_MIX_TOKEN = np.uint64(0xC2B2AE3D27D4EB4F)
_MIX_BOTH = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)


def new_block(capacity: int, count_walk: int = 0) -> Int32Array:
    """An empty automaton with room for at least ``capacity`` tokens.

    Args:
        capacity: Tokens.
        count_walk: Links to follow for each token to keep counts; 0 for none.
    """
    size = _MIN_CAPACITY
    while size < capacity:
        size *= 2
    block = _allocate(size, size + size // 2, count_walk)
    _start(block)
    return block


def extended(block: Int32Array, tokens: Int32Array, begin: int, end: int) -> Int32Array:
    """Append ``tokens[begin:end]``, `SEPARATOR` among them, and return the block, a larger one if it was full.

    Raises:
        InputError: A token id is negative; the tokens before it were appended.
    """
    while True:
        begin = extend_block(block, tokens, begin, end)
        if begin == end:
            return block
        if begin < 0:
            raise InputError(f"token ids must be at least 0, found {tokens[-1 - begin]}")
        block = _grown(block)


def with_room(block: Int32Array, num_tokens: int) -> Int32Array:
    """The block, or a larger copy if it might be too small for ``num_tokens`` more."""
    while (
        block[NUM_TOKENS] + num_tokens > block[CAPACITY] or block[NUM_STATES] + 2 * num_tokens > block[STATE_CAPACITY]
    ):
        block = _grown(block, num_tokens)
    return block


def _allocate(capacity: int, state_capacity: int, count_walk: int) -> Int32Array:
    if capacity > _MAX_CAPACITY:
        raise InputError(f"a suffix automaton holds at most {_MAX_CAPACITY} tokens, {capacity} are needed")
    size = HEADER_SIZE + capacity + state_capacity * STATE_SIZE + capacity * EDGE_SIZE + 2 * capacity
    block = np.zeros(size + (state_capacity if count_walk else 0), np.int32)
    block[CAPACITY], block[STATE_CAPACITY], block[COUNT_WALK] = capacity, state_capacity, count_walk
    return block


def _grown(block: Int32Array, num_tokens: int = 1) -> Int32Array:
    """A copy with more room: for twice as many tokens, or where ``num_tokens`` more fit, for the most states they can need."""
    capacity, count_walk = int(block[CAPACITY]), int(block[COUNT_WALK])
    if block[NUM_TOKENS] + num_tokens > capacity:
        larger = _allocate(2 * capacity, 3 * capacity, count_walk)
    else:
        larger = _allocate(capacity, 2 * capacity + 2, count_walk)
    _copy_into(block, larger)
    return larger


@compiled
def views(block: Int32Array) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array]:
    """Text, states, edges and slots of a block."""
    capacity, state_capacity = np.int64(block[CAPACITY]), np.int64(block[STATE_CAPACITY])
    states = HEADER_SIZE + capacity
    edges = states + state_capacity * STATE_SIZE
    slots = edges + capacity * EDGE_SIZE
    return (
        block[HEADER_SIZE:states],
        block[states:edges].reshape((state_capacity, STATE_SIZE)),
        block[edges:slots].reshape((capacity, EDGE_SIZE)),
        block[slots : slots + 2 * capacity],
    )


@compiled
def counts_of(block: Int32Array) -> Int32Array:
    """``int32[state_capacity]``, end positions of each state; empty if they are not kept."""
    capacity, state_capacity = np.int64(block[CAPACITY]), np.int64(block[STATE_CAPACITY])
    return block[HEADER_SIZE + capacity + state_capacity * STATE_SIZE + capacity * (EDGE_SIZE + 2) :]


@compiled
def _start(block: Int32Array) -> None:
    _, states, _, _ = views(block)
    block[NUM_STATES] = 1
    states[ROOT, LINK] = -1
    states[ROOT, MIN_ENDPOS] = -1
    states[ROOT, EDGES] = NO_EDGE


@compiled
def _copy_into(block: Int32Array, larger: Int32Array) -> None:
    for field in range(NUM_TOKENS, HEADER_SIZE):
        larger[field] = block[field]
    text, states, edges, _ = views(block)
    new_text, new_states, new_edges, new_slots = views(larger)
    new_text[: block[NUM_TOKENS]] = text[: block[NUM_TOKENS]]
    new_states[: block[NUM_STATES]] = states[: block[NUM_STATES]]
    new_edges[: block[NUM_EDGES]] = edges[: block[NUM_EDGES]]
    if block[COUNT_WALK]:
        counts_of(larger)[: block[NUM_STATES]] = counts_of(block)[: block[NUM_STATES]]
    for edge in range(block[NUM_EDGES]):
        _index_edge(new_edges, new_slots, edge)


@compiled
def first_slot(state: int, token: int, num_slots: int) -> int:
    """Where the search for an edge begins; ``num_slots`` is a power of two."""
    mixed = (np.uint64(state) * _MIX_STATE) ^ (np.uint64(token) * _MIX_TOKEN)
    mixed = (mixed ^ (mixed >> _HALF)) * _MIX_BOTH
    return int(np.int64((mixed >> _HALF) & np.uint64(num_slots - 1)))


@compiled
def _index_edge(edges: Int32Array, slots: Int32Array, edge: int) -> None:
    slot = first_slot(edges[edge, SOURCE], edges[edge, TOKEN], len(slots))
    while slots[slot] != 0:
        slot = (slot + 1) & (len(slots) - 1)
    slots[slot] = edge + 1


@compiled
def _find(text: Int32Array, states: Int32Array, edges: Int32Array, slots: Int32Array, state: int, token: int) -> int:
    """The transition of ``state`` on ``token``: an edge's number, or ``_PRIMARY`` or ``_MISSING``."""
    if states[state, NEXT] != ROOT and text[states[state, MIN_ENDPOS] + 1] == token:
        return _PRIMARY
    if states[state, EDGES] == NO_EDGE:
        return _MISSING
    slot = first_slot(state, token, len(slots))
    while slots[slot] != 0:
        edge = int(slots[slot]) - 1
        if edges[edge, SOURCE] == state and edges[edge, TOKEN] == token:
            return edge
        slot = (slot + 1) & (len(slots) - 1)
    return _MISSING


@compiled
def _add_edge(
    block: Int32Array, states: Int32Array, edges: Int32Array, slots: Int32Array, state: int, token: int, target: int
) -> None:
    """Add a transition on a token that ``state`` has none on."""
    edge = block[NUM_EDGES]
    block[NUM_EDGES] = edge + 1
    edges[edge, SOURCE] = state
    edges[edge, TOKEN] = token
    edges[edge, TARGET] = target
    edges[edge, SIBLING] = states[state, EDGES]
    states[state, EDGES] = edge
    _index_edge(edges, slots, edge)


@compiled
def _add_state(block: Int32Array, states: Int32Array, length: int, min_endpos: int) -> int:
    state = int(block[NUM_STATES])
    block[NUM_STATES] = state + 1
    states[state, LENGTH] = length
    states[state, MIN_ENDPOS] = min_endpos
    states[state, NEXT] = ROOT
    states[state, EDGES] = NO_EDGE
    return state


@compiled
def _append(
    block: Int32Array, text: Int32Array, states: Int32Array, edges: Int32Array, slots: Int32Array, token: int
) -> None:
    """Algorithm 3: Blumer's construction, one token."""
    position = block[NUM_TOKENS]
    text[position] = token
    block[NUM_TOKENS] = position + 1
    state = block[LAST]
    new = _add_state(block, states, states[state, LENGTH] + 1, position)
    block[LAST] = new
    if states[state, NEXT] == ROOT:
        states[state, NEXT] = new
        state = states[state, LINK]
    found = _MISSING
    while state >= 0:
        found = _find(text, states, edges, slots, state, token)
        if found != _MISSING:
            break
        _add_edge(block, states, edges, slots, state, token, new)
        state = states[state, LINK]
    if state < 0:
        states[new, LINK] = ROOT
        return
    target = states[state, NEXT] if found == _PRIMARY else edges[found, TARGET]
    if states[target, LENGTH] == states[state, LENGTH] + 1:
        states[new, LINK] = target
        return
    clone = _add_state(block, states, states[state, LENGTH] + 1, states[target, MIN_ENDPOS])
    if block[COUNT_WALK]:
        counts = counts_of(block)
        counts[clone] = counts[target]
    states[clone, NEXT] = states[target, NEXT]
    edge = states[target, EDGES]
    while edge != NO_EDGE:
        _add_edge(block, states, edges, slots, clone, edges[edge, TOKEN], edges[edge, TARGET])
        edge = edges[edge, SIBLING]
    states[clone, LINK] = states[target, LINK]
    states[target, LINK] = clone
    states[new, LINK] = clone
    while state >= 0:
        found = _find(text, states, edges, slots, state, token)
        if found == _PRIMARY and states[state, NEXT] == target:
            states[state, NEXT] = clone
        elif found >= 0 and edges[found, TARGET] == target:
            edges[found, TARGET] = clone
        else:
            break
        state = states[state, LINK]


@compiled
def _count(block: Int32Array, states: Int32Array, counts: Int32Array) -> None:
    """One more end position for the longest of the text's suffixes."""
    state = block[LAST]
    for _ in range(block[COUNT_WALK]):
        counts[state] += 1
        state = states[state, LINK]
        if state <= ROOT:
            break


@compiled
def _separate(block: Int32Array, text: Int32Array, states: Int32Array) -> None:
    """Begin a document: append the separator, whose state has no suffix but the root."""
    position = block[NUM_TOKENS]
    text[position] = SEPARATOR
    block[NUM_TOKENS] = position + 1
    new = _add_state(block, states, 1, position)
    states[new, LINK] = ROOT
    block[LAST] = new


@compiled
def extend_block(block: Int32Array, tokens: Int32Array, begin: int, end: int) -> int:
    """Append ``tokens[begin:end]`` as far as there is room.

    Returns:
        Index of the first token that was not appended; ``end`` if all were; ``-1 - index`` of a negative token id.
    """
    text, states, edges, slots = views(block)
    counts = counts_of(block)
    for i in range(begin, end):
        if block[NUM_TOKENS] == block[CAPACITY] or block[NUM_STATES] + 2 > block[STATE_CAPACITY]:
            return i
        if tokens[i] >= 0:
            _append(block, text, states, edges, slots, tokens[i])
        elif tokens[i] == SEPARATOR:
            _separate(block, text, states)
        else:
            return -1 - i
        if len(counts):
            _count(block, states, counts)
    return end


@compiled
def matched(block: Int32Array) -> tuple[int, int, int]:
    """State, length and min_endpos of the longest suffix of the text that also ended earlier."""
    _, states, _, _ = views(block)
    state = max(states[block[LAST], LINK], ROOT)  # the root itself has no link
    return state, states[state, LENGTH], states[state, MIN_ENDPOS]


@compiled
def transfer_block(block: Int32Array, state: int, length: int, token: int) -> tuple[int, int]:
    """Algorithm 1; see `outpace.suffix.growing.GrowingAutomaton.transfer`."""
    text, states, edges, slots = views(block)
    found = _find(text, states, edges, slots, state, token)
    while found == _MISSING and state != ROOT:
        state = states[state, LINK]
        length = states[state, LENGTH]
        found = _find(text, states, edges, slots, state, token)
    if found == _MISSING:
        return ROOT, 0
    return (states[state, NEXT] if found == _PRIMARY else edges[found, TARGET]), length + 1


@compiled
def text_of(block: Int32Array) -> Int32Array:
    """The text, ``int32[capacity]``, of which the first ``block[NUM_TOKENS]`` are in use."""
    return block[HEADER_SIZE : HEADER_SIZE + block[CAPACITY]]


@compiled
def ancestor_with_room(block: Int32Array, state: int, room: int, min_length: int) -> tuple[int, int, int]:
    """Follow links until at least ``room`` tokens of text come after min_endpos.

    Returns:
        State, length and min_endpos; where no ancestor of at least ``min_length`` tokens has the room, of the last one.
    """
    _, states, _, _ = views(block)
    while block[NUM_TOKENS] - 1 - states[state, MIN_ENDPOS] < room:
        link = max(states[state, LINK], ROOT)
        if states[link, LENGTH] < max(min_length, 1):
            break
        state = int(link)
    return state, states[state, LENGTH], states[state, MIN_ENDPOS]
