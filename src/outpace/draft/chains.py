"""What the drafters share that copy one span of a sequence's own text: one chain for each sequence."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as SequenceOf
from typing import Generic, TypeAlias, TypeVar

import numpy as np

from outpace._compile import compiled
from outpace.draft.base import Drafter, Signals
from outpace.draft.sequences import OpenSequences
from outpace.tree import DraftTrees, Float32Array, Int32Array, UInt32Array, Verdicts

S = TypeVar("S")
NodeArrays: TypeAlias = tuple[Int32Array, Int32Array, Int32Array, Float32Array, UInt32Array]

_INT32, _FLOAT32, _UINT32 = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.uint32)


def log_probs_by_match(first: float, rate: float, ceiling: float, size: int = 64) -> Float32Array:
    """Estimated log-probabilities that a copied token is accepted, by the length of the match before it.

    A longer match is a better reason to go on copying, with less and less to gain. A token that is accepted makes the
    match one longer, so a chain behind a match of ``m`` tokens has entries ``m - 1``, ``m``, ``m + 1``, ...

    Args:
        first: Probability behind a match of one token.
        rate: How fast it rises: the distance from the ceiling shrinks by this factor a token.
        ceiling: Probability behind an endless match.
        size: Entries; longer matches take the last.

    Returns:
        ``float32[size]``, entry ``m - 1`` behind a match of ``m`` tokens.
    """
    length = np.arange(size, dtype=np.float64)
    return np.log(ceiling - (ceiling - first) * rate**length).astype(np.float32)


@compiled
def write_chain(
    source: Int32Array,
    begin: int,
    end: int,
    match_length: int,
    by_match: Float32Array,
    origin: int,
    index: int,
    offsets: Int32Array,
    tokens: Int32Array,
    parents: Int32Array,
    log_probs: Float32Array,
    origins: UInt32Array,
) -> int:
    """Write ``source[begin:end]`` as tree ``index``: a chain behind a match of ``match_length`` tokens.

    Returns:
        Nodes of all trees so far, also written to ``offsets[index + 1]``.
    """
    at = int(offsets[index])
    count = max(end - begin, 0)
    for i in range(count):
        tokens[at + i] = source[begin + i]
        parents[at + i] = i - 1
        log_probs[at + i] = by_match[min(match_length - 1 + i, len(by_match) - 1)]
        origins[at + i] = origin
    offsets[index + 1] = at + count
    return at + count


class ChainDrafter(Drafter, Generic[S]):
    """A drafter that keeps the text of each sequence in some state and copies one span of it.

    Args:
        draft_size: Most nodes of a tree.
    """

    def __init__(self, draft_size: int) -> None:
        self.draft_size = draft_size
        self._sequences: OpenSequences[S] = OpenSequences()

    @abstractmethod
    def _start(self, tokens: Int32Array) -> S:
        """State of a sequence that begins with ``tokens``."""

    @abstractmethod
    def _append(self, state: S, tokens: Int32Array, begin: int, end: int) -> S:
        """The state with ``tokens[begin:end]`` appended; it may be changed in place."""

    @abstractmethod
    def _copy(self, state: S) -> S:
        """An independent copy."""

    @abstractmethod
    def _draft(self, state: S, index: int, caps: Int32Array, nodes: NodeArrays) -> int:
        """Write tree ``index``, of at most ``caps[index]`` nodes, and return the nodes of all trees so far."""

    def open(self, key: int, tokens: Int32Array, namespace: str = "") -> None:
        """Start a sequence; see `Drafter.open`. Nothing is learned from other sequences, so namespaces are apart.

        Raises:
            LifecycleError: The key is open.
        """
        self._sequences.add(key, self._start(tokens))

    def propose(self, keys: SequenceOf[int], caps: Int32Array) -> DraftTrees:
        """Draft a chain for each sequence; see `Drafter.propose`.

        Raises:
            LifecycleError: A key is not open.
        """
        batch = len(keys)
        room = batch * self.draft_size
        offsets = np.empty(batch + 1, _INT32)
        offsets[0] = 0
        tokens, parents = np.empty(room, _INT32), np.empty(room, _INT32)
        log_probs, origins = np.empty(room, _FLOAT32), np.empty(room, _UINT32)
        nodes = (offsets, tokens, parents, log_probs, origins)
        used = 0
        for index, key in enumerate(keys):
            used = self._draft(self._sequences[key], index, caps, nodes)
        return DraftTrees(offsets, tokens[:used], parents[:used], log_probs[:used], origins[:used])

    def observe(self, keys: SequenceOf[int], verdicts: Verdicts, signals: Signals | None = None) -> None:
        """Append what was committed; see `Drafter.observe`.

        Raises:
            LifecycleError: A key is not open.
        """
        offsets, sequences = verdicts.token_offsets.tolist(), self._sequences
        for index, key in enumerate(keys):
            sequences[key] = self._append(sequences[key], verdicts.tokens, offsets[index], offsets[index + 1])

    def close(self, key: int) -> None:
        """Forget a sequence.

        Raises:
            LifecycleError: The key is not open.
        """
        self._sequences.remove(key)

    def fork(self, key: int, new_key: int) -> None:
        """Open ``new_key`` as a copy of ``key``.

        Raises:
            LifecycleError: ``key`` is not open, or ``new_key`` is.
        """
        self._sequences.add(new_key, self._copy(self._sequences[key]))
