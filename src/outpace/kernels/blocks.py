"""Where the attention kernel finds what: the parameter block and the tables that it points to."""

from __future__ import annotations

# The parameter block, int64 each; addresses and strides in bytes, lengths in numbers. First what changes with every layer.
(
    QUERY, KEY, VALUE, OUT, CACHED_KEYS, CACHED_VALUES, SINKS,
    QUERY_ROW, QUERY_HEAD, KEY_ROW, KEY_HEAD, VALUE_ROW, VALUE_HEAD,
    SCALE, CAP,  # float64: of the scores to powers of 2; 0 or (soft cap) of the hyperbolic tangent
    NEXT_ITEM, NEXT_SLOT,  # counters
    HALVES, KEY_HEADS, GROUP, KEY_DIM, VALUE_DIM,
    NUM_ITEMS, ITEMS, SEQUENCES, RUNS, ROWS, EDGE, COUNTERS, PARTS, PART_BYTES, SCRATCH, SCRATCH_BYTES,
) = range(33)  # fmt: skip
PARAMETERS = SCRATCH_BYTES + 1
# An item: int64[8]. A block that is split has its parts' sums at the places ITEM_BLOCK to ITEM_BLOCK + ITEM_PARTS - 1, of
# which ITEM_PART is the item's own.
ITEM_SEQUENCE, ITEM_ROW, ITEM_ROWS, ITEM_FIRST_KEY, ITEM_LAST_KEY, ITEM_BLOCK, ITEM_PARTS, ITEM_PART = range(8)
ITEM_BYTES = 64
WRITES = 1 << 32  # added to ITEM_SEQUENCE: this item writes the sequence's new keys and values to the arena
# A sequence: int64[8]. A run is consecutive cached rows: int64[2], first row and number.
SEQUENCE_TOKEN, SEQUENCE_TOKENS, SEQUENCE_CACHED, SEQUENCE_RUNS, SEQUENCE_WRITE = range(5)
SEQUENCE_BYTES = 64
# A query row: int64[4].
ROW_LOW, ROW_HIGH, ROW_NODES, ROW_BIAS = range(4)
ROW_BYTES = 32
