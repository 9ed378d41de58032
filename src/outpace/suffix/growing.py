"""The dynamic suffix automaton of SAM-Decoding (section 3, Algorithms 1 and 3).

Words:

- A **state** stands for all substrings of the text that end at the same set of positions. Its **length** is that of the
  longest of them, its **link** the state of the longest suffix that ends at more positions, its **min_endpos** the
  earliest of these positions. State 0, the **root**, is the empty string; its min_endpos is -1.
- The **matched state** is that of the longest suffix of the text that also ended somewhere earlier. The text after its
  min_endpos is how the story went on the first time.

Example: after ``[7, 8, 9, 7, 8]`` the longest earlier suffix is ``7 8``, first seen at positions 0 and 1. So length is
2, min_endpos 1, and what followed is ``9 7 8``.

The matching state needs no second walk. After extension it is the link of the state of the whole text: that link is the
longest suffix with another end position, which is what transferring the matching state first and extending then gives.
(Transferring it *after* the extension would only find the end of the text itself.) It also stays right where the
extension clones the state in which the match ended, which a stored state does not.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np

from outpace.suffix.audit import audit
from outpace.suffix.block import (
    HEADER_SIZE,
    MIN_ENDPOS,
    NUM_STATES,
    NUM_TOKENS,
    counts_of,
    extended,
    matched,
    new_block,
    transfer_block,
    views,
)
from outpace.tree import Int32Array


class Match(NamedTuple):
    """The longest suffix of the text that also ended earlier.

    Attributes:
        state: Its state; 0 if no suffix did.
        length: Its tokens.
        min_endpos: Position of its last token where it ended first; -1 for the empty match.
    """

    state: int
    length: int
    min_endpos: int


class GrowingAutomaton:
    """A suffix automaton that grows with its text.

    Extending by a token costs amortised O(1) time whatever the alphabet, and about 60 bytes of capacity.

    Args:
        tokens: ``int32[n]``, the text so far.
        reserve: Tokens to leave room for beyond it.
        count_walk: Keep counts of end positions, with a walk of at most this many links a token; 0 for no counts.

    Raises:
        InputError: A token id is negative.
    """

    __slots__ = ("block",)

    def __init__(self, tokens: Int32Array | SequenceOf[int] = (), reserve: int = 0, count_walk: int = 0) -> None:
        text = np.ascontiguousarray(tokens, np.int32)
        self.block = new_block(len(text) + reserve, count_walk)
        self.extend(text)

    def __len__(self) -> int:
        """Tokens of the text."""
        return int(self.block[NUM_TOKENS])

    @property
    def num_states(self) -> int:
        """States, the root included."""
        return int(self.block[NUM_STATES])

    @property
    def nbytes(self) -> int:
        """Bytes in use and reserved."""
        return self.block.nbytes

    @property
    def text(self) -> Int32Array:
        """``int32[len(self)]``, a view that the next extension may leave behind."""
        return self.block[HEADER_SIZE : HEADER_SIZE + len(self)]

    @property
    def match(self) -> Match:
        """The longest suffix of the text that also ended earlier."""
        return Match(*matched(self.block))

    def extend(self, tokens: Int32Array | SequenceOf[int]) -> None:
        """Append to the text (Algorithm 3, for each token).

        Args:
            tokens: ``int32[k]``, token ids.

        Raises:
            InputError: A token id is negative; the tokens before it were appended.
        """
        array = np.ascontiguousarray(tokens, np.int32)
        self.block = extended(self.block, array, 0, len(array))

    def transfer(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Match one more token of some *other* text (Algorithm 1).

        Args:
            state: Where that text's longest suffix in this automaton ends; 0 to begin with.
            length: Tokens of that suffix.
            token: Its next token.

        Returns:
            The same two for the text with ``token`` appended.
        """
        return transfer_block(self.block, state, length, token)

    def count(self, state: int) -> int:
        """End positions of the strings of ``state``; too low where walks were cut short, and 0 where none are kept."""
        counts = counts_of(self.block)
        return int(counts[state]) if len(counts) else 0

    def min_endpos(self, state: int) -> int:
        """Earliest position at which the strings of ``state`` end."""
        return int(views(self.block)[1][state, MIN_ENDPOS])

    def fork(self) -> GrowingAutomaton:
        """An independent copy."""
        twin = object.__new__(GrowingAutomaton)
        twin.block = self.block.copy()
        return twin

    def check(self) -> None:
        """Audit the whole structure in pure Python; for tests and debugging.

        Raises:
            AssertionError: Naming the first invariant that does not hold.
        """
        audit(self.block)
