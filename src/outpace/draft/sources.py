"""Text outside the request that drafters may copy from."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.suffix.corpus import Corpus
from outpace.suffix.frozen import FrozenAutomaton
from outpace.suffix.memory import ResponseMemory


@dataclass(frozen=True)
class Sources:
    """What `outpace.draft.build_drafter` hands to the drafters that can use it.

    Attributes:
        memory: Earlier responses by namespace, or None.
        corpora: Prepared text, the same for everybody.
    """

    memory: ResponseMemory | None = None
    corpora: tuple[Corpus, ...] = ()

    @property
    def static(self) -> tuple[FrozenAutomaton, ...]:
        """The automata of all corpora, in order."""
        return tuple(shard for corpus in self.corpora for shard in corpus.shards)

    def memory_segments(self, namespace: str) -> tuple[FrozenAutomaton, ...]:
        """What is remembered of a namespace at this moment, oldest first; nothing without a memory."""
        return () if self.memory is None else self.memory.segments(namespace)
