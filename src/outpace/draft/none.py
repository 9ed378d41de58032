"""No drafts: every step decodes one token, as without speculation."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from outpace.draft.base import Drafter, Signals
from outpace.draft.sequences import OpenSequences
from outpace.tree import DraftTrees, Int32Array, Verdicts


class NoneDrafter(Drafter):
    """Proposes nothing: plain autoregressive decoding."""

    name = "none"

    def __init__(self) -> None:
        self._sequences: OpenSequences[None] = OpenSequences()

    def open(self, key: int, tokens: Int32Array, namespace: str = "") -> None:
        """Start a sequence; nothing of it is kept but the key.

        Raises:
            LifecycleError: The key is open.
        """
        self._sequences.add(key, None)

    def propose(self, keys: SequenceOf[int], caps: Int32Array) -> DraftTrees:
        """Empty trees."""
        return DraftTrees.empty(len(keys))

    def observe(self, keys: SequenceOf[int], verdicts: Verdicts, signals: Signals | None = None) -> None:
        """Nothing to note."""

    def close(self, key: int) -> None:
        """Forget a sequence.

        Raises:
            LifecycleError: The key is not open.
        """
        self._sequences.remove(key)

    def fork(self, key: int, new_key: int) -> None:
        """Open ``new_key``.

        Raises:
            LifecycleError: ``key`` is not open, or ``new_key`` is.
        """
        self._sequences.add(new_key, self._sequences[key])
