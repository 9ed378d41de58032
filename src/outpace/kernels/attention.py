"""Attention of one layer over a ragged batch with trees, as one call (flash-decoding).

A **work item** is a block of one sequence's query rows, for one key head (all of its query heads together, so that a key is
converted once), over a range of its keys. Long ranges are split; whoever finishes the last part of a block merges its parts.

The keys of a sequence are numbered: its cached rows in the order of its segments, then its new tokens. New keys and values
are read from where the model left them, so nobody waits for them to be written to the arena; an item that is marked so
writes them there on its way.

Who sees what is said by a row's numbers: it sees the keys ``low <= k < high``, and of the ``nodes`` keys from ``high`` on
those whose entry in its **bias row** is 0 rather than minus infinity. A bias row is ``float32[16 + nodes + 32]``: 16 zeros,
the nodes, then minus infinity; so 16 keys at any place around ``high`` find their 16 biases in it.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import numba

from outpace._compile import c_function, inner
from outpace.kernels.blocks import (
    CAP,
    COUNTERS,
    EDGE,
    GROUP,
    HALVES,
    ITEM_BLOCK,
    ITEM_BYTES,
    ITEM_FIRST_KEY,
    ITEM_LAST_KEY,
    ITEM_PART,
    ITEM_PARTS,
    ITEM_ROW,
    ITEM_ROWS,
    ITEM_SEQUENCE,
    ITEMS,
    KEY_DIM,
    KEY_HEADS,
    NEXT_ITEM,
    NEXT_SLOT,
    NUM_ITEMS,
    OUT,
    PART_BYTES,
    PARTS,
    QUERY,
    QUERY_HEAD,
    QUERY_ROW,
    ROW_BIAS,
    ROW_BYTES,
    ROW_HIGH,
    ROW_LOW,
    ROW_NODES,
    ROWS,
    SCALE,
    SCRATCH,
    SCRATCH_BYTES,
    SEQUENCE_BYTES,
    SEQUENCES,
    SINKS,
    VALUE_DIM,
    WRITES,
)
from outpace.kernels.products import (
    DIRECT_DOTS,
    SCORED_KEYS,
    accumulate_floats,
    accumulate_halves,
    accumulate_last,
    dots,
)
from outpace.kernels.simd import (
    LANES,
    NEGATIVE_INFINITY,
    add,
    address_of,
    exp2,
    fetch_add,
    first,
    larger,
    largest,
    load,
    load_field,
    load_float,
    load_float64,
    multiply,
    multiply_add,
    round_halves,
    splat,
    store,
    store_float,
    store_int64,
    tanh,
    total,
)
from outpace.kernels.staging import VECTOR_BYTES, read, span, stage, write, write_new
from outpace.kernels.team import Kernel

STAGED_KEYS = 64  # that are converted at a time: they stay in the first-level cache while each row meets them
DIRECT_ROWS = 4  # up to so many rows read keys and values where they lie; more of them pay for a conversion
_LEAST = -1e30  # stands for the maximum of nothing; minus infinity would give NaN
_one_of_floats, _one_of_halves = DIRECT_DOTS[1, False], DIRECT_DOTS[1, True]
_two_of_floats, _two_of_halves = DIRECT_DOTS[2, False], DIRECT_DOTS[2, True]


def scratch_bytes(rows: int, key_dim: int, value_dim: int) -> int:
    """Scratch memory of one thread that handles up to ``rows`` query rows of all heads at a time."""
    key_bytes, value_bytes = (key_dim + 15) // 16 * VECTOR_BYTES, (value_dim + 15) // 16 * VECTOR_BYTES
    per_row = key_bytes + value_bytes + 4 * SCORED_KEYS + 8
    return rows * per_row + STAGED_KEYS * max(key_bytes, value_bytes) + 2 * VECTOR_BYTES


@inner
def _score(
    p: Any, item: Any, sequence: Any, head: Any, begin: Any, end: Any, query: Any, scores: Any, staged: Any
) -> None:
    """Scalar products of all rows with the keys ``begin:end``.

    Few rows read 16 keys at a time from where they lie. For many rows, and where 16 keys do not lie in one piece, keys are
    staged.
    """
    dim, halves = load_field(p, KEY_DIM), load_field(p, HALVES)
    vectors = (dim + LANES - 1) // LANES
    num_rows = load_field(item, ITEM_ROWS) * load_field(p, GROUP)
    is_direct = num_rows <= DIRECT_ROWS and dim % (2 * LANES) == 0
    key = begin
    while key < end:
        until = min(key + (LANES if is_direct else STAGED_KEYS), end)
        if is_direct:
            source, step, until_here = span(p, sequence, head, key, end, 0)
            if until_here - key >= LANES:
                while until_here - key >= LANES:
                    _score_directly(query, source, scores + 4 * (key - begin), num_rows, vectors, step, halves)
                    source += LANES * step
                    key += LANES
                continue
        stage(p, staged, sequence, head, key, until, 0)
        for r in range(num_rows):
            for at in range(key, until, LANES):
                place = scores + 4 * (r * SCORED_KEYS + at - begin)
                store(
                    place,
                    dots(query + r * vectors * VECTOR_BYTES, staged + (at - key) * vectors * VECTOR_BYTES, vectors),
                )
        key = until


@inner
def _score_directly(query: Any, keys: Any, scores: Any, num_rows: Any, vectors: Any, step: Any, halves: Any) -> None:
    r = 0
    while r < num_rows:
        own, place = query + r * vectors * VECTOR_BYTES, scores + 4 * r * SCORED_KEYS
        other = (own + vectors * VECTOR_BYTES, step, vectors // 2, place, place + 4 * SCORED_KEYS)
        if r + 1 < num_rows:
            if halves:
                _two_of_halves(own, keys, other)
            else:
                _two_of_floats(own, keys, other)
        elif halves:
            _one_of_halves(own, keys, other)
        else:
            _one_of_floats(own, keys, other)
        r += 2


@inner
def _limit(p: Any, scores: Any, row: Any, key: Any, end: Any) -> None:
    """Cap one row's scores with the keys ``key:end``, and make them minus infinity where the row does not see them."""
    if load_float64(p + 8 * CAP):
        scale = splat(numba.float32(load_float64(p + 8 * SCALE)))
        for at in range(0, end - key, LANES):
            store(scores + 4 * at, multiply(tanh(load(scores + 4 * at)), scale))
    before = load_field(row, ROW_LOW) - key
    for at in range(0, min(before, end - key), LANES):
        # The edge is 32 times minus infinity, then 16 zeros.
        store(
            scores + 4 * at, add(load(scores + 4 * at), load(load_field(p, EDGE) + 4 * max(at - before + 2 * LANES, 0)))
        )
    high = load_field(row, ROW_HIGH) - key
    for at in range(max(0, high) // LANES * LANES, end - key, LANES):
        bias = splat(numba.float32(NEGATIVE_INFINITY))
        if at - high < load_field(row, ROW_NODES) + LANES:
            bias = load(load_field(row, ROW_BIAS) + 4 * (at - high + LANES))
        store(scores + 4 * at, add(load(scores + 4 * at), bias))


@inner
def _weigh(scores: Any, num_keys: Any, halves: Any, stats: Any, out: Any, vectors: Any) -> None:
    """Turn one row's scores into weights, in their place; what was summed up before is made to fit them.

    As in torch's own kernel the weights of bfloat16 values are rounded to bfloat16, and their sum is not. Rounded otherwise,
    results would be as good, but greedy decoding would part from the model's own at many more ties.
    """
    highest = splat(numba.float32(_LEAST))
    for at in range(0, num_keys, LANES):
        highest = larger(load(scores + 4 * at), highest)
    before = load_float(stats)
    best = max(before, largest(highest))
    sums, shift = splat(numba.float32(0.0)), splat(-best)
    for at in range(0, num_keys, LANES):
        weights = exp2(add(load(scores + 4 * at), shift))
        sums = add(sums, weights)
        store(scores + 4 * at, round_halves(weights) if halves else weights)
    decay = _power(before - best)
    store_float(stats, best)
    store_float(stats + 4, load_float(stats + 4) * decay + total(sums))
    if decay != numba.float32(1.0):
        for i in range(vectors):
            store(out + i * VECTOR_BYTES, multiply(load(out + i * VECTOR_BYTES), splat(decay)))


@inner
def _power(x: Any) -> Any:
    return first(exp2(splat(x)))


@inner
def _add_values(
    p: Any, item: Any, sequence: Any, head: Any, begin: Any, end: Any, out: Any, scores: Any, staged: Any
) -> None:
    """Add the values of the keys ``begin:end``, weighed, to the sums of all rows."""
    dim, halves = load_field(p, VALUE_DIM), load_field(p, HALVES)
    vectors = (dim + LANES - 1) // LANES
    num_rows = load_field(item, ITEM_ROWS) * load_field(p, GROUP)
    is_direct = num_rows <= DIRECT_ROWS and dim % (2 * LANES) == 0
    key = begin
    while key < end:
        if is_direct:
            source, step, until = span(p, sequence, head, key, end, 1)
        else:
            until = min(key + STAGED_KEYS, end)
            stage(p, staged, sequence, head, key, until, 1)
        for r in range(0, num_rows, 2):
            own, place = scores + 4 * (r * SCORED_KEYS + key - begin), out + r * vectors * VECTOR_BYTES
            other = place + vectors * VECTOR_BYTES if r + 1 < num_rows else 0
            if not is_direct:
                accumulate_floats(place, other, own, staged, until - key, vectors * VECTOR_BYTES, vectors // 2)
                if vectors % 2:
                    accumulate_last(place, other, own, staged, until - key, vectors)
            elif halves:
                accumulate_halves(place, other, own, source, until - key, step, vectors // 2)
            else:
                accumulate_floats(place, other, own, source, until - key, step, vectors // 2)
        key = until


@inner
def _finish(p: Any, out: Any, best: Any, weight: Any, token: Any, head: Any, spare: Any) -> None:
    """Divide by the sum of the weights, sink included, and write one row of the result."""
    factor = numba.float32(1.0)
    if load_field(p, SINKS):
        sink = load_float(load_field(p, SINKS) + 4 * head) * numba.float32(1.4426950408889634)
        highest = max(best, sink)
        factor = _power(best - highest)
        weight = weight * factor + _power(sink - highest)
    width, halves = load_field(p, VALUE_DIM), load_field(p, HALVES)
    size = 2 if halves else 4
    heads = load_field(p, KEY_HEADS) * load_field(p, GROUP)
    target = load_field(p, OUT) + (token * heads + head) * width * size
    write(target, out, width, halves, factor / weight, spare)


@inner
def _merge(target: Any, source: Any, num_rows: Any, vectors: Any) -> None:
    """Add one part to another: rows of ``float32[width]``, then maximum and sum of each row."""
    stats = num_rows * vectors * VECTOR_BYTES
    for r in range(num_rows):
        mine, theirs = target + stats + 8 * r, source + stats + 8 * r
        best = max(load_float(mine), load_float(theirs))
        factor, other = _power(load_float(mine) - best), _power(load_float(theirs) - best)
        store_float(mine + 4, load_float(mine + 4) * factor + load_float(theirs + 4) * other)
        store_float(mine, best)
        for i in range(vectors):
            place = (r * vectors + i) * VECTOR_BYTES
            kept = multiply(load(target + place), splat(factor))
            store(target + place, multiply_add(load(source + place), splat(other), kept))


@inner
def _part(p: Any, part: Any, head: Any) -> Any:
    """Address of a part's sums."""
    return load_field(p, PARTS) + (part * load_field(p, KEY_HEADS) + head) * load_field(p, PART_BYTES)


@inner
def _attend(p: Any, scratch: Any, item: Any, head: Any) -> None:
    sequence = load_field(p, SEQUENCES) + (load_field(item, ITEM_SEQUENCE) & (WRITES - 1)) * SEQUENCE_BYTES
    if load_field(item, ITEM_SEQUENCE) & WRITES:
        write_new(p, sequence, head)
    group, row_begin, halves = load_field(p, GROUP), load_field(item, ITEM_ROW), load_field(p, HALVES)
    num_rows = load_field(item, ITEM_ROWS) * group
    if num_rows == 0:
        return
    key_vectors = (load_field(p, KEY_DIM) + LANES - 1) // LANES
    vectors = (load_field(p, VALUE_DIM) + LANES - 1) // LANES
    query = scratch
    scores = query + num_rows * key_vectors * VECTOR_BYTES
    staged = scores + num_rows * 4 * SCORED_KEYS
    spare = staged + STAGED_KEYS * max(key_vectors, vectors) * VECTOR_BYTES
    out = spare + 2 * VECTOR_BYTES
    if load_field(item, ITEM_PARTS) > 1:
        out = _part(p, load_field(item, ITEM_PART), head)
    stats = out + num_rows * vectors * VECTOR_BYTES  # of each row the maximum, then the sum of weights

    cap = load_float64(p + 8 * CAP)
    scale = numba.float32(load_float64(p + 8 * SCALE))
    entry = numba.float32(cap) if cap else scale
    for r in range(num_rows):
        source = load_field(p, QUERY) + (row_begin + r // group) * load_field(p, QUERY_ROW)
        source += (head * group + r % group) * load_field(p, QUERY_HEAD)
        place = query + r * key_vectors * VECTOR_BYTES
        read(place, source, load_field(p, KEY_DIM), halves, VECTOR_BYTES)
        for i in range(key_vectors):
            store(place + i * VECTOR_BYTES, multiply(load(place + i * VECTOR_BYTES), splat(entry)))
        for i in range(vectors):
            store(out + (r * vectors + i) * VECTOR_BYTES, splat(numba.float32(0.0)))
        store_float(stats + 8 * r, numba.float32(_LEAST))
        store_float(stats + 8 * r + 4, numba.float32(0.0))

    rows = load_field(p, ROWS) + row_begin * ROW_BYTES
    for begin in range(load_field(item, ITEM_FIRST_KEY), load_field(item, ITEM_LAST_KEY), SCORED_KEYS):
        end = min(begin + SCORED_KEYS, load_field(item, ITEM_LAST_KEY))
        _score(p, item, sequence, head, begin, end, query, scores, staged)
        for r in range(num_rows):
            own = scores + 4 * r * SCORED_KEYS
            _limit(p, own, rows + r // group * ROW_BYTES, begin, end)
            _weigh(own, end - begin, halves, stats + 8 * r, out + r * vectors * VECTOR_BYTES, vectors)
        _add_values(p, item, sequence, head, begin, end, out, scores, staged)

    if load_field(item, ITEM_PARTS) > 1:
        first_part, num_parts = load_field(item, ITEM_BLOCK), load_field(item, ITEM_PARTS)
        counter = load_field(p, COUNTERS) + 8 * (first_part * load_field(p, KEY_HEADS) + head)
        if fetch_add(counter, 1) < num_parts - 1:
            return
        store_int64(counter, 0)  # for the next layer
        out = _part(p, first_part, head)
        for part in range(1, num_parts):  # always in this order, so that rounding does not depend on who was last
            _merge(out, _part(p, first_part + part, head), num_rows, vectors)
        stats = out + num_rows * vectors * VECTOR_BYTES
    for r in range(num_rows):
        best, weight = load_float(stats + 8 * r), load_float(stats + 8 * r + 4)
        place = out + r * vectors * VECTOR_BYTES
        _finish(p, place, best, weight, row_begin + r // group, head * group + r % group, spare)


@inner
def attend(block: Any) -> None:
    """One thread's share of a call; ``block`` is the address of the parameters."""
    p = address_of(block)
    scratch = load_field(p, SCRATCH) + fetch_add(p + 8 * NEXT_SLOT, 1) * load_field(p, SCRATCH_BYTES)
    key_heads = load_field(p, KEY_HEADS)
    num_items = load_field(p, NUM_ITEMS) * key_heads
    work = fetch_add(p + 8 * NEXT_ITEM, 1)
    while work < num_items:
        _attend(p, scratch, load_field(p, ITEMS) + work // key_heads * ITEM_BYTES, work % key_heads)
        work = fetch_add(p + 8 * NEXT_ITEM, 1)


@functools.cache
def attention_kernel() -> Kernel:
    """The compiled kernel; a process's first call takes seconds if it is not in Numba's cache."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()

    def attention(block):  # type: ignore[no-untyped-def]
        if digest:  # a part of the cache's key: of other files' changes Numba takes no notice
            attend(block)

    return Kernel(c_function(attention))
