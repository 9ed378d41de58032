"""Where open sequences stand: each one's growing automaton, and a cursor in every frozen automaton beside it.

A **cursor** is the longest suffix of a sequence's text that occurs in a frozen automaton: a state and a length. Every
committed token moves it (SAM-Decoding, Algorithm 1). Of a prompt only the last `WALKED` tokens are walked at the
beginning, so longer matches than that, which reach back into the prompt, are counted as that long.

Everything of all sequences lies in one **table**, so that a call into compiled code serves a whole batch, whatever
automata each sequence has. Layout, ``int64[slots, width]``, one row a sequence::

    BLOCK, BLOCK_WORDS          address and length of the growing automaton's block; 0 without one
    NUM_STATIC, NUM_CURSORS     the first NUM_STATIC cursors are of corpora, the others of the memory
    IMAGE, WORDS, STATE, LENGTH for each cursor: address and length of the image, state and length of the match

Addresses stay valid because `Cursors` holds the arrays behind them while a sequence is open.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types

from outpace._compile import compiled, inner
from outpace.draft.sequences import OpenSequences
from outpace.kernels.simd import operation
from outpace.suffix.block import NUM_TOKENS, extend_block, extended, new_block, text_of, with_room
from outpace.suffix.frozen import FrozenAutomaton
from outpace.suffix.image import step_frozen
from outpace.tree import Int32Array, Int64Array

WALKED = 64  # tokens of a prompt
RESERVE = 256  # tokens of output that need no larger block

BLOCK, BLOCK_WORDS, NUM_STATIC, NUM_CURSORS = range(4)
FIRST_CURSOR = 4
IMAGE, WORDS, STATE, LENGTH = range(4)
CURSOR_SIZE = 4

_FEW_SLOTS, _FEW_CURSORS = 4, 8


class Cursors:
    """Growing automata and cursors of all open sequences.

    Attributes:
        table: ``int64[slots, width]``, for compiled code; see the module. Another array after `open`.

    Args:
        dynamic: Whether each sequence has a growing automaton over its own text.
        count_walk: Of that automaton, see `outpace.suffix.block.new_block`.
    """

    def __init__(self, dynamic: bool = True, count_walk: int = 0) -> None:
        self.dynamic, self.count_walk = dynamic, count_walk
        self.table = np.zeros((_FEW_SLOTS, FIRST_CURSOR + _FEW_CURSORS * CURSOR_SIZE), np.int64)
        self._slots: OpenSequences[int] = OpenSequences()
        self._free = list(range(_FEW_SLOTS))
        self._blocks: dict[int, Int32Array] = {}  # by slot, as the next
        self._automata: dict[int, tuple[FrozenAutomaton, ...]] = {}
        self._last_keys: list[int] = []
        self._last_slots = np.zeros(0, np.int64)

    def open(
        self,
        key: int,
        tokens: Int32Array,
        static: SequenceOf[FrozenAutomaton] = (),
        memory: SequenceOf[FrozenAutomaton] = (),
    ) -> None:
        """Start a sequence.

        Args:
            key: Its number.
            tokens: ``int32[prompt]``.
            static: Automata of corpora.
            memory: Automata of the memory, oldest first. None of them may change later.

        Raises:
            LifecycleError: The key is open.
            InputError: A token id is negative.
        """
        block = (
            extended(new_block(len(tokens) + RESERVE, self.count_walk), tokens, 0, len(tokens))
            if self.dynamic
            else None
        )
        slot = self._add(key, (*static, *memory))
        row = self.table[slot]
        row[:FIRST_CURSOR] = 0, 0, len(static), len(static) + len(memory)
        for at, automaton in enumerate(self._automata[slot]):
            begin = FIRST_CURSOR + at * CURSOR_SIZE
            row[begin : begin + CURSOR_SIZE] = address_of(automaton.image), len(automaton.image), 0, 0
        if block is not None:
            self._set_block(slot, block)
        if self._automata[slot]:
            _walk(row, tokens, max(len(tokens) - WALKED, 0), len(tokens))

    def fork(self, key: int, new_key: int) -> None:
        """Open ``new_key`` as a copy of ``key``.

        Raises:
            LifecycleError: ``key`` is not open, or ``new_key`` is.
        """
        old = self._slots[key]
        slot = self._add(new_key, self._automata[old])
        self.table[slot] = self.table[old]
        if self.dynamic:
            self._set_block(slot, self._blocks[old].copy())

    def close(self, key: int) -> None:
        """Forget a sequence.

        Raises:
            LifecycleError: The key is not open.
        """
        slot = self._slots[key]
        self._slots.remove(key)
        self.table[slot] = 0
        self._blocks.pop(slot, None)
        del self._automata[slot]
        self._free.append(slot)
        self._last_keys, self._last_slots = [], np.zeros(0, np.int64)

    def slots(self, keys: SequenceOf[int]) -> Int64Array:
        """``int64[B]``, the table's row of each sequence.

        Raises:
            LifecycleError: A key is not open.
        """
        if keys != self._last_keys:
            slots = self._slots
            self._last_slots = np.array([slots[key] for key in keys], np.int64)
            self._last_keys = list(keys)
        return self._last_slots

    def advance(self, keys: SequenceOf[int], offsets: Int32Array, tokens: Int32Array) -> None:
        """Append committed tokens to the texts, and move the cursors.

        Args:
            keys: Of ``B`` sequences.
            offsets: ``int32[B + 1]`` into ``tokens``.
            tokens: ``int32[n]``.

        Raises:
            LifecycleError: A key is not open.
            InputError: A token id is negative.
        """
        slots = self.slots(keys)
        full, at = _advance(self.table, slots, offsets, tokens, -1)
        while full < len(slots):  # a block has no more room
            slot = int(slots[full])
            self._set_block(slot, extended(self._blocks[slot], tokens, at, int(offsets[full + 1])))
            full, at = _advance(self.table, slots, offsets, tokens, full)

    def make_room(self, key: int, num_tokens: int) -> None:
        """Make sure that the text of a sequence can take ``num_tokens`` more without another block.

        Raises:
            LifecycleError: The key is not open.
        """
        slot = self._slots[key]
        self._set_block(slot, with_room(self._blocks[slot], num_tokens))

    def match(self, key: int) -> list[tuple[int, int]]:
        """State and length of each cursor of a sequence, those of corpora first; for tests.

        Raises:
            LifecycleError: The key is not open.
        """
        row = self.table[self._slots[key]]
        cursors = row[FIRST_CURSOR:].reshape(-1, CURSOR_SIZE)[: row[NUM_CURSORS]]
        return [(int(cursor[STATE]), int(cursor[LENGTH])) for cursor in cursors]

    def text(self, key: int) -> Int32Array:
        """``int32[n]``, a copy of a sequence's text; there must be growing automata. For tests.

        Raises:
            LifecycleError: The key is not open.
        """
        block = self._blocks[self._slots[key]]
        return text_of(block)[: block[NUM_TOKENS]].copy()

    def _add(self, key: int, automata: tuple[FrozenAutomaton, ...]) -> int:
        """A row for a new sequence."""
        if not self._free:
            rows = len(self.table)
            self.table = np.concatenate([self.table, np.zeros_like(self.table)])
            self._free = list(range(rows, 2 * rows))
        width = FIRST_CURSOR + len(automata) * CURSOR_SIZE
        if width > self.table.shape[1]:
            self.table = np.pad(self.table, ((0, 0), (0, width - self.table.shape[1])))
        slot = self._free[-1]
        self._slots.add(key, slot)
        self._free.pop()
        self._automata[slot] = automata
        return slot

    def _set_block(self, slot: int, block: Int32Array) -> None:
        self._blocks[slot] = block
        self.table[slot, BLOCK], self.table[slot, BLOCK_WORDS] = address_of(block), len(block)


def address_of(array: Int32Array) -> int:
    """Where an array's first element lies; valid as long as somebody holds the array."""
    return int(array.__array_interface__["data"][0])


@operation(types.voidptr, types.int64)
def pointer_at(builder: Any, address: Any) -> Any:
    """A ``void*`` to an address."""
    return builder.inttoptr(address, ir.IntType(8).as_pointer())


@inner
def array_at(address: Any, words: Any) -> Any:
    """The ``int32[words]`` at an address."""
    return numba.carray(pointer_at(address), (words,), np.int32)  # type: ignore[attr-defined]  # re-exported without saying so


@inner
def block_of(row: Any) -> Any:
    """The block of a row's growing automaton."""
    return array_at(row[BLOCK], row[BLOCK_WORDS])


@inner
def image_of(row: Any, cursor: Any) -> Any:
    """The image that a row's cursor with this number stands in."""
    begin = FIRST_CURSOR + cursor * CURSOR_SIZE
    return array_at(row[begin + IMAGE], row[begin + WORDS])


@inner
def longest_of(row: Any, first: Any, last: Any) -> Any:
    """The cursor from ``first`` to ``last - 1`` with the longest match, the later one of equals; -1 if none has any."""
    best, longest = -1, 1
    for cursor in range(first, last):
        length = row[FIRST_CURSOR + cursor * CURSOR_SIZE + LENGTH]
        if length >= longest:
            best, longest = cursor, length
    return best


@compiled
def _walk(row: Int64Array, tokens: Int32Array, begin: int, end: int) -> None:
    """Move the cursors of one sequence along ``tokens[begin:end]``."""
    for cursor in range(row[NUM_CURSORS]):
        image = image_of(row, cursor)
        at = FIRST_CURSOR + cursor * CURSOR_SIZE
        state, length = row[at + STATE], row[at + LENGTH]
        for i in range(begin, end):
            state, length = step_frozen(image, state, length, tokens[i])
        row[at + STATE], row[at + LENGTH] = state, length


@compiled
def _advance(
    table: Int64Array, slots: Int64Array, offsets: Int32Array, tokens: Int32Array, done: int
) -> tuple[int, int]:
    """Move all cursors, if ``done`` is -1, and extend the texts after that of sequence ``done``.

    Returns:
        The sequence whose block is full, and the first token that it has no room for; ``B, 0`` if all are done. A
        negative token is left to whoever extends the block.
    """
    if done < 0:
        for b in range(len(slots)):
            _walk(table[slots[b]], tokens, offsets[b], offsets[b + 1])
    for b in range(done + 1, len(slots)):
        row = table[slots[b]]
        if row[BLOCK] != 0:
            at = extend_block(block_of(row), tokens, offsets[b], offsets[b + 1])
            if at != offsets[b + 1]:
                return b, (at if at >= 0 else -1 - at)
    return len(slots), 0
