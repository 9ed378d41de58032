"""A tree from all contexts: what the longest match alone throws away.

SAM-Decoding copies what followed the longest match. Here every suffix that occurs elsewhere has a say, in the request's own
text, in earlier responses and in corpora (`outpace.draft.contexts`), and the tree grows best-first by the product of the
estimates along each path, so that one kind of evidence gives a long chain where it is sure and many short branches where
it is not.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from outpace.draft.base import Drafter, Signals
from outpace.draft.contexts import ADDRESS
from outpace.draft.escape import CORPUS, MEMORY, OWN, first_trials
from outpace.draft.growth import grow_trees, take_tokens, walk_prompt
from outpace.draft.sequences import OpenSequences, check_count, check_share, check_switch
from outpace.draft.sources import Sources
from outpace.suffix.addresses import address_of
from outpace.suffix.block import extended, new_block, with_room
from outpace.suffix.frozen import FrozenAutomaton
from outpace.tree import DraftTrees, Int32Array, Int64Array, Origin, Verdicts

_RESERVE = 256  # tokens of output that need no larger block
_COUNT_WALK = 16  # links; real text has 2 to 5, only text that repeats itself without end has more
_CONTEXT = 64  # tokens of a prompt that frozen automata are shown: longer matches are not told apart
_BITS = np.array([Origin.DYNAMIC, Origin.MEMORY, Origin.STATIC], np.int64)
_INT32, _FLOAT32, _UINT32 = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.uint32)


@dataclass(slots=True)
class _Open:
    """One open sequence.

    Attributes:
        slot: Its row in the tables.
        block: The automaton over its own text.
        segments: Frozen automata that its row points at, kept alive by this.
    """

    slot: int
    block: Int32Array
    segments: tuple[FrozenAutomaton, ...]


class SuffixTreeDrafter(Drafter):
    """Grows trees from the posterior of all contexts.

    ``log_probs`` are the posterior's estimates. What decides them beside counts is learned from every committed token, over
    all sequences; no text is shared by that.

    A sequence sees the earlier responses that its namespace had when it was opened. Of a long prompt the frozen automata
    see the last 64 tokens.

    Args:
        draft_size: Most nodes of a tree.
        min_prob: Nodes that are reached with less than this probability are left out.
        dynamic: Draft from the request's own text.
        memory: Draft from earlier responses of the namespace, where ``sources`` has a memory.
        static: Draft from corpora, where ``sources`` has some.
        sources: Earlier responses and corpora.

    Raises:
        ConfigError: An option is out of bounds.
    """

    name = "suffix-tree"

    def __init__(
        self,
        draft_size: int = 64,
        min_prob: float = 0.002,
        dynamic: bool = True,
        memory: bool = True,
        static: bool = True,
        sources: Sources | None = None,
    ) -> None:
        self.draft_size = check_count(self.name, "draft_size", draft_size, 1, 4096)
        self.min_prob = max(check_share(self.name, "min_prob", min_prob), 1e-9)
        self.dynamic = check_switch(self.name, "dynamic", dynamic)
        self.memory = check_switch(self.name, "memory", memory)
        self.static = check_switch(self.name, "static", static)
        self._sources = sources or Sources()
        self._shards = self._sources.static if self.static else ()
        self._sequences: OpenSequences[_Open] = OpenSequences()
        self._trials = first_trials()
        self._free: list[int] = []
        self._last_keys: SequenceOf[int] = []
        self._last_slots: Int64Array = np.zeros(0, np.int64)
        self._num_sources: Int64Array = np.zeros(0, np.int64)
        self._all_sources: Int64Array = np.zeros((0, 1, 3), np.int64)
        self._all_cursors: Int64Array = np.zeros((0, 1, 2), np.int64)

    def open(self, key: int, tokens: Int32Array, namespace: str = "") -> None:
        """Start a sequence; see `Drafter.open`.

        Raises:
            LifecycleError: The key is open.
        """
        segments = self._sources.memory_segments(namespace) if self.memory else ()
        block = new_block(len(tokens) + _RESERVE if self.dynamic else 0, _COUNT_WALK)
        if self.dynamic:
            block = extended(block, tokens, 0, len(tokens))
        frozen = (*segments, *self._shards)
        sources = np.empty((1 + len(frozen), 3), np.int64)
        sources[0] = address_of(block), len(block), OWN
        for place, segment in enumerate(frozen, 1):
            sources[place] = address_of(segment.image), len(segment.image), MEMORY if place <= len(segments) else CORPUS
        cursors = np.zeros((len(sources), 2), np.int64)
        if frozen:
            walk_prompt(sources[None], cursors[None], tokens[-_CONTEXT:])
        self._add(key, block, frozen, sources, cursors)

    def propose(self, keys: SequenceOf[int], caps: Int32Array) -> DraftTrees:
        """Grow a tree for each sequence; see `Drafter.propose`.

        Raises:
            LifecycleError: A key is not open.
        """
        room = len(keys) * self.draft_size
        offsets = np.empty(len(keys) + 1, _INT32)
        tokens, parents = np.empty(room, _INT32), np.empty(room, _INT32)
        log_probs, origins = np.empty(room, _FLOAT32), np.empty(room, _UINT32)
        used = grow_trees(
            self._slots(keys),
            caps,
            self.draft_size,
            self._num_sources,
            self._all_sources,
            self._all_cursors,
            self._trials,
            _BITS,
            self.min_prob,
            offsets,
            tokens,
            parents,
            log_probs,
            origins,
        )
        return DraftTrees(offsets, tokens[:used], parents[:used], log_probs[:used], origins[:used])

    def observe(self, keys: SequenceOf[int], verdicts: Verdicts, signals: Signals | None = None) -> None:
        """Append what was committed, and learn from it; see `Drafter.observe`.

        Raises:
            LifecycleError: A key is not open.
        """
        slots, at = self._slots(keys), 0
        while True:
            at = take_tokens(
                at,
                slots,
                verdicts.token_offsets,
                verdicts.tokens,
                self._num_sources,
                self._all_sources,
                self._all_cursors,
                self._trials,
                self.dynamic,
            )
            if at == len(keys):
                return
            self._enlarge(keys[at], len(verdicts.tokens_of(at)))

    def close(self, key: int) -> None:
        """Forget a sequence.

        Raises:
            LifecycleError: The key is not open.
        """
        sequence = self._sequences[key]
        self._sequences.remove(key)
        self._free.append(sequence.slot)
        self._last_keys = []

    def fork(self, key: int, new_key: int) -> None:
        """Open ``new_key`` as a copy of ``key``.

        Raises:
            LifecycleError: ``key`` is not open, or ``new_key`` is.
        """
        sequence = self._sequences[key]
        count = int(self._num_sources[sequence.slot])
        sources = self._all_sources[sequence.slot, :count].copy()
        block = sequence.block.copy()
        sources[0, ADDRESS] = address_of(block)
        self._add(new_key, block, sequence.segments, sources, self._all_cursors[sequence.slot, :count].copy())

    def _slots(self, keys: SequenceOf[int]) -> Int64Array:
        """``int64[B]``, rows of the tables. Batches hardly change from call to call, so the last one is kept."""
        if keys != self._last_keys:
            self._last_slots = np.array([self._sequences[key].slot for key in keys], np.int64)
            self._last_keys = list(keys)
        return self._last_slots

    def _add(
        self,
        key: int,
        block: Int32Array,
        segments: tuple[FrozenAutomaton, ...],
        sources: Int64Array,
        cursors: Int64Array,
    ) -> None:
        """Give a sequence a row of the tables, larger ones if there is none left."""
        rows, width = self._all_sources.shape[:2]
        slot = self._free[-1] if self._free else rows
        self._sequences.add(key, _Open(slot, block, segments))
        self._last_keys = []
        if self._free:
            self._free.pop()
        else:
            self._free.extend(range(2 * rows, rows, -1))
            rows = 2 * rows + 1
        width = max(width, len(sources))
        if (rows, width) != self._all_sources.shape[:2]:
            self._num_sources = _padded(self._num_sources, (rows,))
            self._all_sources = _padded(self._all_sources, (rows, width, 3))
            self._all_cursors = _padded(self._all_cursors, (rows, width, 2))
        self._num_sources[slot] = len(sources)
        self._all_sources[slot, : len(sources)] = sources
        self._all_cursors[slot, : len(sources)] = cursors

    def _enlarge(self, key: int, more: int) -> None:
        """Make room for ``more`` tokens in a sequence's own automaton."""
        sequence = self._sequences[key]
        sequence.block = with_room(sequence.block, more)
        self._all_sources[sequence.slot, 0] = address_of(sequence.block), len(sequence.block), OWN


def _padded(array: Int64Array, shape: tuple[int, ...]) -> Int64Array:
    larger = np.zeros(shape, np.int64)
    larger[tuple(slice(size) for size in array.shape)] = array
    return larger
