"""Vectors of 16 floats, as a type for Numba: what the kernels are written in.

Memory is reached by address (``int64``, bytes). LLVM lowers a vector of 16 to one register of AVX-512, two of AVX2 or four
of SSE and NEON, so nothing here depends on the processor. Loops that LLVM would have to vectorise by itself do depend on
its mood: those over bfloat16, over rows with a stride, and with several sums at a time are not.

Of bfloat16 only the storage is 16 bits wide: bits are shifted up on the way in, and rounded to the nearest even on the way out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16
NEGATIVE_INFINITY = float("-inf")

_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR, _INTEGERS, _HALVES = (ir.VectorType(element, LANES) for element in (_F32, _I32, _I16))


class _VectorType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="F32x16")  # type: ignore[no-untyped-call]


f32x16 = _VectorType()


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, frontend_type: Any) -> None:
        super().__init__(manager, frontend_type, _VECTOR)


def _operation(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """An intrinsic with fixed types, made of a function ``(builder, *values) -> value``."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def codegen(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            found = emit(builder, *values)
            return _context.get_dummy_value() if result == types.none else found

        signature = result(*arguments)
        # Numba reads the number of arguments off the Python function.
        makers = {
            1: lambda typing, a: (signature, codegen),
            2: lambda typing, a, b: (signature, codegen),
            3: lambda typing, a, b, c: (signature, codegen),
        }
        maker: Any = makers[len(arguments)]
        maker.__name__ = maker.__qualname__ = emit.__name__
        maker.__doc__ = emit.__doc__
        return intrinsic(maker)

    return decorate


def _constant(value: float) -> ir.Constant:
    return ir.Constant(_VECTOR, [value] * LANES)


def _integers(value: int) -> ir.Constant:
    return ir.Constant(_INTEGERS, [value] * LANES)


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _splat(builder: Any, value: Any) -> Any:
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, ir.Constant(_VECTOR, ir.Undefined), _integers(0))


def _shuffle(builder: Any, a: Any, b: Any, places: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(places)), places))


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    insert: Any = cgutils.get_or_insert_function
    function = insert(builder.module, kind, "llvm.fmuladd.v16f32")
    return builder.call(function, [a, b, c])


def _halves(builder: Any, a: Any) -> Any:
    """Bits of each number rounded to bfloat16, as integers of 32 bits."""
    bits = builder.bitcast(a, _INTEGERS)
    odd = builder.and_(builder.lshr(bits, _integers(16)), _integers(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, _integers(0x7FFF))), _integers(16))
    return builder.select(builder.fcmp_unordered("uno", a, a), _integers(0x7FC0), rounded)


def _across(builder: Any, a: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """One number of all lanes."""
    width = LANES
    while width > 1:
        width //= 2
        low, high = (_shuffle(builder, a, a, list(range(begin, begin + width))) for begin in (0, width))
        a = combine(low, high)
    return builder.extract_element(a, ir.Constant(_I32, 0))


@_operation(types.int64, types.voidptr)
def address_of(builder: Any, pointer: Any) -> Any:
    """The address behind a ``void*``."""
    return builder.ptrtoint(pointer, _I64)


@_operation(types.int64, types.int64, types.int64)
def fetch_add(builder: Any, address: Any, value: Any) -> Any:
    """Add to an ``int64`` in memory, atomically and in order; what it was before."""
    return builder.atomic_rmw("add", _pointer(builder, address, _I64), value, "seq_cst")


@_operation(types.int64, types.int64)
def load_int64(builder: Any, address: Any) -> Any:
    """The ``int64`` at an address."""
    return builder.load(_pointer(builder, address, _I64), align=8)


@_operation(types.none, types.int64, types.int64)
def store_int64(builder: Any, address: Any, value: Any) -> Any:
    """Write an ``int64``."""
    builder.store(value, _pointer(builder, address, _I64), align=8)


@_operation(types.float64, types.int64)
def load_float64(builder: Any, address: Any) -> Any:
    """The ``float64`` at an address."""
    return builder.load(_pointer(builder, address, ir.DoubleType()), align=8)


@_operation(types.float32, types.int64)
def load_float(builder: Any, address: Any) -> Any:
    """The ``float32`` at an address."""
    return builder.load(_pointer(builder, address, _F32), align=4)


@_operation(types.none, types.int64, types.float32)
def store_float(builder: Any, address: Any, value: Any) -> Any:
    """Write a ``float32``."""
    builder.store(value, _pointer(builder, address, _F32), align=4)


@_operation(types.float32, types.int64)
def load_half(builder: Any, address: Any) -> Any:
    """The bfloat16 at an address, as ``float32``."""
    bits = builder.zext(builder.load(_pointer(builder, address, _I16), align=2), _I32)
    return builder.bitcast(builder.shl(bits, ir.Constant(_I32, 16)), _F32)


@_operation(types.none, types.int64, types.int64)
def copy_half(builder: Any, target: Any, source: Any) -> Any:
    """Copy 2 bytes."""
    builder.store(builder.load(_pointer(builder, source, _I16), align=2), _pointer(builder, target, _I16), align=2)


@_operation(f32x16, types.int64)
def load(builder: Any, address: Any) -> Any:
    """16 ``float32`` at an address."""
    return builder.load(_pointer(builder, address, _VECTOR), align=4)


@_operation(f32x16, types.int64)
def load_halves(builder: Any, address: Any) -> Any:
    """16 bfloat16 at an address, as ``float32``."""
    bits = builder.zext(builder.load(_pointer(builder, address, _HALVES), align=2), _INTEGERS)
    return builder.bitcast(builder.shl(bits, _integers(16)), _VECTOR)


@_operation(types.none, types.int64, f32x16)
def store(builder: Any, address: Any, a: Any) -> Any:
    """Write 16 ``float32``."""
    builder.store(a, _pointer(builder, address, _VECTOR), align=4)


@_operation(types.none, types.int64, f32x16)
def store_halves(builder: Any, address: Any, a: Any) -> Any:
    """Write 16 bfloat16, rounded to the nearest even; NaN stays NaN."""
    builder.store(builder.trunc(_halves(builder, a), _HALVES), _pointer(builder, address, _HALVES), align=2)


@_operation(f32x16, f32x16)
def round_halves(builder: Any, a: Any) -> Any:
    """Each number rounded to the nearest bfloat16, the even one of two; NaN stays NaN."""
    return builder.bitcast(builder.shl(_halves(builder, a), _integers(16)), _VECTOR)


@_operation(f32x16, types.float32)
def splat(builder: Any, value: Any) -> Any:
    """The same number in all lanes."""
    return _splat(builder, value)


@_operation(types.float32, f32x16)
def first(builder: Any, a: Any) -> Any:
    """The first lane."""
    return builder.extract_element(a, ir.Constant(_I32, 0))


@_operation(f32x16, f32x16, f32x16)
def add(builder: Any, a: Any, b: Any) -> Any:
    """``a + b``."""
    return builder.fadd(a, b)


@_operation(f32x16, f32x16, f32x16)
def multiply(builder: Any, a: Any, b: Any) -> Any:
    """``a * b``."""
    return builder.fmul(a, b)


@_operation(f32x16, f32x16, f32x16, f32x16)
def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c``, rounded once where the processor can."""
    return _multiply_add(builder, a, b, c)


@_operation(f32x16, f32x16, f32x16)
def larger(builder: Any, a: Any, b: Any) -> Any:
    """The larger of each pair; ``b`` where one is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@_operation(types.float32, f32x16)
def largest(builder: Any, a: Any) -> Any:
    """The largest lane; NaN may be passed over."""
    return _across(builder, a, lambda x, y: builder.select(builder.fcmp_ordered(">", x, y), x, y))


@_operation(types.float32, f32x16)
def total(builder: Any, a: Any) -> Any:
    """The sum of all lanes."""
    return _across(builder, a, builder.fadd)


@_operation(f32x16, f32x16)
def exp2(builder: Any, x: Any) -> Any:
    """``2 ** x`` for ``x <= 0``, to 2e-7 of the result; 0 below the normal numbers, NaN for NaN."""
    whole = builder.fadd(x, _constant(12582912.0))  # 1.5 * 2**23: what is left of the fraction is a whole number
    part = builder.fsub(x, builder.fsub(whole, _constant(12582912.0)))
    power = _constant(1.535336188319500e-4)  # Cephes, exp2f
    for coefficient in (1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2, 2.402264791363012e-1):
        power = _multiply_add(builder, power, part, _constant(coefficient))
    power = _multiply_add(builder, power, part, _constant(6.931472028550421e-1))
    power = _multiply_add(builder, power, part, _constant(1.0))
    exponent = builder.shl(builder.bitcast(whole, _INTEGERS), _integers(23))
    scaled = builder.bitcast(builder.add(builder.bitcast(power, _INTEGERS), exponent), _VECTOR)
    scaled = builder.select(builder.fcmp_ordered("<", x, _constant(-126.0)), _constant(0.0), scaled)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, scaled)


@_operation(f32x16, f32x16)
def negated_magnitude(builder: Any, x: Any) -> Any:
    """``-|x|``."""
    bits = builder.or_(builder.bitcast(x, _INTEGERS), _integers(-(2**31)))
    return builder.bitcast(bits, _VECTOR)


@_operation(f32x16, f32x16, f32x16)
def finish_tanh(builder: Any, x: Any, e: Any) -> Any:
    """``tanh(x)``, given ``e = exp(-2 |x|)``."""
    one = _constant(1.0)
    far = builder.fdiv(builder.fsub(one, e), builder.fadd(one, e))
    sign = builder.and_(builder.bitcast(x, _INTEGERS), _integers(-(2**31)))
    far = builder.bitcast(builder.or_(builder.bitcast(far, _INTEGERS), sign), _VECTOR)
    square = builder.fmul(x, x)  # near 0 the quotient above loses digits
    series = _constant(62.0 / 2835)
    for coefficient in (-17.0 / 315, 2.0 / 15, -1.0 / 3, 1.0):
        series = _multiply_add(builder, series, square, _constant(coefficient))
    is_near = builder.fcmp_ordered("<", square, _constant(0.0625))
    return builder.select(is_near, builder.fmul(series, x), far)


@numba.njit(inline="always")
def tanh(x: Any) -> Any:
    """``tanh(x)`` to 2e-7 of the result."""
    return finish_tanh(x, exp2(multiply(negated_magnitude(x), splat(numba.float32(2.885390081777927)))))


@_operation(f32x16, types.int64, types.int64, types.int64)
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
    place = builder.phi(_I64)
    sums = [builder.phi(_VECTOR) for _ in range(LANES)]
    own = builder.load(
        _pointer(builder, builder.add(query, builder.mul(place, ir.Constant(_I64, 64))), _VECTOR), align=4
    )
    base = builder.add(keys, builder.mul(place, ir.Constant(_I64, 64 * LANES)))
    new = []
    for row, so_far in enumerate(sums):
        address = builder.add(base, ir.Constant(_I64, 64 * row))
        new.append(_multiply_add(builder, own, builder.load(_pointer(builder, address, _VECTOR), align=4), so_far))
    following = builder.add(place, ir.Constant(_I64, 1))
    place.add_incoming(ir.Constant(_I64, 0), before)
    place.add_incoming(following, loop)
    for so_far, value in zip(sums, new, strict=True):
        so_far.add_incoming(_constant(0.0), before)
        so_far.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, vectors), loop, after)
    builder.position_at_end(after)
    return _transposed_sums(builder, new)


def _transposed_sums(builder: Any, rows: list[Any]) -> Any:
    """A vector whose lane ``i`` is the sum of ``rows[i]``: in each round two vectors become one of half sums."""
    step = LANES // 2
    while step:
        rows = [_fold(builder, rows[i], rows[i + step], step) for i in range(step)]
        step //= 2
    return rows[0]


def _fold(builder: Any, a: Any, b: Any, step: int) -> Any:
    """Add the halves (of every ``2 * step`` lanes) of ``a`` into the lower half, those of ``b`` into the upper."""
    lower = [lane if not lane & step else LANES + lane - step for lane in range(LANES)]
    upper = [lane + step if not lane & step else LANES + lane for lane in range(LANES)]
    return builder.fadd(_shuffle(builder, a, b, lower), _shuffle(builder, a, b, upper))
