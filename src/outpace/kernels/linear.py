"""A linear layer over one token or a few: every weight is read once, in the order in which it lies in memory.

Each thread takes blocks of output features from a counter, and goes through their rows of weights one after the other, so
that the processor's prefetching sees one long stream. One token at a time is bound by the memory's speed. Of several
tokens four go together, with four rows of weights, so that what is loaded is used four times.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import binding, ir
from numba import config, types
from numba.core import cgutils

from outpace.kernels import simd
from outpace.kernels.simd import (
    I64,
    LANES,
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


def _has(feature: str) -> bool:
    """Whether the processor that Numba compiles for has an instruction set; where that cannot be said, it has not."""
    settings: Any = config
    if settings.CPU_NAME is not None or settings.CPU_FEATURES is not None:
        return f"+{feature}" in (settings.CPU_FEATURES or "").split(",")
    try:
        return bool(binding.get_host_cpu_features().get(feature, False))
    except RuntimeError:
        return False


# The parameter block, int64 each: addresses, the counter, lengths. TOKENS rows of IN_FEATURES numbers, one after the other, are
# multiplied with OUT_FEATURES rows of weights; BLOCK features are taken at a time. Lengths but TOKENS are multiples of `UNIT`.
INPUT, OUTPUT, NEXT_FEATURE, TOKENS, WEIGHT, BIAS, IN_FEATURES, OUT_FEATURES, BLOCK, HALVES = range(10)
PARAMETERS = HALVES + 1
UNIT = 2 * LANES
GROUP = 4  # tokens that go together, and features that go together with them

# Whether the processor multiplies bfloat16 itself. Elsewhere they are widened first, and groups of tokens do not pay.
MULTIPLIES_HALVES = _has("avx512bf16")


def multiplies_groups(halves: bool) -> bool:
    """Whether several tokens go together: of bfloat16 only where the processor multiplies them itself."""
    return MULTIPLIES_HALVES or not halves


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's ``bfloat``, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def _add_products_widened(builder: Any, a: Any, b: Any, so_far: Any) -> Any:
    """Add the products of 32 bfloat16 each, which 16 integers hold in pairs: of the lower ones, then of the upper ones."""
    low = [builder.shl(pairs, simd.integers(16)) for pairs in (a, b)]
    high = [builder.and_(pairs, simd.integers(-65536)) for pairs in (a, b)]
    for part in (low, high):
        one, other = (builder.bitcast(bits, simd.VECTOR) for bits in part)
        so_far = simd.fused_multiply_add(builder, one, other, so_far)
    return so_far


def _add_products_of_halves(builder: Any, a: Any, b: Any, so_far: Any) -> Any:
    """The same in one instruction."""
    vector = ir.VectorType(_BFloat(), 2 * LANES)
    kind = ir.FunctionType(simd.VECTOR, [simd.VECTOR, vector, vector])
    insert: Any = cgutils.get_or_insert_function
    function = insert(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    return builder.call(function, [so_far, builder.bitcast(a, vector), builder.bitcast(b, vector)])


def _sums_along(
    builder: Any, combine: Any, vector: Any, rows: list[Any], others: list[Any], row_bytes: Any, ahead: Any = None
) -> list[Any]:
    """A loop over the columns: of each of ``rows`` with each of ``others`` the sums of products, in 16 lanes.

    The rows ``ahead`` bytes further on, if that is given, are fetched into the cache meanwhile.
    """
    before = builder.block
    loop, after = builder.append_basic_block("products"), builder.append_basic_block("products.end")
    builder.branch(loop)
    builder.position_at_end(loop)
    place = builder.phi(I64)
    so_far = [builder.phi(simd.VECTOR) for _ in range(len(rows) * len(others))]

    def fetch(base: Any) -> Any:
        return builder.load(simd.pointer(builder, builder.add(base, place), vector), align=2)

    if ahead is not None:
        for row in rows:
            simd.prefetch(builder, builder.add(builder.add(row, ahead), place))
    weights, tokens = [fetch(row) for row in rows], [fetch(other) for other in others]
    pairs = [(weight, token) for weight in weights for token in tokens]
    new = [combine(builder, weight, token, value) for (weight, token), value in zip(pairs, so_far, strict=True)]
    following = builder.add(place, ir.Constant(I64, 64))
    place.add_incoming(ir.Constant(I64, 0), before)
    place.add_incoming(following, loop)
    for phi, value in zip(so_far, new, strict=True):
        phi.add_incoming(simd.constant(0.0), before)
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, row_bytes), loop, after)
    builder.position_at_end(after)
    return new


def _row_products(halves: bool) -> Any:
    """An intrinsic: the scalar products of a token's row with 16 rows of weights that follow each other."""
    combine = _add_products_widened if halves else simd.fused_multiply_add
    vector, size = (simd.INTEGERS, 2) if halves else (simd.VECTOR, 4)

    def row_products(builder: Any, token: Any, weights: Any, features: Any) -> Any:
        row_bytes = builder.mul(features, ir.Constant(I64, size))
        sums: list[Any] = []
        for row in range(LANES):
            base = builder.add(weights, builder.mul(row_bytes, ir.Constant(I64, row)))
            sums += _sums_along(builder, combine, vector, [base], [token], row_bytes)
        return simd.transposed_sums(builder, sums)

    row_products.__name__ = f"row_products_of_{'halves' if halves else 'floats'}"
    return simd.operation(f32x16, types.int64, types.int64, types.int64)(row_products)


def _group_products(halves: bool) -> Any:
    """An intrinsic: `GROUP` features of as many tokens, computed and stored; the last token stands for those beyond it."""
    combine = _add_products_of_halves if halves else simd.fused_multiply_add
    vector, size = (simd.INTEGERS, 2) if halves else (simd.VECTOR, 4)

    def group_products(builder: Any, p: Any, first_token: Any, feature: Any) -> Any:
        def parameter(field: int) -> Any:
            return builder.load(simd.pointer(builder, builder.add(p, ir.Constant(I64, 8 * field)), I64), align=8)

        def scaled(number: Any, factor: Any) -> Any:
            return builder.mul(number, factor)

        width = ir.Constant(I64, size)
        row_bytes, out_bytes = scaled(parameter(IN_FEATURES), width), scaled(parameter(OUT_FEATURES), width)
        last = builder.sub(parameter(TOKENS), ir.Constant(I64, 1))
        tokens = []
        for place in range(GROUP):
            token = builder.add(first_token, ir.Constant(I64, place))
            tokens.append(builder.select(builder.icmp_signed("<", token, last), token, last))
        others = [builder.add(parameter(INPUT), scaled(token, row_bytes)) for token in tokens]
        rows = [builder.add(parameter(WEIGHT), scaled(feature, row_bytes))]
        for _ in range(1, GROUP):
            rows.append(builder.add(rows[-1], row_bytes))
        sums = _sums_along(
            builder, combine, vector, rows, others, row_bytes, ahead=scaled(row_bytes, ir.Constant(I64, GROUP))
        )
        found = simd.transposed_sums(builder, sums)
        found = builder.fadd(found, _bias(builder, builder.add(parameter(BIAS), scaled(feature, width)), halves))
        target = builder.add(parameter(OUTPUT), scaled(feature, width))
        _store(builder, found, [builder.add(target, scaled(token, out_bytes)) for token in tokens], halves)

    group_products.__name__ = f"group_products_of_{'halves' if halves else 'floats'}"
    return simd.operation(types.none, types.int64, types.int64, types.int64)(group_products)


def _bias(builder: Any, address: Any, halves: bool) -> Any:
    """`GROUP` numbers, each in `GROUP` lanes that follow each other."""
    if halves:
        integers = ir.VectorType(simd.I32, GROUP)
        bits = builder.load(simd.pointer(builder, address, ir.VectorType(ir.IntType(16), GROUP)), align=2)
        bits = builder.shl(builder.zext(bits, integers), ir.Constant(integers, [16] * GROUP))
        numbers = builder.bitcast(bits, ir.VectorType(simd.F32, GROUP))
    else:
        numbers = builder.load(simd.pointer(builder, address, ir.VectorType(simd.F32, GROUP)), align=4)
    return simd.shuffle(builder, numbers, numbers, [feature for feature in range(GROUP) for _ in range(GROUP)])


def _store(builder: Any, found: Any, targets: list[Any], halves: bool) -> None:
    """Write each token's `GROUP` features beside each other; lane ``GROUP * feature + token`` holds them before."""
    if halves:
        found = builder.trunc(simd.rounded_bits(builder, found), simd.HALVES)
    kind = ir.VectorType(ir.IntType(16) if halves else simd.F32, GROUP)
    for token, target in enumerate(targets):
        own = simd.shuffle(builder, found, found, [GROUP * feature + token for feature in range(GROUP)])
        builder.store(own, simd.pointer(builder, target, kind), align=2)


_products_of_halves = _row_products(halves=True)
_products_of_floats = _row_products(halves=False)
_group_of_floats = _group_products(halves=False)
_group_of_halves = _group_products(halves=True) if MULTIPLIES_HALVES else _group_of_floats


@numba.njit(error_model="numpy")
def _one_token(p: Any, token: Any, output: Any) -> None:
    """16 output features of one token."""
    features, outputs = load_int64(p + 8 * IN_FEATURES), load_int64(p + 8 * OUT_FEATURES)
    source, target = load_int64(p + 8 * INPUT), load_int64(p + 8 * OUTPUT)
    weight, bias = load_int64(p + 8 * WEIGHT), load_int64(p + 8 * BIAS)
    if load_int64(p + 8 * HALVES):
        sums = _products_of_halves(source + token * features * 2, weight + output * features * 2, features)
        store_halves(target + (token * outputs + output) * 2, add(sums, load_halves(bias + output * 2)))
    else:
        sums = _products_of_floats(source + token * features * 4, weight + output * features * 4, features)
        store(target + (token * outputs + output) * 4, add(sums, load(bias + output * 4)))


@numba.njit(error_model="numpy")
def linear(block: Any) -> None:
    """One thread's share of a layer.

    Args:
        block: Address of the parameter block.
    """
    p = address_of(block)
    tokens, outputs = load_int64(p + 8 * TOKENS), load_int64(p + 8 * OUT_FEATURES)
    size, halves = load_int64(p + 8 * BLOCK), load_int64(p + 8 * HALVES)
    groups = MULTIPLIES_HALVES or not halves
    while True:
        begin = fetch_add(p + 8 * NEXT_FEATURE, size)
        if begin >= outputs:
            break
        for output in range(begin, min(begin + size, outputs), LANES):
            for first in range(0, tokens, GROUP):
                if groups and tokens - first > 1:
                    for feature in range(output, output + LANES, GROUP):
                        if halves:
                            _group_of_halves(p, first, feature)
                        else:
                            _group_of_floats(p, first, feature)
                else:
                    for token in range(first, min(first + GROUP, tokens)):
                        _one_token(p, token, output)
