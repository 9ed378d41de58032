"""Scalar products of rows with 16 others at a time: the inner loops of attention."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from outpace._compile import inner
from outpace.kernels.simd import (
    F32,
    I64,
    LANES,
    VECTOR,
    constant,
    f32x16,
    fused_multiply_add,
    integers,
    load,
    load_bits,
    load_even,
    load_float,
    load_odd,
    load_second,
    multiply_add,
    operation,
    pointer,
    shuffle,
    splat,
    store,
    transposed_sums,
)

SCORED_KEYS = 512  # that are scored before their values are read; as many as torch's kernel takes at a time


@operation(f32x16, types.int64, types.int64, types.int64)
def dots(builder: Any, query: Any, keys: Any, vectors: Any) -> Any:
    """The scalar products of one row with 16 others.

    Args:
        builder: Of the code.
        query: Address of ``float32[vectors * 16]``.
        keys: Address of ``float32[vectors, 16 rows, 16]``: of each row 16 numbers, then the next 16 of each.
        vectors: At least 1.
    """
    before, loop, after = builder.block, builder.append_basic_block("dots"), builder.append_basic_block("dots.end")
    builder.branch(loop)
    builder.position_at_end(loop)
    place = builder.phi(I64)
    sums = [builder.phi(VECTOR) for _ in range(LANES)]
    own = builder.load(pointer(builder, builder.add(query, builder.mul(place, ir.Constant(I64, 64))), VECTOR), align=4)
    base = builder.add(keys, builder.mul(place, ir.Constant(I64, 64 * LANES)))
    new = []
    for row, so_far in enumerate(sums):
        address = builder.add(base, ir.Constant(I64, 64 * row))
        new.append(fused_multiply_add(builder, own, builder.load(pointer(builder, address, VECTOR), align=4), so_far))
    following = builder.add(place, ir.Constant(I64, 1))
    place.add_incoming(ir.Constant(I64, 0), before)
    place.add_incoming(following, loop)
    for so_far, value in zip(sums, new, strict=True):
        so_far.add_incoming(constant(0.0), before)
        so_far.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, vectors), loop, after)
    builder.position_at_end(after)
    return transposed_sums(builder, new)


_make_tuple: Any = types.UniTuple
_SHAPE = _make_tuple(types.int64, 5)


def _direct_dots(rows: int, halves: bool) -> Any:
    """`direct_dots` for one row or two, over bfloat16 or ``float32``."""

    def emit(builder: Any, query: Any, keys: Any, shape: Any) -> Any:
        other, stride, blocks, target, other_target = (builder.extract_value(shape, i) for i in range(5))
        queries, targets = [query, other][:rows], [target, other_target][:rows]
        for begin in range(0, LANES, LANES // rows):  # 16 sums at a time: more registers there are not
            keys_here = [
                builder.add(keys, builder.mul(stride, ir.Constant(I64, begin + i))) for i in range(LANES // rows)
            ]
            sums = _block_sums(builder, queries, keys_here, blocks, halves)
            scores = transposed_sums(builder, sums)
            for i, place in enumerate(targets):
                lanes = list(range(i * LANES // rows, (i + 1) * LANES // rows))
                part = shuffle(builder, scores, scores, lanes)
                at = builder.add(place, ir.Constant(I64, 4 * begin))
                builder.store(part, pointer(builder, at, ir.VectorType(F32, len(lanes))), align=4)
        return None

    return operation(types.none, types.int64, types.int64, _SHAPE)(emit)


def _block_sums(builder: Any, queries: list[Any], keys: list[Any], blocks: Any, halves: bool) -> list[Any]:
    """A loop over blocks of 32 numbers; of each query with each key a vector of partial sums."""
    before, loop, after = builder.block, builder.append_basic_block("direct"), builder.append_basic_block("direct.end")
    builder.branch(loop)
    builder.position_at_end(loop)
    place = builder.phi(I64)
    sums = [builder.phi(VECTOR) for _ in range(len(queries) * len(keys))]
    query_at, key_at = (builder.mul(place, ir.Constant(I64, size)) for size in (128, 64 if halves else 128))
    own = [[_load_at(builder, builder.add(query, query_at), 64 * i) for i in range(2)] for query in queries]
    new = list(sums)
    for j, key in enumerate(keys):
        address = builder.add(key, key_at)
        if halves:
            bits = load_bits(builder, address)
            both = (builder.shl(bits, integers(16)), builder.and_(bits, integers(-(2**16))))
            lower, upper = (builder.bitcast(part, VECTOR) for part in both)
        else:
            lower, upper = (_load_at(builder, address, 64 * i) for i in range(2))
        for i, (a, b) in enumerate(own):
            slot = i * len(keys) + j
            new[slot] = fused_multiply_add(builder, b, upper, fused_multiply_add(builder, a, lower, new[slot]))
    following = builder.add(place, ir.Constant(I64, 1))
    place.add_incoming(ir.Constant(I64, 0), before)
    place.add_incoming(following, loop)
    for so_far, value in zip(sums, new, strict=True):
        so_far.add_incoming(constant(0.0), before)
        so_far.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, blocks), loop, after)
    builder.position_at_end(after)
    return new


def _load_at(builder: Any, address: Any, offset: int) -> Any:
    place = builder.add(address, ir.Constant(I64, offset))
    return builder.load(pointer(builder, place, VECTOR), align=4)


# direct_dots(query, keys, (other query, stride, blocks, target, other target)): the scalar products of one row or two with
# the 16 rows from `keys` on, `stride` bytes apart, written to the targets. Rows are `blocks` times 32 numbers; of bfloat16
# keys the query has in each block the even ones first.
DIRECT_DOTS = {(rows, halves): _direct_dots(rows, halves) for rows in (1, 2) for halves in (False, True)}


def _make_accumulate(lower: Any, upper: Any, block_bytes: int) -> Any:
    @inner
    def accumulate(out: Any, other: Any, weights: Any, values: Any, num_keys: Any, step: Any, blocks: Any) -> None:
        """``out += weights @ values`` for a row, and the same for an ``other`` if that is not 0; 32 numbers at a time."""
        for _ in range(blocks):
            value = values
            a, b = load(out), load(out + 64)
            if other:
                c, d = load(other), load(other + 64)
                for i in range(num_keys):
                    first_, second = lower(value), upper(value)
                    weight = splat(load_float(weights + 4 * i))
                    a, b = multiply_add(weight, first_, a), multiply_add(weight, second, b)
                    weight = splat(load_float(weights + 4 * i + 4 * SCORED_KEYS))
                    c, d = multiply_add(weight, first_, c), multiply_add(weight, second, d)
                    value += step
                store(other, c)
                store(other + 64, d)
                other += 128
            else:
                for i in range(num_keys):
                    weight = splat(load_float(weights + 4 * i))
                    a, b = multiply_add(weight, lower(value), a), multiply_add(weight, upper(value), b)
                    value += step
            store(out, a)
            store(out + 64, b)
            out += 128
            values += block_bytes

    return accumulate


accumulate_halves = _make_accumulate(load_even, load_odd, 64)
accumulate_floats = _make_accumulate(load, load_second, 128)


@inner
def accumulate_last(out: Any, other: Any, weights: Any, values: Any, num_keys: Any, vectors: Any) -> None:
    """The same for the last 16 numbers of staged values, whose number of vectors is odd."""
    last = (vectors - 1) * 64
    for r in range(2 if other else 1):
        place, value = (other if r else out) + last, values + last
        a = load(place)
        for i in range(num_keys):
            a = multiply_add(splat(load_float(weights + 4 * (i + r * SCORED_KEYS))), load(value), a)
            value += vectors * 64
        store(place, a)
