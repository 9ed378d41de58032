"""A tree from all contexts: what the longest match alone throws away.

SAM-Decoding copies what followed the longest match. Here every suffix that occurs elsewhere has a say, in the request's own
text, in earlier responses and in corpora (`outpace.draft.contexts`), and the tree grows best-first by the product of the
estimates along each path, so that one kind of evidence gives a long chain where it is sure and many short branches where
it is not.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from outpace.draft.base import Drafter, Signals
from outpace.draft.cursors import Cursors
from outpace.draft.escape import first_trials
from outpace.draft.growth import grow_trees, take_tokens
from outpace.draft.pool import NodePool
from outpace.draft.sequences import check_count, check_share, check_switch
from outpace.draft.sources import Sources
from outpace.tree import DraftTrees, Int32Array, Origin, Verdicts

COUNT_WALK = 16  # links; real text has 2 to 5, only text that repeats itself without end has more
_BITS = np.array([Origin.DYNAMIC, Origin.MEMORY, Origin.STATIC], np.int64)
_INT32 = np.dtype(np.int32)


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
        self._cursors = Cursors(self.dynamic, COUNT_WALK)
        self._trials = first_trials()
        self._pool = NodePool(np.zeros(4, np.int64))

    @property
    def has_foreign_text(self) -> bool:
        """Whether there are corpora, or a memory, which may have been loaded."""
        return bool(self._sources.corpora) or self._sources.memory is not None or super().has_foreign_text

    def open(self, key: int, tokens: Int32Array, namespace: str = "") -> None:
        """Start a sequence; see `Drafter.open`.

        Raises:
            LifecycleError: The key is open.
        """
        segments = self._sources.memory_segments(namespace) if self.memory else ()
        self._cursors.open(key, tokens, self._shards, segments)

    def propose(self, keys: SequenceOf[int], caps: Int32Array) -> DraftTrees:
        """Grow a tree for each sequence; see `Drafter.propose`.

        Raises:
            LifecycleError: A key is not open.
        """
        slots = self._cursors.slots(keys)
        offsets = np.empty(len(keys) + 1, _INT32)
        base = self._pool.reserve(len(keys) * self.draft_size)
        used = grow_trees(
            slots,
            caps,
            self.draft_size,
            self._cursors.table,
            self._trials,
            _BITS,
            self.min_prob,
            offsets,
            self._pool.addresses,
            base,
        )
        return self._pool.take(offsets, used)

    def observe(self, keys: SequenceOf[int], verdicts: Verdicts, signals: Signals | None = None) -> None:
        """Append what was committed, and learn from it; see `Drafter.observe`.

        Raises:
            LifecycleError: A key is not open.
        """
        cursors = self._cursors
        slots, at = cursors.slots(keys), 0
        while True:
            at = take_tokens(at, slots, verdicts.token_offsets, verdicts.tokens, cursors.table, self._trials)
            if at == len(keys):
                return
            cursors.make_room(keys[at], len(verdicts.tokens_of(at)))

    def close(self, key: int) -> None:
        """Forget a sequence.

        Raises:
            LifecycleError: The key is not open.
        """
        self._cursors.close(key)

    def fork(self, key: int, new_key: int) -> None:
        """Open ``new_key`` as a copy of ``key``.

        Raises:
            LifecycleError: ``key`` is not open, or ``new_key`` is.
        """
        self._cursors.fork(key, new_key)
