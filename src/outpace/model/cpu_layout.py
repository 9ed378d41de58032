"""What the CPU kernel needs to know of a step, in flat arrays: made once a step, the same for all layers that are alike."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outpace._compile import compiled
from outpace.kernels.blocks import (
    ITEM_BLOCK,
    ITEM_FIRST_KEY,
    ITEM_LAST_KEY,
    ITEM_PART,
    ITEM_PARTS,
    ITEM_ROW,
    ITEM_ROWS,
    ITEM_SEQUENCE,
    ROW_BIAS,
    ROW_HIGH,
    ROW_LOW,
    ROW_NODES,
    SEQUENCE_CACHED,
    SEQUENCE_RUNS,
    SEQUENCE_TOKEN,
    SEQUENCE_TOKENS,
    SEQUENCE_WRITE,
    WRITES,
)
from outpace.model.masks import MaskSpec
from outpace.model.plan import StepPlan
from outpace.tree import Float32Array, Int32Array, Int64Array, UInt64Array

ROWS_AT_ONCE = 64  # query rows of an item, all heads of its group counted: as many as fit into the second-level cache
_LEAST_KEYS = 128  # of a part: below, merging costs more than a second thread brings
_KINDS = {"full": 0, "window": 1, "chunk": 2}


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Work items for layers with one mask pattern and one number of heads. See `outpace.kernels.blocks`.

    Attributes:
        items: ``int64[items, 8]``.
        sequences: ``int64[B, 8]``.
        runs: ``int64[S, 2]``.
        rows: ``int64[T, 4]``; holds addresses in ``bias``.
        bias: ``float32[...]``.
        num_parts: Places for sums of parts.
        block_rows: Most query tokens of an item.
        long: Sequences that are left to another way; only their keys and values are written.
    """

    items: Int64Array
    sequences: Int64Array
    runs: Int64Array
    rows: Int64Array
    bias: Float32Array
    num_parts: int
    block_rows: int
    long: list[int]


def lay_out(plan: StepPlan, spec: MaskSpec, key_heads: int, group: int, num_threads: int, most_tokens: int) -> Layout:
    """Divide a step into work items.

    Args:
        plan: The step.
        spec: The mask pattern.
        key_heads: Items are repeated for each.
        group: Query heads of one key head.
        num_threads: Long sequences are split so that so many have work.
        most_tokens: A sequence with more new tokens than this is left to another way.
    """
    block_rows = max(1, ROWS_AT_ONCE // group)
    sequences, runs = _sequences(
        plan.cu_seqlens_q, plan.segment_offsets, plan.segment_starts, plan.segment_lengths, plan.write_starts
    )
    rows, bias = _rows(
        sequences,
        plan.num_pending,
        plan.position_ids,
        plan.node_offsets,
        plan.ancestors,
        _KINDS[spec.kind],
        spec.size,
    )
    rows[:, ROW_BIAS] += bias.ctypes.data
    items, num_parts, long = _items(sequences, rows, key_heads, block_rows, num_threads, most_tokens)
    return Layout(items, sequences, runs, rows, bias, num_parts, block_rows, long.tolist())


@compiled
def _sequences(
    cu_seqlens_q: Int32Array,
    segment_offsets: Int32Array,
    segment_starts: Int32Array,
    segment_lengths: Int32Array,
    write_starts: Int32Array,
) -> tuple[Int64Array, Int64Array]:
    batch = len(write_starts)
    sequences = np.zeros((batch, 8), np.int64)
    runs = np.empty((len(segment_starts), 2), np.int64)
    for b in range(batch):
        sequences[b, SEQUENCE_TOKEN] = cu_seqlens_q[b]
        sequences[b, SEQUENCE_TOKENS] = cu_seqlens_q[b + 1] - cu_seqlens_q[b]
        sequences[b, SEQUENCE_RUNS] = segment_offsets[b]
        sequences[b, SEQUENCE_WRITE] = write_starts[b]
        for s in range(segment_offsets[b], segment_offsets[b + 1]):
            runs[s, 0], runs[s, 1] = segment_starts[s], segment_lengths[s]
            sequences[b, SEQUENCE_CACHED] += segment_lengths[s]
    return sequences, runs


@compiled
def _rows(
    sequences: Int64Array,
    num_pending: Int32Array,
    position_ids: Int64Array,
    node_offsets: Int32Array,
    ancestors: UInt64Array,
    kind: int,
    size: int,
) -> tuple[Int64Array, Float32Array]:
    """Of each query row what it sees; the places of biases in bytes from their beginning."""
    length = 48
    for b in range(len(sequences)):
        nodes = node_offsets[b + 1] - node_offsets[b]
        length += nodes * (nodes + 48)
    bias = np.full(length, -np.inf, np.float32)
    bias[:16] = 0.0  # the row of all that are no nodes
    place = 48
    rows = np.zeros((len(position_ids), 4), np.int64)
    for b in range(len(sequences)):
        begin, cached, pending = sequences[b, SEQUENCE_TOKEN], sequences[b, SEQUENCE_CACHED], num_pending[b]
        nodes = node_offsets[b + 1] - node_offsets[b]
        for i in range(sequences[b, SEQUENCE_TOKENS]):
            position, low = position_ids[begin + i], 0
            if kind == 1:
                low = max(0, position - size + 1)
            elif kind == 2:
                low = position - position % size
            row = rows[begin + i]
            row[ROW_LOW] = low
            row[ROW_HIGH] = cached + min(i + 1, pending)
            if i < pending:
                continue
            row[ROW_NODES], row[ROW_BIAS] = nodes, 4 * place
            bias[place : place + 16] = 0.0
            for node in range(i - pending + 1):
                bit = (ancestors[node_offsets[b] + i - pending, node // 64] >> np.uint64(node % 64)) & np.uint64(1)
                if bit and position_ids[begin + pending + node] >= low:
                    bias[place + 16 + node] = 0.0
            # A node's place among the keys is not its position: the pattern was applied above. Below `high` it is.
            row[ROW_LOW] = min(low, cached + pending)
            place += nodes + 48
    return rows, bias


@compiled
def _items(
    sequences: Int64Array, rows: Int64Array, key_heads: int, block_rows: int, num_threads: int, most_tokens: int
) -> tuple[Int64Array, int, Int32Array]:
    work = 0
    most_items = 0
    for b in range(len(sequences)):
        tokens = sequences[b, SEQUENCE_TOKENS]
        most_items += 1
        if tokens <= most_tokens:
            for begin in range(0, tokens, block_rows):
                end = min(tokens, begin + block_rows)
                first, last = _range(sequences[b], rows, begin, end)
                work += (last - first) * (4 + end - begin)
                most_items += 1 + (last - first) // _LEAST_KEYS
    most_work = max(1, work * key_heads // (2 * num_threads))
    items = np.zeros((most_items, 8), np.int64)
    long = np.empty(len(sequences), np.int32)
    num_items = num_parts = num_long = 0
    for b in range(len(sequences)):
        tokens = sequences[b, SEQUENCE_TOKENS]
        if tokens > most_tokens:
            long[num_long] = b
            num_long += 1
            items[num_items, ITEM_SEQUENCE] = b | WRITES
            num_items += 1
            continue
        for begin in range(0, tokens, block_rows):
            end = min(tokens, begin + block_rows)
            first, last = _range(sequences[b], rows, begin, end)
            parts = 1
            if num_threads > 1:
                own = (last - first) * (4 + end - begin)
                parts = max(1, min((own + most_work - 1) // most_work, (last - first) // _LEAST_KEYS))
            step = ((last - first + parts - 1) // parts + 15) // 16 * 16
            parts = max(1, (last - first + step - 1) // step)
            for part in range(parts):
                item = items[num_items]
                item[ITEM_SEQUENCE] = b | (WRITES if begin == 0 and part == 0 else 0)
                item[ITEM_ROW], item[ITEM_ROWS] = sequences[b, SEQUENCE_TOKEN] + begin, end - begin
                item[ITEM_FIRST_KEY] = first + part * step
                item[ITEM_LAST_KEY] = min(last, first + (part + 1) * step)
                item[ITEM_PARTS], item[ITEM_BLOCK], item[ITEM_PART] = parts, num_parts, num_parts + part
                num_items += 1
            if parts > 1:
                num_parts += parts
    return items[:num_items].copy(), num_parts, long[:num_long].copy()


@compiled
def _range(sequence: Int64Array, rows: Int64Array, begin: int, end: int) -> tuple[int, int]:
    """First key that one of the rows sees, and the one behind the last."""
    first, last = np.int64(1) << np.int64(62), np.int64(0)
    for i in range(sequence[SEQUENCE_TOKEN] + begin, sequence[SEQUENCE_TOKEN] + end):
        first = min(first, rows[i, ROW_LOW])
        last = max(last, rows[i, ROW_HIGH] + rows[i, ROW_NODES])
    return int(first), int(last)
