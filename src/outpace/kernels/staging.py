"""Reading keys and values of one head as ``float32``, wherever they lie, and writing them and results."""

from __future__ import annotations

from typing import Any

import numba

from outpace._compile import inner
from outpace.kernels.blocks import (
    CACHED_KEYS,
    HALVES,
    KEY,
    KEY_DIM,
    KEY_HEAD,
    KEY_HEADS,
    KEY_ROW,
    RUNS,
    SEQUENCE_CACHED,
    SEQUENCE_RUNS,
    SEQUENCE_TOKEN,
    SEQUENCE_TOKENS,
    SEQUENCE_WRITE,
)
from outpace.kernels.simd import (
    LANES,
    copy_half,
    load,
    load_even,
    load_field,
    load_float,
    load_half,
    load_halves,
    load_odd,
    load_second,
    multiply,
    splat,
    store,
    store_even_odd,
    store_float,
    store_halves,
)

VECTOR_BYTES = 4 * LANES


@inner
def read(target: Any, source: Any, count: Any, halves: Any, step: Any) -> None:
    """``count`` numbers as ``float32``, in vectors that lie ``step`` bytes apart, the last one filled up with 0.

    Of 32 bfloat16 the even ones become a vector and the odd ones the next, in keys, queries, values and sums alike.
    """
    at = 0
    while at + 2 * LANES <= count:
        if halves:
            store(target, load_even(source))
            store(target + step, load_odd(source))
            source += 64
        else:
            store(target, load(source))
            store(target + step, load_second(source))
            source += 128
        target += 2 * step
        at += 2 * LANES
    while at < count:
        if at + LANES <= count:
            store(target, load_halves(source) if halves else load(source))
            source += 32 if halves else 64
        else:
            store(target, splat(numba.float32(0.0)))
            for i in range(count - at):
                store_float(target + 4 * i, load_half(source + 2 * i) if halves else load_float(source + 4 * i))
        target += step
        at += LANES


@inner
def write(target: Any, source: Any, count: Any, halves: Any, factor: Any, spare: Any) -> None:
    """What `read` makes, times a factor, as it was."""
    factors = splat(factor)
    at = 0
    while at + 2 * LANES <= count:
        a, b = multiply(load(source), factors), multiply(load(source + 64), factors)
        if halves:
            store_even_odd(target, a, b)
            target += 64
        else:
            store(target, a)
            store(target + 64, b)
            target += 128
        source += 128
        at += 2 * LANES
    while at < count:
        a = multiply(load(source), factors)
        place = target if at + LANES <= count else spare
        if halves:
            store_halves(place, a)
            target += 32
        else:
            store(place, a)
            target += 64
        if place == spare:
            back = target - (32 if halves else 64)
            for i in range(0, (count - at) * (2 if halves else 4), 2):
                copy_half(back + i, spare + i)
        source += 64
        at += LANES


@inner
def copy(target: Any, source: Any, count: Any, halves: Any) -> None:
    """Copy ``count`` numbers as they are."""
    size = count * 2 if halves else count * 4
    for i in range(0, size - VECTOR_BYTES + 1, VECTOR_BYTES):
        store(target + i, load(source + i))
    for i in range(size // VECTOR_BYTES * VECTOR_BYTES, size, 2):
        copy_half(target + i, source + i)


@inner
def write_new(p: Any, sequence: Any, head: Any) -> None:
    """Write one head's new keys and values to the arena."""
    halves, key_heads = load_field(p, HALVES), load_field(p, KEY_HEADS)
    size = 2 if halves else 4
    for side in range(2):
        dim = load_field(p, KEY_DIM + side)
        stride = key_heads * dim * size
        target = load_field(p, CACHED_KEYS + side) + load_field(sequence, SEQUENCE_WRITE) * stride + head * dim * size
        step = load_field(p, KEY_ROW + 2 * side)
        source = (
            load_field(p, KEY + side)
            + load_field(sequence, SEQUENCE_TOKEN) * step
            + head * load_field(p, KEY_HEAD + 2 * side)
        )
        for i in range(load_field(sequence, SEQUENCE_TOKENS)):
            copy(target + i * stride, source + i * step, dim, halves)


@inner
def span(p: Any, sequence: Any, head: Any, key: Any, end: Any, side: Any) -> Any:
    """Where the keys (side 0) or values (side 1) from ``key`` on lie: address, stride, and the key at which that ends."""
    cached = load_field(sequence, SEQUENCE_CACHED)
    if key >= cached:
        step = load_field(p, KEY_ROW + 2 * side)
        token = load_field(sequence, SEQUENCE_TOKEN) + key - cached
        return load_field(p, KEY + side) + token * step + head * load_field(p, KEY_HEAD + 2 * side), step, end
    run, begin = load_field(p, RUNS) + load_field(sequence, SEQUENCE_RUNS) * 16, 0
    while key >= begin + load_field(run, 1):
        begin += load_field(run, 1)
        run += 16
    size = load_field(p, KEY_DIM + side) * (2 if load_field(p, HALVES) else 4)
    step = load_field(p, KEY_HEADS) * size
    address = load_field(p, CACHED_KEYS + side) + (load_field(run, 0) + key - begin) * step + head * size
    return address, step, min(end, begin + load_field(run, 1))


@inner
def stage(p: Any, target: Any, sequence: Any, head: Any, begin: Any, end: Any, side: Any) -> None:
    """Rows ``begin:end`` of one head as ``float32``.

    Keys (side 0) lie as `dots` wants them, 16 rows interleaved, the last rows filled up with 0. Values (side 1) row by row.
    """
    halves, dim = load_field(p, HALVES), load_field(p, KEY_DIM + side)
    vectors = (dim + LANES - 1) // LANES
    at = begin
    while at < end:
        source, step, until = span(p, sequence, head, at, end, side)
        for i in range(at - begin, until - begin):
            if side:
                read(target + i * vectors * VECTOR_BYTES, source, dim, halves, VECTOR_BYTES)
            else:
                place = target + (i // LANES * vectors * LANES + i % LANES) * VECTOR_BYTES
                read(place, source, dim, halves, LANES * VECTOR_BYTES)
            source += step
        at = until
    if side == 0:
        for i in range(end - begin, (end - begin + LANES - 1) // LANES * LANES):
            place = target + (i // LANES * vectors * LANES + i % LANES) * VECTOR_BYTES
            for j in range(vectors):
                store(place + j * LANES * VECTOR_BYTES, splat(numba.float32(0.0)))
