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

from typing import Any

import numba

from outpace.kernels.simd import (
    LANES,
    NEGATIVE_INFINITY,
    add,
    address_of,
    copy_half,
    dots,
    exp2,
    fetch_add,
    first,
    larger,
    largest,
    load,
    load_float,
    load_float64,
    load_half,
    load_halves,
    load_int64,
    multiply,
    multiply_add,
    round_halves,
    splat,
    store,
    store_float,
    store_halves,
    store_int64,
    tanh,
    total,
)

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

STAGED_KEYS = 64  # that are converted at a time: they stay in the first-level cache while each row meets them
SCORED_KEYS = 512  # that are scored before their values are read; as many as torch's kernel takes at a time
_LEAST = -1e30  # stands for the maximum of nothing; minus infinity would give NaN
_VECTOR = 4 * LANES  # bytes


@numba.njit(error_model="numpy")
def _get(address: Any, field: Any) -> Any:
    return load_int64(address + 8 * field)


def scratch_bytes(rows: int, key_dim: int, value_dim: int) -> int:
    """Scratch memory of one thread that handles up to ``rows`` query rows of all heads at a time."""
    key_bytes, value_bytes = (key_dim + 15) // 16 * _VECTOR, (value_dim + 15) // 16 * _VECTOR
    per_row = key_bytes + value_bytes + 4 * SCORED_KEYS + 8
    return rows * per_row + STAGED_KEYS * max(key_bytes, value_bytes) + 2 * _VECTOR


@numba.njit(error_model="numpy")
def _read(target: Any, source: Any, count: Any, halves: Any, step: Any) -> None:
    """``count`` numbers as ``float32``, in vectors that lie ``step`` bytes apart, the last one filled up with 0."""
    whole = count // LANES
    if halves:
        for i in range(whole):
            store(target + i * step, load_halves(source + i * 32))
    else:
        for i in range(whole):
            store(target + i * step, load(source + i * _VECTOR))
    if count > whole * LANES:
        target += whole * step
        store(target, splat(numba.float32(0.0)))
        for i in range(whole * LANES, count):
            place = target + 4 * (i - whole * LANES)
            store_float(place, load_half(source + 2 * i) if halves else load_float(source + 4 * i))


@numba.njit(error_model="numpy")
def _write(target: Any, source: Any, count: Any, halves: Any, factor: Any, spare: Any) -> None:
    """``count`` numbers of ``float32`` times a factor, in the storage's type."""
    whole = count // LANES
    factors = splat(factor)
    for i in range(whole):
        scaled = multiply(load(source + i * _VECTOR), factors)
        if halves:
            store_halves(target + i * 32, scaled)
        else:
            store(target + i * _VECTOR, scaled)
    if count > whole * LANES:
        scaled = multiply(load(source + whole * _VECTOR), factors)
        if halves:
            store_halves(spare, scaled)
        else:
            store(spare, scaled)
        for i in range(count - whole * LANES):
            if halves:
                copy_half(target + 2 * (whole * LANES + i), spare + 2 * i)
            else:
                store_float(target + 4 * (whole * LANES + i), load_float(spare + 4 * i))


@numba.njit(error_model="numpy")
def _copy(target: Any, source: Any, count: Any, halves: Any) -> None:
    size = count * 2 if halves else count * 4
    for i in range(0, size - _VECTOR + 1, _VECTOR):
        store(target + i, load(source + i))
    for i in range(size // _VECTOR * _VECTOR, size, 2):
        copy_half(target + i, source + i)


@numba.njit(error_model="numpy")
def _write_new(p: Any, sequence: Any, head: Any) -> None:
    """Write one head's new keys and values to the arena."""
    halves, key_heads = _get(p, HALVES), _get(p, KEY_HEADS)
    size = 2 if halves else 4
    for side in range(2):
        dim = _get(p, KEY_DIM + side)
        stride = key_heads * dim * size
        target = _get(p, CACHED_KEYS + side) + _get(sequence, SEQUENCE_WRITE) * stride + head * dim * size
        step = _get(p, KEY_ROW + 2 * side)
        source = _get(p, KEY + side) + _get(sequence, SEQUENCE_TOKEN) * step + head * _get(p, KEY_HEAD + 2 * side)
        for i in range(_get(sequence, SEQUENCE_TOKENS)):
            _copy(target + i * stride, source + i * step, dim, halves)


@numba.njit(error_model="numpy")
def _stage(p: Any, target: Any, sequence: Any, head: Any, begin: Any, end: Any, side: Any) -> None:
    """Rows ``begin:end`` of one head as ``float32``.

    Keys (side 0) lie as `dots` wants them, 16 rows interleaved, the last rows filled up with 0. Values (side 1) row by row.
    """
    halves, dim = _get(p, HALVES), _get(p, KEY_DIM + side)
    size = 2 if halves else 4
    vectors = (dim + LANES - 1) // LANES
    cached = _get(sequence, SEQUENCE_CACHED)
    run = _get(p, RUNS) + _get(sequence, SEQUENCE_RUNS) * 16
    run_begin = 0
    at = begin
    while at < end:
        if at >= cached:
            step = _get(p, KEY_ROW + 2 * side)
            token = _get(sequence, SEQUENCE_TOKEN) + at - cached
            source = _get(p, KEY + side) + token * step + head * _get(p, KEY_HEAD + 2 * side)
            until = end
        else:
            while at >= run_begin + _get(run, 1):
                run_begin += _get(run, 1)
                run += 16
            step = _get(p, KEY_HEADS) * dim * size
            row = _get(run, 0) + at - run_begin
            source = _get(p, CACHED_KEYS + side) + row * step + head * dim * size
            until = min(end, run_begin + _get(run, 1))
        for i in range(at - begin, until - begin):
            if side:
                _read(target + i * vectors * _VECTOR, source, dim, halves, _VECTOR)
            else:
                place = target + (i // LANES * vectors * LANES + i % LANES) * _VECTOR
                _read(place, source, dim, halves, LANES * _VECTOR)
            source += step
        at = until
    if side == 0:
        for i in range(end - begin, (end - begin + LANES - 1) // LANES * LANES):
            place = target + (i // LANES * vectors * LANES + i % LANES) * _VECTOR
            for j in range(vectors):
                store(place + j * LANES * _VECTOR, splat(numba.float32(0.0)))


@numba.njit(error_model="numpy")
def _masked(scores: Any, key: Any, row: Any, edge: Any) -> Any:
    """Scores of 16 keys from ``key`` on, minus infinity where a row does not see them."""
    beyond = key - _get(row, ROW_HIGH)
    if beyond > -LANES:
        if beyond < _get(row, ROW_NODES) + LANES:
            scores = add(scores, load(_get(row, ROW_BIAS) + 4 * (beyond + LANES)))
        else:
            scores = add(scores, splat(numba.float32(NEGATIVE_INFINITY)))
    before = key - _get(row, ROW_LOW)
    if before < 0:
        # The edge is 32 times minus infinity, then 16 zeros.
        scores = add(scores, load(edge + 4 * max(before + 2 * LANES, 0)))
    return scores


@numba.njit(error_model="numpy")
def _score(
    query: Any, keys: Any, scores: Any, vectors: Any, key: Any, end: Any, row: Any, edge: Any, cap: Any, scale: Any
) -> None:
    """Scores of one row with the keys ``key:end``."""
    for at in range(0, end - key, LANES):
        found = dots(query, keys + at * vectors * _VECTOR, vectors)
        if cap:
            found = multiply(tanh(found), splat(scale))
        store(scores + 4 * at, _masked(found, key + at, row, edge))


@numba.njit(error_model="numpy")
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
            store(out + i * _VECTOR, multiply(load(out + i * _VECTOR), splat(decay)))


@numba.njit(error_model="numpy")
def _power(x: Any) -> Any:
    return first(exp2(splat(x)))


@numba.njit(error_model="numpy")
def _accumulate(out: Any, weights: Any, values: Any, num_keys: Any, vectors: Any) -> None:
    """``out += weights @ values`` of one row, four vectors at a time."""
    stride = vectors * _VECTOR
    at = 0
    while at + 4 <= vectors:
        place, value = out + at * _VECTOR, values + at * _VECTOR
        a, b, c, d = load(place), load(place + 64), load(place + 128), load(place + 192)
        for i in range(num_keys):
            weight = splat(load_float(weights + 4 * i))
            a, b = multiply_add(weight, load(value), a), multiply_add(weight, load(value + 64), b)
            c, d = multiply_add(weight, load(value + 128), c), multiply_add(weight, load(value + 192), d)
            value += stride
        store(place, a)
        store(place + 64, b)
        store(place + 128, c)
        store(place + 192, d)
        at += 4
    while at < vectors:
        place, value = out + at * _VECTOR, values + at * _VECTOR
        a = load(place)
        for i in range(num_keys):
            a = multiply_add(splat(load_float(weights + 4 * i)), load(value), a)
            value += stride
        store(place, a)
        at += 1


@numba.njit(error_model="numpy")
def _finish(p: Any, out: Any, best: Any, weight: Any, token: Any, head: Any, spare: Any) -> None:
    """Divide by the sum of the weights, sink included, and write one row of the result."""
    factor = numba.float32(1.0)
    if _get(p, SINKS):
        sink = load_float(_get(p, SINKS) + 4 * head) * numba.float32(1.4426950408889634)
        highest = max(best, sink)
        factor = _power(best - highest)
        weight = weight * factor + _power(sink - highest)
    width, halves = _get(p, VALUE_DIM), _get(p, HALVES)
    size = 2 if halves else 4
    heads = _get(p, KEY_HEADS) * _get(p, GROUP)
    target = _get(p, OUT) + (token * heads + head) * width * size
    _write(target, out, width, halves, factor / weight, spare)


@numba.njit(error_model="numpy")
def _merge(target: Any, source: Any, num_rows: Any, vectors: Any) -> None:
    """Add one part to another: rows of ``float32[width]``, then maximum and sum of each row."""
    stats = num_rows * vectors * _VECTOR
    for r in range(num_rows):
        mine, theirs = target + stats + 8 * r, source + stats + 8 * r
        best = max(load_float(mine), load_float(theirs))
        factor, other = _power(load_float(mine) - best), _power(load_float(theirs) - best)
        store_float(mine + 4, load_float(mine + 4) * factor + load_float(theirs + 4) * other)
        store_float(mine, best)
        for i in range(vectors):
            place = (r * vectors + i) * _VECTOR
            kept = multiply(load(target + place), splat(factor))
            store(target + place, multiply_add(load(source + place), splat(other), kept))


@numba.njit(error_model="numpy")
def _part(p: Any, part: Any, head: Any) -> Any:
    """Address of a part's sums."""
    return _get(p, PARTS) + (part * _get(p, KEY_HEADS) + head) * _get(p, PART_BYTES)


@numba.njit(error_model="numpy")
def _attend(p: Any, scratch: Any, item: Any, head: Any) -> None:
    sequence = _get(p, SEQUENCES) + (_get(item, ITEM_SEQUENCE) & (WRITES - 1)) * SEQUENCE_BYTES
    if _get(item, ITEM_SEQUENCE) & WRITES:
        _write_new(p, sequence, head)
    group, row_begin, halves = _get(p, GROUP), _get(item, ITEM_ROW), _get(p, HALVES)
    num_rows = _get(item, ITEM_ROWS) * group
    if num_rows == 0:
        return
    key_vectors = (_get(p, KEY_DIM) + LANES - 1) // LANES
    vectors = (_get(p, VALUE_DIM) + LANES - 1) // LANES
    query = scratch
    scores = query + num_rows * key_vectors * _VECTOR
    staged = scores + num_rows * 4 * SCORED_KEYS
    spare = staged + STAGED_KEYS * max(key_vectors, vectors) * _VECTOR
    out = spare + 2 * _VECTOR
    if _get(item, ITEM_PARTS) > 1:
        out = _part(p, _get(item, ITEM_PART), head)
    stats = out + num_rows * vectors * _VECTOR  # of each row the maximum, then the sum of weights

    cap = load_float64(p + 8 * CAP)
    scale = numba.float32(load_float64(p + 8 * SCALE))
    entry = numba.float32(cap) if cap else scale
    for r in range(num_rows):
        source = _get(p, QUERY) + (row_begin + r // group) * _get(p, QUERY_ROW)
        source += (head * group + r % group) * _get(p, QUERY_HEAD)
        place = query + r * key_vectors * _VECTOR
        _read(place, source, _get(p, KEY_DIM), halves, _VECTOR)
        for i in range(key_vectors):
            store(place + i * _VECTOR, multiply(load(place + i * _VECTOR), splat(entry)))
        for i in range(vectors):
            store(out + (r * vectors + i) * _VECTOR, splat(numba.float32(0.0)))
        store_float(stats + 8 * r, numba.float32(_LEAST))
        store_float(stats + 8 * r + 4, numba.float32(0.0))

    rows, edge = _get(p, ROWS) + row_begin * ROW_BYTES, _get(p, EDGE)
    for begin in range(_get(item, ITEM_FIRST_KEY), _get(item, ITEM_LAST_KEY), SCORED_KEYS):
        end = min(begin + SCORED_KEYS, _get(item, ITEM_LAST_KEY))
        for key in range(begin, end, STAGED_KEYS):
            until = min(key + STAGED_KEYS, end)
            _stage(p, staged, sequence, head, key, until, 0)
            for r in range(num_rows):
                own = scores + 4 * (r * SCORED_KEYS + key - begin)
                row = rows + r // group * ROW_BYTES
                _score(query + r * key_vectors * _VECTOR, staged, own, key_vectors, key, until, row, edge, cap, scale)
        for r in range(num_rows):
            _weigh(
                scores + 4 * r * SCORED_KEYS, end - begin, halves, stats + 8 * r, out + r * vectors * _VECTOR, vectors
            )
        for key in range(begin, end, STAGED_KEYS):
            until = min(key + STAGED_KEYS, end)
            _stage(p, staged, sequence, head, key, until, 1)
            for r in range(num_rows):
                own = scores + 4 * (r * SCORED_KEYS + key - begin)
                _accumulate(out + r * vectors * _VECTOR, own, staged, until - key, vectors)

    if _get(item, ITEM_PARTS) > 1:
        first_part, num_parts = _get(item, ITEM_BLOCK), _get(item, ITEM_PARTS)
        counter = _get(p, COUNTERS) + 8 * (first_part * _get(p, KEY_HEADS) + head)
        if fetch_add(counter, 1) < num_parts - 1:
            return
        store_int64(counter, 0)  # for the next layer
        out = _part(p, first_part, head)
        for part in range(1, num_parts):  # always in this order, so that rounding does not depend on who was last
            _merge(out, _part(p, first_part + part, head), num_rows, vectors)
        stats = out + num_rows * vectors * _VECTOR
    for r in range(num_rows):
        best, weight = load_float(stats + 8 * r), load_float(stats + 8 * r + 4)
        place = out + r * vectors * _VECTOR
        _finish(p, place, best, weight, row_begin + r // group, head * group + r % group, spare)


@numba.njit(error_model="numpy")
def attend(block: Any) -> None:
    """One thread's share of a call; ``block`` is the address of the parameters."""
    p = address_of(block)
    scratch = _get(p, SCRATCH) + fetch_add(p + 8 * NEXT_SLOT, 1) * _get(p, SCRATCH_BYTES)
    key_heads = _get(p, KEY_HEADS)
    num_items = _get(p, NUM_ITEMS) * key_heads
    work = fetch_add(p + 8 * NEXT_ITEM, 1)
    while work < num_items:
        _attend(p, scratch, _get(p, ITEMS) + work // key_heads * ITEM_BYTES, work % key_heads)
        work = fetch_add(p + 8 * NEXT_ITEM, 1)
