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

_I16, I32, I64, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
VECTOR, INTEGERS, HALVES = (ir.VectorType(element, LANES) for element in (F32, I32, _I16))


class _VectorType(types.Type):
    def __init__(self) -> None:
        initialise: Any = super().__init__
        initialise(name="F32x16")


f32x16 = _VectorType()


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, frontend_type: Any) -> None:
        initialise: Any = super().__init__
        initialise(manager, frontend_type, VECTOR)


def operation(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
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


def constant(value: float) -> ir.Constant:
    """The same number in all lanes, known when compiling."""
    return ir.Constant(VECTOR, [value] * LANES)


def integers(value: int) -> ir.Constant:
    """The same integer in all lanes, known when compiling."""
    return ir.Constant(INTEGERS, [value] * LANES)


def pointer(builder: Any, address: Any, kind: Any) -> Any:
    """A pointer to a ``kind`` at an address."""
    return builder.inttoptr(address, kind.as_pointer())


def prefetch(builder: Any, address: Any) -> None:
    """Have what is at an address brought into the cache; the address need not be a valid one."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    insert: Any = cgutils.get_or_insert_function
    function = insert(builder.module, kind, "llvm.prefetch.p0i8")
    reads, keeps, data = (ir.Constant(I32, number) for number in (0, 3, 1))
    builder.call(function, [builder.inttoptr(address, byte), reads, keeps, data])


def _splat(builder: Any, value: Any) -> Any:
    one = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, ir.Constant(VECTOR, ir.Undefined), integers(0))


def shuffle(builder: Any, a: Any, b: Any, places: list[int]) -> Any:
    """The chosen lanes of two vectors behind each other."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(places)), places))


def fused_multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c``, rounded once where the processor can."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    insert: Any = cgutils.get_or_insert_function
    function = insert(builder.module, kind, "llvm.fmuladd.v16f32")
    return builder.call(function, [a, b, c])


def rounded_bits(builder: Any, a: Any) -> Any:
    """Bits of each number rounded to bfloat16, as integers of 32 bits."""
    bits = builder.bitcast(a, INTEGERS)
    odd = builder.and_(builder.lshr(bits, integers(16)), integers(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, integers(0x7FFF))), integers(16))
    return builder.select(builder.fcmp_unordered("uno", a, a), integers(0x7FC0), rounded)


def _across(builder: Any, a: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """One number of all lanes."""
    width = LANES
    while width > 1:
        width //= 2
        low, high = (shuffle(builder, a, a, list(range(begin, begin + width))) for begin in (0, width))
        a = combine(low, high)
    return builder.extract_element(a, ir.Constant(I32, 0))


@operation(types.int64, types.voidptr)
def address_of(builder: Any, pointer: Any) -> Any:
    """The address behind a ``void*``."""
    return builder.ptrtoint(pointer, I64)


@operation(types.int64, types.int64, types.int64)
def fetch_add(builder: Any, address: Any, value: Any) -> Any:
    """Add to an ``int64`` in memory, atomically and in order; what it was before."""
    return builder.atomic_rmw("add", pointer(builder, address, I64), value, "seq_cst")


@operation(types.int64, types.int64)
def load_int64(builder: Any, address: Any) -> Any:
    """The ``int64`` at an address."""
    return builder.load(pointer(builder, address, I64), align=8)


@operation(types.int64, types.int64, types.int64)
def load_field(builder: Any, address: Any, index: Any) -> Any:
    """The ``int64`` with an index, from an address on."""
    place = builder.add(address, builder.mul(index, ir.Constant(I64, 8)))
    return builder.load(pointer(builder, place, I64), align=8)


@operation(types.none, types.int64, types.int64)
def store_int64(builder: Any, address: Any, value: Any) -> Any:
    """Write an ``int64``."""
    builder.store(value, pointer(builder, address, I64), align=8)


@operation(types.float64, types.int64)
def load_float64(builder: Any, address: Any) -> Any:
    """The ``float64`` at an address."""
    return builder.load(pointer(builder, address, ir.DoubleType()), align=8)


@operation(types.float32, types.int64)
def load_float(builder: Any, address: Any) -> Any:
    """The ``float32`` at an address."""
    return builder.load(pointer(builder, address, F32), align=4)


@operation(types.none, types.int64, types.float32)
def store_float(builder: Any, address: Any, value: Any) -> Any:
    """Write a ``float32``."""
    builder.store(value, pointer(builder, address, F32), align=4)


@operation(types.float32, types.int64)
def load_half(builder: Any, address: Any) -> Any:
    """The bfloat16 at an address, as ``float32``."""
    bits = builder.zext(builder.load(pointer(builder, address, _I16), align=2), I32)
    return builder.bitcast(builder.shl(bits, ir.Constant(I32, 16)), F32)


@operation(types.none, types.int64, types.int64)
def copy_half(builder: Any, target: Any, source: Any) -> Any:
    """Copy 2 bytes."""
    builder.store(builder.load(pointer(builder, source, _I16), align=2), pointer(builder, target, _I16), align=2)


@operation(f32x16, types.int64)
def load(builder: Any, address: Any) -> Any:
    """16 ``float32`` at an address."""
    return builder.load(pointer(builder, address, VECTOR), align=4)


@operation(f32x16, types.int64)
def load_halves(builder: Any, address: Any) -> Any:
    """16 bfloat16 at an address, as ``float32``."""
    bits = builder.zext(builder.load(pointer(builder, address, HALVES), align=2), INTEGERS)
    return builder.bitcast(builder.shl(bits, integers(16)), VECTOR)


def load_bits(builder: Any, address: Any) -> Any:
    """16 ``int32`` at an address that may be odd multiples of 2."""
    return builder.load(pointer(builder, address, INTEGERS), align=2)


@operation(f32x16, types.int64)
def load_even(builder: Any, address: Any) -> Any:
    """Of 32 bfloat16 at an address the first, third and so on, as ``float32``: cheaper than 16 neighbours."""
    return builder.bitcast(builder.shl(load_bits(builder, address), integers(16)), VECTOR)


@operation(f32x16, types.int64)
def load_odd(builder: Any, address: Any) -> Any:
    """Of 32 bfloat16 at an address the second, fourth and so on, as ``float32``."""
    return builder.bitcast(builder.and_(load_bits(builder, address), integers(-(2**16))), VECTOR)


@operation(f32x16, types.int64)
def load_second(builder: Any, address: Any) -> Any:
    """Of 32 ``float32`` at an address the second half."""
    return builder.load(pointer(builder, builder.add(address, ir.Constant(I64, 64)), VECTOR), align=4)


@operation(types.none, types.int64, f32x16, f32x16)
def store_even_odd(builder: Any, address: Any, even: Any, odd: Any) -> Any:
    """Write 32 bfloat16 whose even and odd ones are given, rounded like `store_halves`."""
    low, high = rounded_bits(builder, even), builder.shl(rounded_bits(builder, odd), integers(16))
    builder.store(builder.or_(low, high), pointer(builder, address, INTEGERS), align=2)


@operation(types.none, types.int64, f32x16)
def store(builder: Any, address: Any, a: Any) -> Any:
    """Write 16 ``float32``."""
    builder.store(a, pointer(builder, address, VECTOR), align=4)


@operation(types.none, types.int64, f32x16)
def store_halves(builder: Any, address: Any, a: Any) -> Any:
    """Write 16 bfloat16, rounded to the nearest even; NaN stays NaN."""
    builder.store(builder.trunc(rounded_bits(builder, a), HALVES), pointer(builder, address, HALVES), align=2)


@operation(f32x16, f32x16)
def round_halves(builder: Any, a: Any) -> Any:
    """Each number rounded to the nearest bfloat16, the even one of two; NaN stays NaN."""
    return builder.bitcast(builder.shl(rounded_bits(builder, a), integers(16)), VECTOR)


@operation(f32x16, types.float32)
def splat(builder: Any, value: Any) -> Any:
    """The same number in all lanes."""
    return _splat(builder, value)


@operation(types.float32, f32x16)
def first(builder: Any, a: Any) -> Any:
    """The first lane."""
    return builder.extract_element(a, ir.Constant(I32, 0))


@operation(f32x16, f32x16, f32x16)
def add(builder: Any, a: Any, b: Any) -> Any:
    """``a + b``."""
    return builder.fadd(a, b)


@operation(f32x16, f32x16, f32x16)
def multiply(builder: Any, a: Any, b: Any) -> Any:
    """``a * b``."""
    return builder.fmul(a, b)


@operation(f32x16, f32x16, f32x16, f32x16)
def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c``, rounded once where the processor can."""
    return fused_multiply_add(builder, a, b, c)


@operation(f32x16, f32x16, f32x16)
def larger(builder: Any, a: Any, b: Any) -> Any:
    """The larger of each pair; ``b`` where one is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@operation(types.boolean, f32x16, f32x16, f32x16)
def exceeds(builder: Any, a: Any, b: Any, limits: Any) -> Any:
    """Whether any number of ``a`` or ``b`` is above its limit, or NaN."""
    above = builder.or_(builder.fcmp_unordered(">", a, limits), builder.fcmp_unordered(">", b, limits))
    return builder.icmp_unsigned("!=", builder.bitcast(above, ir.IntType(LANES)), ir.Constant(ir.IntType(LANES), 0))


@operation(types.float32, f32x16)
def largest(builder: Any, a: Any) -> Any:
    """The largest lane; NaN may be passed over."""
    return _across(builder, a, lambda x, y: builder.select(builder.fcmp_ordered(">", x, y), x, y))


@operation(types.float32, f32x16)
def total(builder: Any, a: Any) -> Any:
    """The sum of all lanes."""
    return _across(builder, a, builder.fadd)


@operation(f32x16, f32x16)
def exp2(builder: Any, x: Any) -> Any:
    """``2 ** x`` for ``x <= 0``, to 2e-7 of the result; 0 below the normal numbers, NaN for NaN."""
    whole = builder.fadd(x, constant(12582912.0))  # 1.5 * 2**23: what is left of the fraction is a whole number
    part = builder.fsub(x, builder.fsub(whole, constant(12582912.0)))
    power = constant(1.535336188319500e-4)  # Cephes, exp2f
    for coefficient in (1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2, 2.402264791363012e-1):
        power = fused_multiply_add(builder, power, part, constant(coefficient))
    power = fused_multiply_add(builder, power, part, constant(6.931472028550421e-1))
    power = fused_multiply_add(builder, power, part, constant(1.0))
    exponent = builder.shl(builder.bitcast(whole, INTEGERS), integers(23))
    scaled = builder.bitcast(builder.add(builder.bitcast(power, INTEGERS), exponent), VECTOR)
    scaled = builder.select(builder.fcmp_ordered("<", x, constant(-126.0)), constant(0.0), scaled)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, scaled)


@operation(f32x16, f32x16)
def negated_magnitude(builder: Any, x: Any) -> Any:
    """``-|x|``."""
    bits = builder.or_(builder.bitcast(x, INTEGERS), integers(-(2**31)))
    return builder.bitcast(bits, VECTOR)


@operation(f32x16, f32x16, f32x16)
def finish_tanh(builder: Any, x: Any, e: Any) -> Any:
    """``tanh(x)``, given ``e = exp(-2 |x|)``."""
    one = constant(1.0)
    far = builder.fdiv(builder.fsub(one, e), builder.fadd(one, e))
    sign = builder.and_(builder.bitcast(x, INTEGERS), integers(-(2**31)))
    far = builder.bitcast(builder.or_(builder.bitcast(far, INTEGERS), sign), VECTOR)
    square = builder.fmul(x, x)  # near 0 the quotient above loses digits
    series = constant(62.0 / 2835)
    for coefficient in (-17.0 / 315, 2.0 / 15, -1.0 / 3, 1.0):
        series = fused_multiply_add(builder, series, square, constant(coefficient))
    is_near = builder.fcmp_ordered("<", square, constant(0.0625))
    return builder.select(is_near, builder.fmul(series, x), far)


@numba.njit(inline="always")
def tanh(x: Any) -> Any:
    """``tanh(x)`` to 2e-7 of the result."""
    return finish_tanh(x, exp2(multiply(negated_magnitude(x), splat(numba.float32(2.885390081777927)))))


def transposed_sums(builder: Any, rows: list[Any]) -> Any:
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
    return builder.fadd(shuffle(builder, a, b, lower), shuffle(builder, a, b, upper))
