"""A step of the packed batch, written down in plain tensors.

This is "unpad input tokens" (EMS-SD, section 3.3): the tokens of all samples stand behind each other in one row, and
offsets say which are whose. Whoever executes a plan needs nothing else, so a worker process, another rank or a captured
graph can replay it.

One sequence's part of the row is its pending tokens, then its tree's nodes. Example: a sequence of 10 cached tokens with
one pending token ``a`` at position 10, and under it the tree ``b -> c`` and ``d``, contributes the tokens ``a b c d`` at
the positions ``10 11 12 11``.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from outpace.tree import DraftTrees, Int32Array, Int64Array, UInt64Array, ancestor_bits, node_depths


@dataclass(frozen=True, eq=False, slots=True)
class StepPlan:
    """One packed pass. ``B`` sequences, ``T`` tokens, ``n`` nodes, ``S`` segments, ``R`` rows of logits.

    Attributes:
        input_ids: ``int64[T]``.
        position_ids: ``int64[T]``, the token's index in its own sequence.
        cu_seqlens_q: ``int32[B + 1]``, tokens of sequence ``b`` are ``cu_seqlens_q[b]:cu_seqlens_q[b + 1]``.
        num_pending: ``int32[B]``, how many of them are pending; the rest are nodes.
        segment_offsets: ``int32[B + 1]`` into the next two.
        segment_starts: ``int32[S]``, arena rows where cached keys and values begin, in the sequence's order.
        segment_lengths: ``int32[S]``, rows of each.
        write_starts: ``int32[B]``, arena row for the sequence's first new token; the others follow it.
        node_offsets: ``int32[B + 1]`` into ``ancestors``.
        ancestors: ``uint64[n, words]``, see `outpace.tree.ancestor_bits`.
        logit_rows: ``int64[R]``, indices into the ``T`` tokens whose logits are wanted: at least, for every sequence that
            verifies, its root and then its nodes.
        verify_rows: ``int64[R']``, indices into ``logit_rows`` of just those.
        logit_offsets: ``int32[B + 1]`` into ``verify_rows``.
    """

    input_ids: Int64Array
    position_ids: Int64Array
    cu_seqlens_q: Int32Array
    num_pending: Int32Array
    segment_offsets: Int32Array
    segment_starts: Int32Array
    segment_lengths: Int32Array
    write_starts: Int32Array
    node_offsets: Int32Array
    ancestors: UInt64Array
    logit_rows: Int64Array
    verify_rows: Int64Array
    logit_offsets: Int32Array

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        return len(self.num_pending)

    @property
    def num_tokens(self) -> int:
        """Tokens in the packed row."""
        return len(self.input_ids)

    def cached_lengths(self) -> Int32Array:
        """``int32[B]``: rows of keys and values that each sequence has before the step."""
        totals = np.zeros(len(self.segment_lengths) + 1, np.int32)
        np.cumsum(self.segment_lengths, out=totals[1:])
        lengths: Int32Array = totals[self.segment_offsets[1:]] - totals[self.segment_offsets[:-1]]
        return lengths

    def write_rows(self) -> Int64Array:
        """``int64[T]``: the arena row of each token's keys and values."""
        counts = np.diff(self.cu_seqlens_q)
        shift = self.write_starts.astype(np.int64) - self.cu_seqlens_q[:-1]
        rows: Int64Array = np.repeat(shift, counts) + np.arange(self.num_tokens, dtype=np.int64)
        return rows


def pack(
    pending: SequenceOf[Int32Array],
    first_positions: SequenceOf[int],
    trees: DraftTrees,
    segments: SequenceOf[SequenceOf[tuple[int, int]]],
    write_starts: SequenceOf[int],
    wants_logits: SequenceOf[bool],
    every_row: bool = False,
) -> StepPlan:
    """Write one step down.

    Args:
        pending: Pending tokens of each sequence, ``int32[p]`` with ``p >= 1``.
        first_positions: Position of each sequence's first pending token, that is its cached length.
        trees: One tree for each sequence.
        segments: ``(start, length)`` of each sequence's cached rows.
        write_starts: Arena row for each sequence's first new token.
        wants_logits: False for a chunk of a prompt that does not reach its end; such a sequence must have no nodes.
        every_row: Ask for the logits of all ``T`` tokens, in their order, as drafters do that learn from them.
    """
    batch_size = len(pending)
    num_pending = np.fromiter((len(p) for p in pending), np.int32, batch_size)
    cu_seqlens = _offsets(num_pending + trees.sizes)
    input_ids, position_ids = _lay_out(pending, first_positions, trees, cu_seqlens)
    roots = cu_seqlens[:-1] + num_pending - 1
    wanted = [np.arange(roots[b], cu_seqlens[b + 1]) for b in range(batch_size) if wants_logits[b]]
    rows: Int64Array = np.concatenate(wanted).astype(np.int64) if wanted else np.empty(0, np.int64)
    flat = [segment for own in segments for segment in own]
    return StepPlan(
        input_ids=input_ids,
        position_ids=position_ids,
        cu_seqlens_q=cu_seqlens,
        num_pending=num_pending,
        segment_offsets=_offsets([len(own) for own in segments]),
        segment_starts=np.fromiter((start for start, _ in flat), np.int32, len(flat)),
        segment_lengths=np.fromiter((length for _, length in flat), np.int32, len(flat)),
        write_starts=np.asarray(write_starts, np.int32),
        node_offsets=trees.offsets,
        ancestors=ancestor_bits(trees.offsets, trees.parents),
        logit_rows=np.arange(len(input_ids)) if every_row else rows,
        verify_rows=rows if every_row else np.arange(len(rows)),
        logit_offsets=_offsets(np.where(wants_logits, trees.sizes + 1, 0)),
    )


def _offsets(counts: SequenceOf[int] | npt.NDArray[np.integer[Any]]) -> Int32Array:
    """``int32[n + 1]``: where each of ``n`` parts begins, and the end."""
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def _lay_out(
    pending: SequenceOf[Int32Array], first_positions: SequenceOf[int], trees: DraftTrees, cu_seqlens: Int32Array
) -> tuple[Int64Array, Int64Array]:
    """Token ids and positions of the packed row, ``int64[T]`` each."""
    input_ids = np.empty(int(cu_seqlens[-1]), np.int64)
    position_ids = np.empty(int(cu_seqlens[-1]), np.int64)
    depths = node_depths(trees.offsets, trees.parents)
    for b, own in enumerate(pending):
        begin, end = int(cu_seqlens[b]), int(cu_seqlens[b + 1])
        root = begin + len(own) - 1
        input_ids[begin : root + 1] = own
        position_ids[begin : root + 1] = np.arange(first_positions[b], first_positions[b] + len(own))
        if end > root + 1:
            nodes = slice(int(trees.offsets[b]), int(trees.offsets[b + 1]))
            input_ids[root + 1 : end] = trees.tokens[nodes]
            position_ids[root + 1 : end] = position_ids[root] + depths[nodes]
    return input_ids, position_ids
