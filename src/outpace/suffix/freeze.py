"""Building the image of a frozen automaton: Blumer's construction, then renumbering.

The growing automaton (`outpace.suffix.block`) is fed all documents, a separator before each. Then every text position has
one state that nothing links to, a prefix with its separator: these become leaves. All other states but the root are
clones, the inner states.

The growing block is used up on the way: once built, its hash index holds the states' new names, and EDGES of its states
whether they are unary.
"""

from __future__ import annotations

import numpy as np

from outpace._compile import compiled
from outpace.errors import InputError
from outpace.suffix import block as growing
from outpace.suffix import image as layout
from outpace.suffix.freeze_edges import arrange_edges
from outpace.suffix.image import EDGE_SIZE, LINEAR, NARROW_SEPARATOR, ROOT, STATE_SIZE
from outpace.tree import Int32Array, Int64Array

MOST_TOKENS = 2**29  # with a separator before each document; what a growing block holds
_MOST_WORDS = 2**31 - 1
_UNARY = -2  # in EDGES of the growing block, beside NO_EDGE
_FOLLOWER = -1  # in the new numbers: the only target of the state before it


def frozen_image(tokens: Int32Array, offsets: Int64Array) -> Int32Array:
    """Build the image (see `outpace.suffix.image`) of some documents.

    Args:
        tokens: ``int32[n]``, the documents one after the other.
        offsets: ``int64[D + 1]``, where each begins, then ``n``. Documents without tokens are left out.

    Returns:
        ``int32[...]``.

    Raises:
        InputError: The offsets do not fit the tokens, a token id is negative, there is no token at all, or there are
            too many.
    """
    tokens, offsets = np.ascontiguousarray(tokens, np.int32), np.ascontiguousarray(offsets, np.int64)
    _check_input(tokens, offsets)
    offsets = offsets[np.concatenate(([True], np.diff(offsets) > 0))]
    block = _grown_over(tokens, offsets)
    highest = int(tokens.max())
    del tokens
    inner_states = _name_states(block)
    counts, numbers = np.zeros_like(inner_states), np.zeros_like(inner_states)
    _count(block, inner_states, counts, numbers)
    ends = np.empty_like(inner_states)
    num_edges, num_slots = _number(block, inner_states, counts, numbers, ends)
    image = _empty_image(block, len(offsets) - 1, len(counts), num_edges, num_slots, highest)
    _write_text(block, image)
    _write_states(block, inner_states, counts, numbers, ends, image)
    del inner_states, counts, numbers
    _write_edges(block, ends, image)
    del block
    arrange_edges(image, ends)
    image[layout.CHECKSUM] = header_checksum(image)
    return image


def header_checksum(image: Int32Array) -> int:
    """Of the header without the checksum itself: cheap, and changes with every bit of it."""
    total = 17
    for value in image[: layout.CHECKSUM].tolist():
        total = (total * 0x01000193 + (value & 0xFFFFFFFF) + 1) % (2**31 - 1)
    return total


def _check_input(tokens: Int32Array, offsets: Int64Array) -> None:
    if tokens.ndim != 1 or offsets.ndim != 1 or len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(tokens):
        raise InputError(f"offsets must run from 0 to the {len(tokens)} tokens, found {offsets[:1]} to {offsets[-1:]}")
    sizes = np.diff(offsets)
    if (sizes < 0).any():
        document = int(np.flatnonzero(sizes < 0)[0])
        raise InputError(f"offsets must not fall, document {document} has {offsets[document : document + 2].tolist()}")
    if len(tokens) == 0:
        raise InputError(f"there is no token to build an automaton from: {len(sizes)} documents, all empty")
    if len(tokens) + np.count_nonzero(sizes) + 1 > MOST_TOKENS:
        raise InputError(
            f"one automaton holds at most {MOST_TOKENS} tokens, a separator for each document included, found "
            f"{len(tokens)} in {len(sizes)} documents; split them"
        )
    if tokens.min() < 0:
        at = int(np.flatnonzero(tokens < 0)[0])
        document = int(np.searchsorted(offsets, at, "right")) - 1
        raise InputError(f"document {document}: token ids must be at least 0, found {tokens[at]}")


def _grown_over(tokens: Int32Array, offsets: Int64Array) -> Int32Array:
    """The growing automaton of all documents."""
    block = growing.new_block(len(tokens) + len(offsets) - 1)
    separator = np.full(1, growing.SEPARATOR, np.int32)
    document, at = 0, -1
    while True:
        document, at = _extend_documents(block, tokens, offsets, separator, document, at)
        if document == len(offsets) - 1:
            return block
        # Room ran out: one token more through the function that makes room.
        if at < 0:
            block, at = growing.extended(block, separator, 0, 1), int(offsets[document])
        else:
            block, at = growing.extended(block, tokens, at, at + 1), at + 1


@compiled
def _extend_documents(
    block: Int32Array, tokens: Int32Array, offsets: Int64Array, separator: Int32Array, document: int, at: int
) -> tuple[int, int]:
    """Append documents as far as there is room.

    Returns:
        The document and token to go on with; token -1 for the separator before the document.
    """
    while document < len(offsets) - 1:
        if at < 0:
            if growing.extend_block(block, separator, 0, 1) == 0:
                return document, -1
            at = offsets[document]
        end = offsets[document + 1]
        at = growing.extend_block(block, tokens, at, end)
        if at < end:
            return document, at
        document, at = document + 1, -1
    return document, at


@compiled
def _name_states(block: Int32Array) -> Int32Array:
    """Name the leaf of position p ``-1 - p``, and inner states from 0 in the order of their creation.

    Each position's leaf was created at its turn, and no clone ends first where no leaf was yet.

    Returns:
        ``int32[S]``, the inner states.
    """
    _, states, _, names = growing.views(block)
    inner_states = np.empty(block[growing.NUM_STATES] - block[growing.NUM_TOKENS], np.int32)
    names[ROOT] = inner_states[0] = ROOT
    name, position = 1, 0
    for state in range(1, block[growing.NUM_STATES]):
        if states[state, growing.MIN_ENDPOS] == position:
            names[state] = -1 - position
            position += 1
        else:
            names[state] = name
            inner_states[name] = state
            name += 1
    return inner_states


@compiled
def _count(block: Int32Array, inner_states: Int32Array, counts: Int32Array, pending: Int32Array) -> None:
    """Sum the leaves below each inner state, children before parents; ``pending`` ends as it began, 0."""
    text, states, _, names = growing.views(block)
    for state in range(1, block[growing.NUM_STATES]):
        link = names[states[state, growing.LINK]]
        if names[state] > ROOT:
            pending[link] += 1
        elif text[-1 - names[state]] >= 0:
            counts[link] += 1
    for state in inner_states:
        name = names[state]
        while name != ROOT and pending[name] == 0:
            pending[name] = -1  # done
            state = states[state, growing.LINK]
            link = names[state]
            counts[link] += counts[name]
            pending[link] -= 1
            name = link
    pending[:] = 0


@compiled
def _number(
    block: Int32Array, inner_states: Int32Array, counts: Int32Array, numbers: Int32Array, ends: Int32Array
) -> tuple[int, int]:
    """Number the inner states so that the target of a unary one comes next; mark the unary ones in the block.

    The others' lists of edges follow one another in that order. ``ends`` receives by number where each begins, which is
    where it ends as long as nothing is written.

    Returns:
        Rows of edges and slots that all of them need.
    """
    _, states, edges, names = growing.views(block)
    degrees = np.zeros_like(numbers)
    for edge in range(block[growing.NUM_EDGES]):
        degrees[names[edges[edge, growing.SOURCE]]] += 1
    for name in range(1, len(inner_states)):
        state = inner_states[name]
        target = names[states[state, growing.NEXT]]  # ROOT where there is none
        if target > ROOT and counts[target] == counts[name]:
            states[state, growing.EDGES] = _UNARY
            numbers[target] = _FOLLOWER
    number = row = num_slots = 0
    for name in range(len(inner_states)):
        state = inner_states[name]
        if numbers[name] != 0:  # a follower, whether its turn has come or not
            continue
        numbers[name] = number
        while states[state, growing.EDGES] == _UNARY:
            ends[number] = row
            state = states[state, growing.NEXT]
            number += 1
            numbers[names[state]] = number
        degree = degrees[names[state]] + (states[state, growing.NEXT] != ROOT)
        if degree > LINEAR:
            row += 1
            num_slots += degree + (degree >> 1)
        ends[number] = row
        number += 1
        row += degree
    return row, num_slots


def _empty_image(
    block: Int32Array, num_documents: int, num_states: int, num_edges: int, num_slots: int, highest: int
) -> Int32Array:
    """Header and room."""
    text_length = int(block[growing.NUM_TOKENS]) + 1
    narrow = highest < NARROW_SEPARATOR
    sizes = [
        layout.HEADER_SIZE,
        num_documents + 1,
        (text_length + 1) // 2 if narrow else text_length,
        text_length,
        num_states * STATE_SIZE,
        num_edges * EDGE_SIZE,
        num_slots,
    ]
    begins = np.cumsum(sizes)
    if begins[-1] > _MOST_WORDS:
        raise InputError(
            f"the automaton of {text_length} tokens needs {4 * begins[-1]} bytes, it may take {4 * _MOST_WORDS}; "
            "split the documents"
        )
    image = np.zeros(begins[-1], np.int32)
    image[layout.MAGIC_AT], image[layout.VERSION_AT], image[layout.NUM_WORDS] = layout.MAGIC, layout.VERSION, begins[-1]
    image[layout.NUM_TOKENS], image[layout.NUM_DOCUMENTS] = text_length - num_documents - 1, num_documents
    image[layout.TEXT_LENGTH], image[layout.NUM_STATES] = text_length, num_states
    image[layout.NUM_EDGES], image[layout.NUM_SLOTS], image[layout.NARROW] = num_edges, num_slots, narrow
    image[layout.DOCUMENTS_BEGIN : layout.DOCUMENTS_BEGIN + 6] = begins[:-1]
    return image


@compiled
def _write_text(block: Int32Array, image: Int32Array) -> None:
    text, _, _, _ = growing.views(block)
    length = layout.word(image, layout.TEXT_LENGTH)
    begin, document = layout.word(image, layout.TEXT_BEGIN), layout.word(image, layout.DOCUMENTS_BEGIN)
    for position in range(length):
        token = np.int64(-1)
        if position < length - 1 and text[position] >= 0:
            token = np.int64(text[position])
        else:
            image[document] = position
            document += 1
        if image[layout.NARROW] == 0:
            image[begin + position] = token
        elif position & 1:
            image[begin + (position >> 1)] |= (token & NARROW_SEPARATOR) << 16
        else:
            image[begin + (position >> 1)] = token & NARROW_SEPARATOR


@compiled
def _write_states(
    block: Int32Array,
    inner_states: Int32Array,
    counts: Int32Array,
    numbers: Int32Array,
    ends: Int32Array,
    image: Int32Array,
) -> None:
    """Write the links of the leaves, the inner states and the first of their edges; names become final."""
    text, states, _, names = growing.views(block)
    for name in range(len(inner_states)):
        names[inner_states[name]] = numbers[name]
    links, begin = layout.word(image, layout.LINKS_BEGIN), layout.word(image, layout.STATES_BEGIN)
    for state in range(1, block[growing.NUM_STATES]):
        if names[state] < 0:
            image[links - 1 - names[state]] = names[states[state, growing.LINK]]
    for name in range(len(inner_states)):
        state = inner_states[name]
        row = begin + numbers[name] * STATE_SIZE
        image[row + layout.LENGTH] = states[state, growing.LENGTH]
        image[row + layout.LINK] = -1 if state == ROOT else names[states[state, growing.LINK]]
        image[row + layout.ENDPOS] = states[state, growing.MIN_ENDPOS]
        image[row + layout.COUNT] = counts[name]
        image[row + layout.EDGES] = layout.UNARY if states[state, growing.EDGES] == _UNARY else layout.NOTHING
        target = states[state, growing.NEXT]
        if states[state, growing.EDGES] != _UNARY and target != ROOT:
            edge = layout.word(image, layout.EDGES_BEGIN) + ends[numbers[name]] * EDGE_SIZE
            ends[numbers[name]] += 1
            image[edge + layout.TOKEN] = text[states[state, growing.MIN_ENDPOS] + 1]
            image[edge + layout.TARGET] = names[target]


@compiled
def _write_edges(block: Int32Array, ends: Int32Array, image: Int32Array) -> None:
    """Write the other edges behind the first ones, in the order of their creation."""
    _, _, edges, names = growing.views(block)
    begin = layout.word(image, layout.EDGES_BEGIN)
    for edge in range(block[growing.NUM_EDGES]):
        number = names[edges[edge, growing.SOURCE]]
        row = begin + ends[number] * EDGE_SIZE
        ends[number] += 1
        image[row + layout.TOKEN] = edges[edge, growing.TOKEN]
        image[row + layout.TARGET] = names[edges[edge, growing.TARGET]]
