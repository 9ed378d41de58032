"""Root-mean-square normalisation of rows in one pass, in the three ways in which models round."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from outpace.kernels.simd import (
    LANES,
    add,
    address_of,
    fetch_add,
    load,
    load_float64,
    load_halves,
    load_int64,
    multiply,
    multiply_add,
    round_halves,
    splat,
    store,
    store_halves,
    total,
)

# The parameter block, int64 each, EPSILON float64. ROWS rows of WIDTH numbers, a multiple of 16.
INPUT, OUTPUT, NEXT_ROW, ROWS, WEIGHT, WIDTH, EPSILON, HALVES, KIND = range(9)
PARAMETERS = KIND + 1
# How the normalised row meets the weights: rounded first (Llama); in float32 (T5, OLMo 2); in float32, as 1 + weight (Gemma).
ROUNDED, EXACT, OFFSET = KINDS = range(3)


@numba.njit(error_model="numpy")
def rms_norm(block: Any) -> None:
    """One thread's share of the rows.

    Args:
        block: Address of the parameter block.
    """
    p = address_of(block)
    source, target, weight = load_int64(p + 8 * INPUT), load_int64(p + 8 * OUTPUT), load_int64(p + 8 * WEIGHT)
    rows, width = load_int64(p + 8 * ROWS), load_int64(p + 8 * WIDTH)
    epsilon, halves, kind = load_float64(p + 8 * EPSILON), load_int64(p + 8 * HALVES), load_int64(p + 8 * KIND)
    size = 2 if halves else 4
    while True:
        row = fetch_add(p + 8 * NEXT_ROW, 1)
        if row >= rows:
            break
        base, out = source + row * width * size, target + row * width * size
        squares = splat(np.float32(0.0))
        for place in range(0, width, LANES):
            x = load_halves(base + place * 2) if halves else load(base + place * 4)
            squares = multiply_add(x, x, squares)
        mean = total(squares) / np.float32(width)
        scale = splat(np.float32(1.0) / np.float32(math.sqrt(mean + np.float32(epsilon))))
        for place in range(0, width, LANES):
            if halves:
                x, w = load_halves(base + place * 2), load_halves(weight + place * 2)
            else:
                x, w = load(base + place * 4), load(weight + place * 4)
            x = multiply(x, scale)
            if kind == ROUNDED and halves:
                x = round_halves(x)
            elif kind == OFFSET:
                w = add(w, splat(np.float32(1.0)))
            x = multiply(x, w)
            if halves:
                store_halves(out + place * 2, x)
            else:
                store(out + place * 4, x)
