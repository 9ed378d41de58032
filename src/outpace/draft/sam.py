"""SAM-Decoding (section 3, Algorithm 2): the longest match in several texts, or an auxiliary drafter's tree.

A step, for each sequence:

- the **dynamic** match is that in the request's own text; what followed its earliest occurrence is the dynamic draft;
- the **foreign** match is the longest one in the corpora (static automata, section 3.1) and in the memory of earlier
  responses, which is ours. Of equal ones the memory's counts before a corpus's, a later segment's before an earlier one's;
- the foreign draft is taken only if its match is longer than the dynamic one by more than ``l_bias``;
- the draft is used if its match has at least ``l_threshold`` tokens. Otherwise the auxiliary drafter's tree is. Where the
  foreign draft is empty, since a document ends there, the dynamic one stands in for it.

Without an auxiliary drafter there is nothing to fall back on, and the draft is used whatever its match: so must the
paper's "w/o Token Recycling" (Table 3) have been, which it does not spell out. Without the dynamic automaton ("w/o Dynamic
SAM") there is nothing to prefer to a foreign draft, and ``l_bias`` has no effect.

Example: with both limits at 5, matches of 3 (dynamic) and 9 (memory) draft from the memory; 4 and 9 are 5 apart, not more,
so that the dynamic one is chosen, and its 4 tokens leave the step to the auxiliary drafter.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from outpace._compile import compiled, inner
from outpace.draft.base import Drafter, Signals
from outpace.draft.chains import log_probs_by_match
from outpace.draft.cursors import (
    BLOCK,
    CURSOR_SIZE,
    FIRST_CURSOR,
    LENGTH,
    NUM_CURSORS,
    NUM_STATIC,
    STATE,
    Cursors,
    address_of,
    array_at,
    block_of,
    image_of,
    longest_of,
)
from outpace.draft.pool import NodePool
from outpace.draft.sequences import check_count, check_switch
from outpace.draft.sources import Sources
from outpace.errors import ConfigError, DrafterError
from outpace.suffix.block import NUM_TOKENS, matched, text_of
from outpace.suffix.image import endpos_of, text_at
from outpace.tree import DraftTrees, Float32Array, Int32Array, Int64Array, Origin, UInt32Array, Verdicts

_INT32, _FLOAT32, _UINT32 = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.uint32)
# Numbers and addresses that compiled code needs at each call, int64 each. Of the pool there are four, all read as int32.
_DRAFT_SIZE, _BIAS, _LEAST, _BY_MATCH, _NODES = range(5)
_NUM_SETTINGS = _NODES + 4
_NUM_LENGTHS = 64  # of `log_probs_by_match`
_DYNAMIC, _STATIC, _MEMORY = int(Origin.DYNAMIC), int(Origin.STATIC), int(Origin.MEMORY)


class SamDrafter(Drafter):
    """SAM-Decoding, with an auxiliary drafter or without.

    The memory is that of the sequence's namespace, as it is when the sequence is opened. In corpora and memory, matches are
    followed over the last 64 tokens of the prompt and all of the output: longer ones, which reach further back into the
    prompt, are not told apart.

    ``log_probs`` of retrieved drafts are those of `outpace.draft.suffix.SuffixDrafter`, by the length of the match.

    Args:
        l_bias: By how many tokens more than this a foreign match must be longer.
        l_threshold: Least tokens of a match that keeps the auxiliary drafter out.
        draft_size: Most nodes of a retrieved draft.
        static: Draft from corpora.
        dynamic: Draft from the request's own text.
        memory: Draft from earlier responses of the namespace.
        parts: The auxiliary drafter, or none. It sees every call, but proposes only where it is needed.
        sources: The corpora and the memory; None for neither.

    Raises:
        ConfigError: An option is out of bounds, or nothing is left to draft from.
    """

    name = "sam"
    _by_match = log_probs_by_match(0.24, 0.76, 0.94, _NUM_LENGTHS)

    def __init__(
        self,
        l_bias: int = 5,
        l_threshold: int = 5,
        draft_size: int = 40,
        static: bool = True,
        dynamic: bool = True,
        memory: bool = True,
        parts: SequenceOf[Drafter] = (),
        sources: Sources | None = None,
    ) -> None:
        self.l_bias = check_count(self.name, "l_bias", l_bias, 0)
        self.l_threshold = check_count(self.name, "l_threshold", l_threshold, 0)
        self.draft_size = check_count(self.name, "draft_size", draft_size, 1, 4096)
        self.static = check_switch(self.name, "static", static)
        self.dynamic = check_switch(self.name, "dynamic", dynamic)
        self.memory = check_switch(self.name, "memory", memory)
        if len(parts) > 1:
            raise ConfigError(f"{self.name} takes one auxiliary drafter, found {len(parts)}")
        self.parts = tuple(parts)
        self.auxiliary = parts[0] if parts else None
        if not (self.static or self.dynamic or self.memory or self.auxiliary):
            raise ConfigError(f"{self.name}: static, dynamic and memory are all off, so nothing is left to draft from")
        if self.auxiliary is not None:
            self.name = f"{self.name}[{self.auxiliary.name}]"
            self.needs = self.auxiliary.needs
        self._sources = sources if sources is not None else Sources()
        self._automata = self._sources.static if self.static else ()
        self._cursors = Cursors(self.dynamic)
        self._settings = np.zeros(_NUM_SETTINGS, np.int64)
        self._settings[_DRAFT_SIZE] = self.draft_size
        self._settings[_BIAS] = self.l_bias if self.dynamic else 0
        self._settings[_LEAST] = self.l_threshold if self.auxiliary is not None else 0
        self._settings[_BY_MATCH] = address_of(self._by_match.view(np.int32))
        self._pool = NodePool(self._settings[_NODES:])
        self._left = np.empty(1, _INT32)  # places in the batch that are left to the auxiliary drafter

    @property
    def has_foreign_text(self) -> bool:
        """Whether there are corpora, or a memory, which may have been loaded."""
        return bool(self._sources.corpora) or self._sources.memory is not None or super().has_foreign_text

    def open(self, key: int, tokens: Int32Array, namespace: str = "") -> None:
        """Start a sequence; see `Drafter.open`.

        Raises:
            LifecycleError: The key is open.
            InputError: A token id is negative.
        """
        memory = self._sources.memory_segments(namespace) if self.memory else ()
        self._cursors.open(key, tokens, self._automata, memory)
        if self.auxiliary is not None:
            try:
                self.auxiliary.open(key, tokens, namespace)
            except BaseException:
                self._cursors.close(key)
                raise

    def propose(self, keys: SequenceOf[int], caps: Int32Array) -> DraftTrees:
        """Draft for each sequence a chain, or what the auxiliary drafter proposes; see `Drafter.propose`.

        Raises:
            LifecycleError: A key is not open.
        """
        slots = self._cursors.slots(keys)
        batch = len(keys)
        if batch > len(self._left):
            self._left = np.empty(batch, _INT32)
        offsets, left = np.empty(batch + 1, _INT32), self._left
        base = self._pool.reserve(batch * self.draft_size)
        used, num_left = _draft(self._cursors.table, slots, caps, self._settings, base, offsets, left)
        auxiliary = self.auxiliary
        if auxiliary is not None and num_left == batch:
            return auxiliary.propose(keys, caps)
        trees = self._pool.take(offsets, used)
        if auxiliary is None or num_left == 0:
            return trees
        chosen = left[:num_left]
        others = auxiliary.propose([keys[b] for b in chosen.tolist()], caps[chosen])
        if not auxiliary.is_ours:
            others.validate()
        if others.batch_size != num_left:
            raise DrafterError(
                f"{self.name}: {auxiliary.name}: expected one tree for each of {num_left} sequences, "
                f"found {others.batch_size}"
            )
        return _interleaved(trees, chosen, others)

    def observe(self, keys: SequenceOf[int], verdicts: Verdicts, signals: Signals | None = None) -> None:
        """Append what was committed, and follow it in all automata; see `Drafter.observe`.

        Raises:
            LifecycleError: A key is not open.
        """
        self._cursors.advance(keys, verdicts.token_offsets, verdicts.tokens)
        if self.auxiliary is not None:
            self.auxiliary.observe(keys, verdicts, signals)

    def close(self, key: int) -> None:
        """Forget a sequence.

        Raises:
            LifecycleError: The key is not open.
        """
        self._cursors.close(key)
        if self.auxiliary is not None:
            self.auxiliary.close(key)

    def recomputed(self, key: int) -> None:
        """Tell the auxiliary drafter; see `Drafter.recomputed`."""
        if self.auxiliary is not None:
            self.auxiliary.recomputed(key)

    def fork(self, key: int, new_key: int) -> None:
        """Open ``new_key`` as a copy of ``key``.

        Raises:
            LifecycleError: ``key`` is not open, or ``new_key`` is.
        """
        self._cursors.fork(key, new_key)
        if self.auxiliary is not None:
            try:
                self.auxiliary.fork(key, new_key)
            except BaseException:
                self._cursors.close(new_key)
                raise


@compiled
def _draft(
    table: Int64Array,
    slots: Int64Array,
    caps: Int32Array,
    settings: Int64Array,
    base: int,
    offsets: Int32Array,
    left: Int32Array,
) -> tuple[int, int]:
    """Write a chain for each sequence, and list in ``left`` those that have none, or one behind too short a match.

    Args:
        table: Of `outpace.draft.cursors.Cursors`.
        slots: ``int64[B]``, rows of it.
        caps: ``int32[B]``.
        settings: See `_DRAFT_SIZE` and what follows it.
        base: Number of the first node in the pool's arrays.
        offsets: ``int32[B + 1]``, receives the trees' offsets.
        left: ``int32[>= B]``.

    Returns:
        Nodes written, and entries of ``left``.
    """
    offsets[0] = 0
    num_left, used = 0, 0
    for b in range(len(slots)):
        row = table[slots[b]]
        size = min(settings[_DRAFT_SIZE], caps[b])
        own, foreign, end, cursor = _matches(row)
        count = 0
        if foreign > own + settings[_BIAS] and foreign >= settings[_LEAST]:
            image = image_of(row, cursor)
            position = endpos_of(image, row[FIRST_CURSOR + cursor * CURSOR_SIZE + STATE]) + 1
            tokens = array_at(settings[_NODES], base + used + size)
            while count < size:
                token = text_at(image, position + count)
                if token < 0:  # the document ends
                    break
                tokens[base + used + count] = token
                count += 1
            _describe(settings, base + used, count, foreign, _STATIC if cursor < row[NUM_STATIC] else _MEMORY)
        if count == 0 and own > 0 and own >= settings[_LEAST]:
            block = block_of(row)
            text = text_of(block)
            count = max(min(size, block[NUM_TOKENS] - end - 1), 0)
            tokens = array_at(settings[_NODES], base + used + size)
            for i in range(count):
                tokens[base + used + i] = text[end + 1 + i]
            _describe(settings, base + used, count, own, _DYNAMIC)
        if count == 0:
            left[num_left] = b
            num_left += 1
        used += count
        offsets[b + 1] = used
    return used, num_left


@inner
def _describe(settings: Int64Array, begin: int, count: int, match_length: int, origin: int) -> None:
    """Parents, log_probs and origins of a chain behind a match of ``match_length`` tokens."""
    end = begin + count
    parents, log_probs, origins = (
        array_at(settings[_NODES + 1], end),
        array_at(settings[_NODES + 2], end),
        array_at(settings[_NODES + 3], end),
    )
    by_match = array_at(settings[_BY_MATCH], _NUM_LENGTHS)
    for i in range(count):
        parents[begin + i] = i - 1
        log_probs[begin + i] = by_match[min(match_length - 1 + i, _NUM_LENGTHS - 1)]
        origins[begin + i] = origin


@inner
def _matches(row: Int64Array) -> tuple[int, int, int, int]:
    """Tokens of the dynamic and of the best foreign match, where the former ended first, and the latter's cursor."""
    own, foreign, end = 0, 0, -1
    if row[BLOCK] != 0:
        _, own, end = matched(block_of(row))
    cursor = longest_of(row, 0, row[NUM_CURSORS])
    if cursor >= 0:
        foreign = row[FIRST_CURSOR + cursor * CURSOR_SIZE + LENGTH]
    return own, foreign, end, cursor


def _interleaved(trees: DraftTrees, chosen: Int32Array, others: DraftTrees) -> DraftTrees:
    """``trees`` with those of ``others`` in the places ``chosen``, which are empty."""
    room = trees.num_nodes + others.num_nodes
    offsets = np.empty(len(trees.offsets), _INT32)
    tokens, parents = np.empty(room, _INT32), np.empty(room, _INT32)
    log_probs, origins = np.empty(room, _FLOAT32), np.empty(room, _UINT32)
    _interleave(
        chosen, offsets, tokens, parents, log_probs, origins,
        trees.offsets, trees.tokens, trees.parents, trees.log_probs, trees.origins,
        others.offsets, others.tokens, others.parents, others.log_probs, others.origins,
    )  # fmt: skip
    return DraftTrees(offsets, tokens, parents, log_probs, origins)


@compiled
def _interleave(
    chosen: Int32Array,
    offsets: Int32Array,
    tokens: Int32Array,
    parents: Int32Array,
    log_probs: Float32Array,
    origins: UInt32Array,
    offsets_a: Int32Array,
    tokens_a: Int32Array,
    parents_a: Int32Array,
    log_probs_a: Float32Array,
    origins_a: UInt32Array,
    offsets_b: Int32Array,
    tokens_b: Int32Array,
    parents_b: Int32Array,
    log_probs_b: Float32Array,
    origins_b: UInt32Array,
) -> None:
    at, other = 0, 0
    offsets[0] = 0
    for b in range(len(offsets) - 1):
        if other < len(chosen) and chosen[other] == b:
            for i in range(offsets_b[other], offsets_b[other + 1]):
                tokens[at], parents[at] = tokens_b[i], parents_b[i]
                log_probs[at], origins[at] = log_probs_b[i], origins_b[i]
                at += 1
            other += 1
        else:
            for i in range(offsets_a[b], offsets_a[b + 1]):
                tokens[at], parents[at] = tokens_a[i], parents_a[i]
                log_probs[at], origins[at] = log_probs_a[i], origins_a[i]
                at += 1
        offsets[b + 1] = at
