"""The one protocol of all drafters.

A drafter only *proposes*. What is cut, and by how much, is decided by `outpace.reduce`; what is accepted, by
`outpace.verify`. The engine calls, for every sequence: ``open`` once, then ``propose`` and ``observe`` in turn, and
``close`` once. ``observe`` is called for every committed token, also when nothing was proposed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from outpace.tree import DraftTrees, Int32Array, Verdicts


@dataclass(frozen=True, slots=True)
class SignalNeeds:
    """What a drafter wants to see of the target model's passes.

    Attributes:
        top_k: Best token ids at every verified and pending position; 0 for none.
        hidden_layers: Names of modules whose output it wants at those positions.
    """

    top_k: int = 0
    hidden_layers: tuple[str, ...] = ()

    @property
    def nothing(self) -> bool:
        """Whether the drafter works from tokens alone."""
        return self.top_k == 0 and not self.hidden_layers


@dataclass(frozen=True, eq=False, slots=True)
class Signals:
    """What the target's pass showed, row by row of the packed step.

    Attributes:
        row_offsets: ``int32[B + 1]``: rows of sequence ``b``. Its pending positions come first (the last of them is the
            root), then its tree's nodes in order.
        first_positions: ``int32[B]``, position of each sequence's first row. Positions that were seen before come again
            where keys and values are computed anew (see `Drafter.recomputed`).
        input_tokens: ``int32[rows]``, the token at each row.
        top_ids: ``int32[rows, top_k]``, the model's best next tokens there, best first; None if not asked for.
        hidden: Output of each named module, ``[rows, width]``.
    """

    row_offsets: Int32Array
    first_positions: Int32Array
    input_tokens: Int32Array
    top_ids: Int32Array | None
    hidden: dict[str, torch.Tensor]


class Drafter(ABC):
    """Proposes draft trees for a batch of sequences.

    Attributes:
        name: The name under which it is registered.
        needs: What it wants to see of the target's passes.
        marginal: Whether ``log_probs`` are marginal (prediction heads) or conditional on the parent (everything else).
        parts: The drafters that it is made of.
    """

    name: str
    needs: SignalNeeds = SignalNeeds()
    marginal: bool = False
    parts: tuple[Drafter, ...] = ()

    @property
    def is_ours(self) -> bool:
        """Whether Outpace itself wrote it and all its parts: what others propose is checked before it is used."""
        return type(self).__module__.startswith("outpace.") and all(part.is_ours for part in self.parts)

    @property
    def has_foreign_text(self) -> bool:
        """Whether it drafts from text that this model's requests did not hold, corpora or files: its ids are checked."""
        return any(part.has_foreign_text for part in self.parts)

    @abstractmethod
    def open(self, key: int, tokens: Int32Array, namespace: str = "") -> None:
        """Start a sequence.

        Args:
            key: The engine's number for it; unique among open sequences.
            tokens: ``int32[prompt]``, a copy is not needed: the array stays unchanged.
            namespace: What is learned from one namespace's text never drafts for another's.
        """

    @abstractmethod
    def propose(self, keys: SequenceOf[int], caps: Int32Array) -> DraftTrees:
        """Draft for a batch.

        Args:
            keys: Open sequences, ``B`` of them.
            caps: ``int32[B]``, most nodes of each tree; 0 asks for none.

        Returns:
            One tree for each key, in order.
        """

    @abstractmethod
    def observe(self, keys: SequenceOf[int], verdicts: Verdicts, signals: Signals | None = None) -> None:
        """Take note of what was committed.

        Args:
            keys: The sequences of the step, in its order.
            verdicts: Accepted paths and committed tokens.
            signals: What `needs` asked for, or None.
        """

    @abstractmethod
    def close(self, key: int) -> None:
        """Forget a sequence; its key may be used again."""

    def recomputed(self, key: int) -> None:  # noqa: B027 (most drafters have nothing to do)
        """The engine gave the sequence's keys and values up: signals will show its tokens again, from the first one on.

        A drafter with keys and values of its own, one row for each of the target's, drops them here.
        """

    @abstractmethod
    def fork(self, key: int, new_key: int) -> None:
        """Open ``new_key`` as a copy of ``key`` at this moment."""
