"""Token Recycling (Luo et al., 2024): draft what the model held likely after the same tokens before.

A matrix keeps the model's 8 best next tokens after each token, as they were when the token last went through a pass: every
pending and every verified position is learned from, rejected drafts too (section 3.2). The draft is a static tree: the
root's candidates, their candidates, and so on, as many of each as its shape says (section 3.3).

Example: after ``5`` the model last held ``7 2 ...`` likely, after ``7`` it was ``9 1 ...``. With the shape ``0 1 00`` and the
root ``5`` the draft is ``7``, ``2`` and, after ``7``, ``9``.

Estimates: a candidate's chance depends on its rank and on how often in a row the token's best candidate came again. On the
held-out prompts of the model in the box the best candidate is right in 37% of the cases where the one before was another, and
in 94% after 8 repetitions; depth hardly matters.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from outpace._compile import compiled
from outpace.draft.base import Drafter, SignalNeeds, Signals
from outpace.draft.candidates import MISSING, WIDTH, CandidateMatrices, StrPath, UInt8Array
from outpace.draft.sequences import OpenSequences, check_count
from outpace.draft.shapes import find_shape
from outpace.errors import ConfigError, UnknownNameError
from outpace.tree import DraftTrees, Float32Array, Int32Array, Origin, UInt32Array, Verdicts

_ORIGIN = np.uint32(Origin.RECYCLING)
_INT32 = np.dtype(np.int32)
# Chance of each rank, by how often in a row the best candidate was repeated: 0, 1, 2, 3, 4 to 7, 8 and more. Smoothed shares
# of the model in the box on its held-out prompts, looping outputs apart.
_SHARES = np.array(
    [
        [0.37, 0.15, 0.07, 0.045, 0.028, 0.02, 0.018, 0.014],
        [0.59, 0.12, 0.06, 0.02, 0.015, 0.012, 0.01, 0.005],
        [0.72, 0.10, 0.035, 0.025, 0.015, 0.008, 0.005, 0.004],
        [0.77, 0.07, 0.03, 0.02, 0.012, 0.008, 0.005, 0.004],
        [0.79, 0.07, 0.045, 0.015, 0.008, 0.005, 0.004, 0.003],
        [0.93, 0.02, 0.008, 0.005, 0.004, 0.003, 0.002, 0.002],
    ]
)
ESTIMATES: Float32Array = np.log(_SHARES[[0, 1, 2, 3, 4, 4, 4, 4, 5]]).astype(np.float32)  # [repeats, up to 8; rank]


class _Sequence:
    __slots__ = ("last", "slot")

    def __init__(self, slot: int, last: int) -> None:
        self.slot = slot  # of its namespace
        self.last = last  # its last token, the root of the next tree; -1 if it has none


class RecyclingDrafter(Drafter):
    """Token Recycling: static trees over a matrix of the model's own candidates.

    Nodes are in breadth-first order. Where a candidate is not known, its node is left out with everything below it. Where a
    cap is smaller than the tree, the nodes with the highest estimated path probability are kept.

    Memory: 33 bytes for each token id and namespace; see `outpace.draft.candidates`.

    Args:
        tree: Shape of the trees: 80 or ``token-recycling`` for that of Token Recycling, 60 or ``sam-decoding`` for that of
            SAM-Decoding.
        namespaces: Namespaces whose candidates are kept; those of open sequences count, but are never dropped.

    Raises:
        ConfigError: An option is out of bounds.
    """

    name = "recycling"
    needs = SignalNeeds(top_k=WIDTH)

    def __init__(self, tree: int | str = 80, namespaces: int = 16) -> None:
        try:
            self.shape = find_shape(tree)
        except UnknownNameError as error:
            raise UnknownNameError(f"{self.name}: {error.kind}", error.name, error.known) from None
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}") from error
        self._has_loaded = False
        self.matrices = CandidateMatrices(check_count(self.name, "namespaces", namespaces, 1, 2**16))
        self._sequences: OpenSequences[_Sequence] = OpenSequences()

    def open(self, key: int, tokens: Int32Array, namespace: str = "") -> None:
        """Start a sequence; see `Drafter.open`.

        Raises:
            LifecycleError: The key is open.
        """
        sequence = _Sequence(-1, int(tokens[-1]) if len(tokens) else -1)
        self._sequences.add(key, sequence)
        sequence.slot = self.matrices.acquire(namespace)

    def propose(self, keys: SequenceOf[int], caps: Int32Array) -> DraftTrees:
        """Fill the shape with candidates for each sequence; see `Drafter.propose`.

        Raises:
            LifecycleError: A key is not open.
        """
        sequences = [self._sequences[key] for key in keys]
        shape = self.shape
        return DraftTrees(
            *_fill(
                self.matrices.rows,
                self.matrices.repeats,
                np.array([sequence.slot for sequence in sequences], _INT32),
                np.array([sequence.last for sequence in sequences], _INT32),
                caps,
                shape.parents,
                shape.ranks,
                ESTIMATES,
            )
        )

    def observe(self, keys: SequenceOf[int], verdicts: Verdicts, signals: Signals | None = None) -> None:
        """Learn the candidates that the pass showed; see `Drafter.observe`.

        Raises:
            LifecycleError: A key is not open.
        """
        sequences = [self._sequences[key] for key in keys]
        offsets, tokens = verdicts.token_offsets.tolist(), verdicts.tokens
        for index, sequence in enumerate(sequences):
            if offsets[index + 1] > offsets[index]:
                sequence.last = int(tokens[offsets[index + 1] - 1])
        if signals is not None and signals.top_ids is not None:
            slots = np.array([sequence.slot for sequence in sequences], _INT32)
            self.matrices.learn(slots, signals.row_offsets, signals.input_tokens, signals.top_ids)

    def close(self, key: int) -> None:
        """Forget a sequence; what was learned from it stays.

        Raises:
            LifecycleError: The key is not open.
        """
        sequence = self._sequences[key]
        self._sequences.remove(key)
        self.matrices.release(sequence.slot)

    def fork(self, key: int, new_key: int) -> None:
        """Open ``new_key`` as a copy of ``key``, of the same namespace.

        Raises:
            LifecycleError: ``key`` is not open, or ``new_key`` is.
        """
        source = self._sequences[key]
        self._sequences.add(new_key, _Sequence(source.slot, source.last))
        self.matrices.share(source.slot)

    def save(self, path: StrPath, namespace: str = "", fingerprint: str | None = None) -> None:
        """Write the candidates of one namespace to an ``.npz`` file, whole or not at all.

        The file holds ``format`` (1), ``fingerprint``, ``tokens`` (``int32[n]``, ids that were seen, rising), ``candidates``
        (``int32[n, 8]``, best first, ``-1`` for none) and ``repeats`` (``uint8[n]``).

        Args:
            path: The file; replaced if it exists.
            namespace: Whose.
            fingerprint: Of the tokenizer, if it is known.

        Raises:
            ConfigError: Nothing is known of the namespace.
            OSError: The file cannot be written.
        """
        self.matrices.save(path, namespace, fingerprint)

    def load(self, path: StrPath, namespace: str = "", fingerprint: str | None = None) -> None:
        """Read candidates that `save` wrote, in place of all that was learned in the namespace.

        Args:
            path: The file.
            namespace: Where they are to draft.
            fingerprint: Of the tokenizer in use; compared if the file has one too.

        Raises:
            InputError: The file cannot be read, is damaged, of another format or of another tokenizer. What was learned
                stays then.
        """
        self.matrices.load(path, namespace, fingerprint)
        self._has_loaded = True

    @property
    def has_foreign_text(self) -> bool:
        """Whether candidates were loaded."""
        return self._has_loaded


@compiled
def _fill(
    matrices: Int32Array,
    repeats: UInt8Array,
    slots: Int32Array,
    roots: Int32Array,
    caps: Int32Array,
    shape_parents: Int32Array,
    ranks: Int32Array,
    estimates: Float32Array,
) -> tuple[Int32Array, Int32Array, Int32Array, Float32Array, UInt32Array]:
    batch, size, known = len(slots), len(ranks), matrices.shape[1]
    offsets = np.zeros(batch + 1, np.int32)
    tokens, parents = np.empty(batch * size, np.int32), np.empty(batch * size, np.int32)
    log_probs = np.empty(batch * size, np.float32)
    held = np.empty(size, np.int32)  # the token of each node of the shape
    chances = np.empty(size, np.float32)
    cost = np.empty(size)  # of its path
    place = np.empty(size, np.int32)  # its index in the tree
    used = 0
    for b in range(batch):
        count = 0
        for node in range(size):
            parent = shape_parents[node]
            above = roots[b] if parent < 0 else held[parent]
            held[node], cost[node] = MISSING, np.inf
            if 0 <= above < known and matrices[slots[b], above, ranks[node]] >= 0:
                held[node] = matrices[slots[b], above, ranks[node]]
                chances[node] = estimates[min(repeats[slots[b], above], len(estimates) - 1), ranks[node]]
                cost[node] = (0.0 if parent < 0 else cost[parent]) - chances[node]
                count += 1
        if count > caps[b]:  # costs rise along a path and the sort is stable, so parents stay with their children
            for node in np.argsort(cost, kind="mergesort")[max(caps[b], 0) :]:
                held[node] = MISSING
        begin = used
        for node in range(size):
            if held[node] < 0:
                continue
            tokens[used] = held[node]
            parents[used] = -1 if shape_parents[node] < 0 else place[shape_parents[node]]
            log_probs[used] = chances[node]
            place[node] = used - begin
            used += 1
        offsets[b + 1] = used
    return offsets, tokens[:used], parents[:used], log_probs[:used], np.full(used, _ORIGIN)
