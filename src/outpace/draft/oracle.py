"""A drafter for tests that knows what comes next: random trees that hold the true continuation now and then.

Under every node that is still true, the true next token is among the children with a given probability, at a random
place among random siblings; wrong siblings are grown further too. So deep acceptance, accepted nodes that are not
neighbours, and trees that miss altogether all happen, with any model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np

from outpace._compile import compiled
from outpace.draft.base import Drafter, Signals
from outpace.draft.sequences import OpenSequences, check_count, check_share
from outpace.errors import ConfigError, LifecycleError
from outpace.tree import DraftTrees, Float32Array, Int32Array, Origin, UInt64Array, Verdicts

Continuations = Mapping[tuple[int, ...], SequenceOf[int]]

_ORIGIN = int(Origin.ORACLE)
_MOST_CHILDREN = 3
_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


class _Sequence:
    __slots__ = ("position", "truth", "vocab_size")

    def __init__(self, position: int, truth: Int32Array | None, vocab_size: int) -> None:
        self.position = position  # tokens of the sequence so far
        self.truth = truth  # int32[t], the whole text from its first token on
        self.vocab_size = vocab_size


class OracleDrafter(Drafter):
    """Drafts random trees that hold the known continuation.

    A tree depends on the seed, the sequence's position and its continuation alone, so not on the batch or on how a
    sequence came to its position. ``log_probs`` do not tell which child is true: a node's children share ``accept``.

    Args:
        accept: Probability that the true next token is among the children of a true node (while the tree has room).
        continuations: For each prompt, as a tuple of token ids, the tokens that follow it. A sequence that is opened
            with a prompt and a part of its continuation (a resumed one) is recognised too.
        seed: Of the random trees.
        max_nodes: Most nodes of a tree.
        vocab_size: Wrong tokens are below it; None: at most the largest id in the sequence's prompt and continuation.

    Raises:
        ConfigError: An option is out of bounds.
    """

    name = "oracle"

    def __init__(
        self,
        accept: float,
        continuations: Continuations | None = None,
        *,
        seed: int = 0,
        max_nodes: int = 32,
        vocab_size: int | None = None,
    ) -> None:
        self.accept = check_share(self.name, "accept", accept)
        self.seed = check_count(self.name, "seed", seed, 0)
        self.max_nodes = check_count(self.name, "max_nodes", max_nodes, 1, 4096)
        self.vocab_size = None if vocab_size is None else check_count(self.name, "vocab_size", vocab_size, 2)
        self._texts: dict[tuple[int, ...], Int32Array] = {}
        for prompt, continuation in (continuations or {}).items():
            self._texts[tuple(int(t) for t in prompt)] = np.array([*prompt, *continuation], np.int32)
        self._sequences: OpenSequences[_Sequence] = OpenSequences()

    def open(self, key: int, tokens: Int32Array, namespace: str = "") -> None:
        """Start a sequence; its continuation is found by its tokens, or comes with `set_continuation`.

        Raises:
            LifecycleError: The key is open.
        """
        self._sequences.add(key, _Sequence(len(tokens), None, 0))
        text = self._known_text(tokens)
        if text is not None:
            self._set_truth(self._sequences[key], text)

    def set_continuation(self, key: int, text: SequenceOf[int] | Int32Array) -> None:
        """Say what an open sequence's whole text, its prompt included, will be.

        Raises:
            LifecycleError: The key is not open.
        """
        self._set_truth(self._sequences[key], np.asarray(text, np.int32))

    def propose(self, keys: SequenceOf[int], caps: Int32Array) -> DraftTrees:
        """Grow a random tree for each sequence; see `Drafter.propose`.

        Raises:
            LifecycleError: A key is not open, or its continuation is not known.
        """
        room = len(keys) * self.max_nodes
        offsets = np.zeros(len(keys) + 1, np.int32)
        tokens, parents = np.empty(room, np.int32), np.empty(room, np.int32)
        log_probs, origins = np.empty(room, np.float32), np.full(room, _ORIGIN, np.uint32)
        used = 0
        for index, key in enumerate(keys):
            sequence = self._sequences[key]
            if sequence.truth is None:
                raise LifecycleError(
                    f"the oracle has no continuation for sequence {key}: give one for its prompt, or set_continuation"
                )
            room = min(self.max_nodes, int(caps[index]))
            used += _grow_tree(
                sequence.truth[sequence.position :],
                self.accept,
                _stream(self.seed, sequence.position),
                sequence.vocab_size,
                tokens[used : used + room],
                parents[used : used + room],
                log_probs[used : used + room],
            )
            offsets[index + 1] = used
        return DraftTrees(offsets, tokens[:used], parents[:used], log_probs[:used], origins[:used])

    def observe(self, keys: SequenceOf[int], verdicts: Verdicts, signals: Signals | None = None) -> None:
        """Move on by what was committed; see `Drafter.observe`.

        Raises:
            LifecycleError: A key is not open.
        """
        for index, key in enumerate(keys):
            self._sequences[key].position += len(verdicts.tokens_of(index))

    def close(self, key: int) -> None:
        """Forget a sequence.

        Raises:
            LifecycleError: The key is not open.
        """
        self._sequences.remove(key)

    def fork(self, key: int, new_key: int) -> None:
        """Open ``new_key`` as a copy of ``key``, with the same continuation.

        Raises:
            LifecycleError: ``key`` is not open, or ``new_key`` is.
        """
        source = self._sequences[key]
        self._sequences.add(new_key, _Sequence(source.position, source.truth, source.vocab_size))

    def _known_text(self, tokens: Int32Array) -> Int32Array | None:
        exact = self._texts.get(tuple(tokens.tolist()))
        if exact is not None:
            return exact
        known = [
            prompt
            for prompt, text in self._texts.items()
            if len(prompt) < len(tokens) <= len(text) and np.array_equal(text[: len(tokens)], tokens)
        ]
        return self._texts[max(known, key=len)] if known else None

    def _set_truth(self, sequence: _Sequence, text: Int32Array) -> None:
        if self.vocab_size is None and (len(text) == 0 or text.max() < 1):
            raise ConfigError(f"{self.name}: vocab_size is needed where the text has no token id above 0")
        sequence.truth = text
        sequence.vocab_size = self.vocab_size or int(text.max()) + 1


def _stream(seed: int, position: int) -> UInt64Array:
    """State of the random numbers for one position, ``uint64[1]``."""
    return np.array([(seed * 0x9E3779B97F4A7C15 + position * 0xD6E8FEB86659FD93) % 2**64], np.uint64)


@compiled
def _below(stream: UInt64Array, bound: int) -> int:
    """A random integer from 0 to ``bound - 1`` (splitmix64; the bias of the remainder does not matter here)."""
    stream[0] += _MIX[0]
    mixed = stream[0]
    mixed = (mixed ^ (mixed >> _SHIFTS[0])) * _MIX[1]
    mixed = (mixed ^ (mixed >> _SHIFTS[1])) * _MIX[2]
    mixed ^= mixed >> _SHIFTS[2]
    return int(np.int64(mixed % np.uint64(bound)))


@compiled
def _happens(stream: UInt64Array, probability: float) -> bool:
    return _below(stream, 1 << 30) < probability * (1 << 30)


@compiled
def _take_from_frontier(stream: UInt64Array, frontier: Int32Array, waiting: int, true_depth: Int32Array) -> int:
    """Move the node to grow next to the end of the frontier: mostly the true one, so that trees get deep."""
    pick = _below(stream, waiting)
    if _happens(stream, 0.7):
        for i in range(waiting):
            if frontier[i] < 0 or true_depth[frontier[i]] > 0:
                pick = i
    node = int(frontier[pick])
    frontier[pick] = frontier[waiting - 1]
    return node


@compiled
def _wrong_token(stream: UInt64Array, vocab_size: int, true_token: int, siblings: Int32Array) -> int:
    """A random token that is neither the true one nor a sibling's; there must be one."""
    token = _below(stream, vocab_size)
    while token == true_token or token in siblings:
        token = (token + 1) % vocab_size
    return token


@compiled
def _grow_tree(
    truth: Int32Array,
    accept: float,
    stream: UInt64Array,
    vocab_size: int,
    tokens: Int32Array,
    parents: Int32Array,
    log_probs: Float32Array,
) -> int:
    """Fill the arrays, which have room for one tree, and return its nodes; ``truth`` begins after the root."""
    room, size = len(tokens), 0
    true_depth = np.zeros(room, np.int32)  # 0 for wrong nodes
    frontier = np.empty(room + 1, np.int32)
    frontier[0] = -1
    waiting = 1
    while waiting > 0 and size < room:
        node = _take_from_frontier(stream, frontier, waiting, true_depth)
        waiting -= 1
        depth = 0 if node < 0 else int(true_depth[node])
        is_true = node < 0 or depth > 0
        true_token = int(truth[depth]) if is_true and depth < len(truth) else -1
        children = _below(stream, _MOST_CHILDREN) + 1 if is_true else _below(stream, _MOST_CHILDREN)
        children = min(children, room - size, vocab_size - 1)
        place = _below(stream, children) if children > 0 else 0
        if true_token < 0 or not _happens(stream, accept):
            place = -1
        first = size
        for child in range(children):
            if child == place:
                tokens[size] = true_token
                true_depth[size] = depth + 1
            else:
                tokens[size] = _wrong_token(stream, vocab_size, true_token, tokens[first:size])
            parents[size] = node
            log_probs[size] = math.log(max(accept, 1e-3) / children)
            frontier[waiting] = size
            waiting += 1
            size += 1
    return size
