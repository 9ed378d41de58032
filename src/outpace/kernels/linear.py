"""A linear layer over one token or a few: every weight is read once, in the order in which it lies in memory.

Each thread takes blocks of 16 output features from a counter, and multiplies their 16 rows of weights with the tokens'
rows, 16 numbers at a time. With one token that is bound by the memory's speed alone, so no other layout is needed.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils

from outpace.kernels.simd import (
    LANES,
    _constant,
    _fold,
    _multiply_add,
    _operation,
    _pointer,
    _I32,
    _I64,
    _INTEGERS,
    _integers,
    _VECTOR,
    add,
    address_of,
    f32x16,
    fetch_add,
    load,
    load_halves,
    load_int64,
    store,
    store_halves,
)

HAS_BF16_PRODUCTS = bool(binding.get_host_cpu_features().get("avx512bf16", False))

# The parameter block, int64 each: addresses, then numbers. TOKENS rows of IN_FEATURES are multiplied with OUT_FEATURES rows.
INPUT, WEIGHT, BIAS, OUTPUT, NEXT_BLOCK, TOKENS, IN_FEATURES, OUT_FEATURES, BLOCK = range(9)
PARAMETERS = BLOCK + 1


class _BFloat(ir.Type):
    """LLVM's ``bfloat``, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def _add_products_of_halves(builder: Any, a: Any, b: Any, so_far: Any) -> Any:
    """Sums of the products of 32 bfloat16 each (16 integers that hold two): even places, then odd ones."""
    if HAS_BF16_PRODUCTS:
        vector = ir.VectorType(_BFloat(), 2 * LANES)
        kind = ir.FunctionType(_VECTOR, [_VECTOR, vector, vector])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
        return builder.call(function, [so_far, builder.bitcast(a, vector), builder.bitcast(b, vector)])
    for part in (lambda v: builder.shl(v, _integers(16)), lambda v: builder.and_(v, _integers(-65536))):
        so_far = _multiply_add(builder, builder.bitcast(part(a), _VECTOR), builder.bitcast(part(b), _VECTOR), so_far)
    return so_far


def _products(halves: bool, rows: int) -> Any:
    """An intrinsic: the scalar products of one row with 16 that follow each other, ``rows`` of them at a time."""
    multiply = _add_products_of_halves if halves else _multiply_add
    vector, size = (_INTEGERS, 2) if halves else (_VECTOR, 4)

    def fetch(builder: Any, address: Any) -> Any:
        return builder.load(_pointer(builder, address, vector), align=4)

    def row_products(builder: Any, token: Any, weights: Any, features: Any) -> Any:
        stride = builder.mul(features, ir.Constant(_I64, size))
        sums: list[Any] = []
        for first in range(0, LANES, rows):
            before = builder.block
            loop, after = builder.append_basic_block("products"), builder.append_basic_block("products.end")
            builder.branch(loop)
            builder.position_at_end(loop)
            place = builder.phi(_I64)
            held = [builder.phi(_VECTOR) for _ in range(rows)]
            own = fetch(builder, builder.add(token, place))
            new = []
            for row, so_far in enumerate(held, first):
                base = builder.add(weights, builder.mul(stride, ir.Constant(_I64, row)))
                new.append(multiply(builder, fetch(builder, builder.add(base, place)), own, so_far))
            following = builder.add(place, ir.Constant(_I64, 64))
            place.add_incoming(ir.Constant(_I64, 0), before)
            place.add_incoming(following, loop)
            for so_far, value in zip(held, new, strict=True):
                so_far.add_incoming(_constant(0.0), before)
                so_far.add_incoming(value, loop)
            builder.cbranch(builder.icmp_signed("<", following, stride), loop, after)
            builder.position_at_end(after)
            sums += new
        half = LANES // 2
        while half:
            sums = [_fold(builder, sums[i], sums[i + half], half) for i in range(half)]
            half //= 2
        return sums[0]

    row_products.__name__ = f"row_products_{'halves' if halves else 'floats'}"
    return _operation(f32x16, types.int64, types.int64, types.int64)(row_products)


_products_of_halves = _products(True, 8)
_products_of_floats = _products(False, 8)


@numba.njit(error_model="numpy")
def linear_halves(block: Any) -> None:
    """One thread's share of a bfloat16 layer."""
    p = address_of(block)
    tokens, features, outputs = (
        load_int64(p + 8 * TOKENS),
        load_int64(p + 8 * IN_FEATURES),
        load_int64(p + 8 * OUT_FEATURES),
    )
    source, weight, bias, target = load_int64(p), load_int64(p + 8), load_int64(p + 16), load_int64(p + 24)
    size = load_int64(p + 8 * BLOCK)
    while True:
        begin = fetch_add(p + 8 * NEXT_BLOCK, size)
        if begin >= outputs:
            break
        for output in range(begin, min(begin + size, outputs), LANES):
            for token in range(tokens):
                sums = _products_of_halves(source + token * features * 2, weight + output * features * 2, features)
                if bias:
                    sums = add(sums, load_halves(bias + output * 2))
                store_halves(target + (token * outputs + output) * 2, sums)


@numba.njit(error_model="numpy")
def linear_floats(block: Any) -> None:
    """One thread's share of a float32 layer."""
    p = address_of(block)
    tokens, features, outputs = (
        load_int64(p + 8 * TOKENS),
        load_int64(p + 8 * IN_FEATURES),
        load_int64(p + 8 * OUT_FEATURES),
    )
    source, weight, bias, target = load_int64(p), load_int64(p + 8), load_int64(p + 16), load_int64(p + 24)
    size = load_int64(p + 8 * BLOCK)
    while True:
        begin = fetch_add(p + 8 * NEXT_BLOCK, size)
        if begin >= outputs:
            break
        for output in range(begin, min(begin + size, outputs), LANES):
            for token in range(tokens):
                sums = _products_of_floats(source + token * features * 4, weight + output * features * 4, features)
                if bias:
                    sums = add(sums, load(bias + output * 4))
                store(target + (token * outputs + output) * 4, sums)
