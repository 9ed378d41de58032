"""Growing draft trees best-first, and keeping the cursors of many sequences: one compiled call for a batch."""

from __future__ import annotations

import numpy as np

from outpace._compile import compiled, inner
from outpace.draft import cursors as layout
from outpace.draft.contexts import MOST_TOKENS, cursors_of, learn, posterior, step
from outpace.draft.cursors import array_at, block_of, image_of
from outpace.draft.escape import Float64Array
from outpace.suffix.block import CAPACITY, NUM_STATES, NUM_TOKENS, STATE_CAPACITY, extend_block
from outpace.suffix.image import step_frozen
from outpace.tree import Int32Array, Int64Array

_TOKEN, _PARENT, _KIND = range(3)  # columns of what waits


@compiled
def grow_trees(
    slots: Int64Array,
    caps: Int32Array,
    draft_size: int,
    table: Int64Array,
    trials: Float64Array,
    bits: Int64Array,
    least: float,
    offsets: Int32Array,
    pool: Int64Array,
    base: int,
) -> int:
    """One tree for each sequence: always the most probable path that is not in the tree yet, as far as the cap allows.

    Args:
        slots: ``int64[B]``, rows of the table.
        caps: ``int32[B]``, most nodes of each tree.
        draft_size: Most nodes of any.
        table: ``int64[slots, width]``, see `outpace.draft.cursors`.
        trials: ``float64[classes, 2]``.
        bits: ``int64[kinds]``, the `Origin` of nodes of each kind of source.
        least: Nodes that are reached with less than this probability are left out.
        offsets: ``int32[B + 1]``, receives the trees' offsets.
        pool: ``int64[4]``, where tokens, parents, log_probs and origins go; see `outpace.draft.pool.NodePool`.
        base: The first node there that is free, of at least ``B * draft_size``.

    Returns:
        Nodes of all trees.
    """
    most_nodes, most_sources = 1, 1
    for b in range(len(slots)):
        most_nodes = max(most_nodes, min(caps[b], draft_size))
        most_sources = max(most_sources, 1 + table[slots[b], layout.NUM_CURSORS])
    node_cursors = np.empty((most_nodes + 1, most_sources, 2), np.int64)  # the root's first
    waiting = np.empty((most_nodes, 3), np.int64)
    waiting_reach = np.empty((most_nodes, 2), np.float64)
    at = np.empty((most_sources, 2), np.int64)
    found_tokens, found_probs = np.empty(MOST_TOKENS, np.int32), np.empty(MOST_TOKENS, np.float64)
    found_kinds = np.empty(MOST_TOKENS, np.int64)
    new_tokens, new_counts = np.empty((2, MOST_TOKENS), np.int32), np.empty((2, MOST_TOKENS), np.int64)
    end = base + len(slots) * draft_size
    tokens, parents, origins = array_at(pool[0], end), array_at(pool[1], end), array_at(pool[3], end)
    log_probs = array_at(pool[2], end).view(np.float32)
    offsets[0] = 0
    for b in range(len(slots)):
        row, cap, begin = table[slots[b]], min(int(caps[b]), draft_size), base + int(offsets[b])
        cursors_of(row, node_cursors[0])
        size, num_waiting, parent, reached = 0, 0, -1, 1.0
        while size < cap:
            floor = least
            if num_waiting == cap - size:
                floor = max(least, waiting_reach[0, 0])
            found = posterior(
                row,
                node_cursors[parent + 1],
                trials,
                floor / reached,
                at,
                found_tokens,
                found_probs,
                found_kinds,
                new_tokens,
                new_counts,
            )
            for k in range(found):
                num_waiting = _wait(
                    waiting,
                    waiting_reach,
                    num_waiting,
                    cap - size,
                    least,
                    reached * found_probs[k],
                    found_probs[k],
                    found_tokens[k],
                    parent,
                    found_kinds[k],
                )
            if num_waiting == 0:
                break
            num_waiting -= 1  # the last is the best
            node = begin + size
            above = waiting[num_waiting, _PARENT]
            tokens[node], parents[node] = waiting[num_waiting, _TOKEN], above
            log_probs[node] = min(0.0, np.log(waiting_reach[num_waiting, 1]))
            origins[node] = bits[waiting[num_waiting, _KIND]]
            reached = waiting_reach[num_waiting, 0]
            if size + 1 < cap:
                step(row, node_cursors[above + 1], node_cursors[size + 1], int(tokens[node]))
            parent = size
            size += 1
        offsets[b + 1] = offsets[b] + size
    return int(offsets[len(slots)])


@inner
def _wait(
    waiting: Int64Array,
    waiting_reach: Float64Array,
    count: int,
    room: int,
    least: float,
    reach: float,
    prob: float,
    token: int,
    parent: int,
    kind: int,
) -> int:
    """Put a candidate in its place among those that wait, the best last; with no room left the worst one goes.

    Returns:
        How many wait now.
    """
    if reach < least or (count == room and reach <= waiting_reach[0, 0]):
        return count
    if count == room:
        place = 0
        while place + 1 < count and waiting_reach[place + 1, 0] < reach:
            _move(waiting, waiting_reach, place + 1, place)
            place += 1
    else:
        place = count
        while place > 0 and waiting_reach[place - 1, 0] >= reach:
            _move(waiting, waiting_reach, place - 1, place)
            place -= 1
        count += 1
    waiting[place, _TOKEN], waiting[place, _PARENT], waiting[place, _KIND] = token, parent, kind
    waiting_reach[place, 0], waiting_reach[place, 1] = reach, prob
    return count


@inner
def _move(waiting: Int64Array, waiting_reach: Float64Array, source: int, target: int) -> None:
    for column in range(3):
        waiting[target, column] = waiting[source, column]
    waiting_reach[target, 0], waiting_reach[target, 1] = waiting_reach[source, 0], waiting_reach[source, 1]


@compiled
def take_tokens(
    first: int,
    slots: Int64Array,
    token_offsets: Int32Array,
    tokens: Int32Array,
    table: Int64Array,
    trials: Float64Array,
) -> int:
    """Append committed tokens to each sequence: learn from them, extend its automaton, move its cursors.

    Args:
        first: Sequence of the batch to begin with.
        slots: ``int64[B]``, rows of the table.
        token_offsets: ``int32[B + 1]`` into ``tokens``.
        tokens: ``int32[n]``.
        table: ``int64[slots, width]``, see `outpace.draft.cursors`.
        trials: ``float64[classes, 2]``.

    Returns:
        The first sequence whose automaton has no room for its tokens, or ``B``. Those before it are done.
    """
    most_sources = 1
    for slot in slots:
        most_sources = max(most_sources, 1 + table[slot, layout.NUM_CURSORS])
    cursors, at = np.empty((most_sources, 2), np.int64), np.empty((most_sources, 2), np.int64)
    seen, new_tokens = np.empty(MOST_TOKENS, np.int32), np.empty((2, MOST_TOKENS), np.int32)
    new_counts = np.empty((2, MOST_TOKENS), np.int64)
    for b in range(first, len(slots)):
        row = table[slots[b]]
        begin, end = int(token_offsets[b]), int(token_offsets[b + 1])
        if row[layout.BLOCK] != 0:
            own, more = block_of(row), end - begin
            if own[NUM_TOKENS] + more > own[CAPACITY] or own[NUM_STATES] + 2 * more > own[STATE_CAPACITY]:
                return b
        for i in range(begin, end):
            cursors_of(row, cursors)
            learn(row, cursors, trials, int(tokens[i]), at, seen, new_tokens, new_counts)
            if row[layout.BLOCK] != 0:
                extend_block(block_of(row), tokens, i, i + 1)
            for k in range(row[layout.NUM_CURSORS]):
                place = layout.FIRST_CURSOR + k * layout.CURSOR_SIZE
                row[place + layout.STATE], row[place + layout.LENGTH] = step_frozen(
                    image_of(row, k), row[place + layout.STATE], row[place + layout.LENGTH], int(tokens[i])
                )
    return len(slots)
