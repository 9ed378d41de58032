"""Reading rows of logits in one pass: the best token of each, or the best few.

Each row is read by one thread of torch's team, as it lies in memory. Torch itself takes 7 ms for the arg max of 136 rows of
32,000 bfloat16 numbers on two cores, and longer for the best eight.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch

from outpace._compile import c_function, inner
from outpace.kernels.simd import (
    LANES,
    NEGATIVE_INFINITY,
    address_of,
    exceeds,
    fetch_add,
    load,
    load_field,
    load_float,
    load_half,
    load_halves,
    splat,
    store_float,
    store_int64,
)
from outpace.kernels.team import Kernel, Team, team
from outpace.tree import Int32Array, Int64Array

DTYPES = (torch.float32, torch.bfloat16)
HOLDS_NAN = -1  # in place of a row's best token

_LOGITS, _STRIDE, _NUM_ROWS, _WIDTH, _MOST, _HALVES, _IDS, _VALUES, _NEXT = range(9)
_STEP = 4 * LANES


def topk_rows(logits: torch.Tensor, k: int, threads: Team | None = None) -> Int32Array:
    """The ``k`` best tokens of each row, best first, the lowest id first among equals; ``int32[R, k]``.

    Args:
        logits: ``[R, V]``, any float dtype and device. Fast on the CPU in ``float32`` and bfloat16 for ``k`` up to about 16;
            elsewhere it is torch's ``topk``, which leaves the order among equals open. Rows with NaN are read by torch too,
            which counts NaN as the largest.
        k: At most ``V``.
        threads: What to run in.
    """
    if not is_readable(logits):
        return logits.topk(k, dim=-1).indices.to("cpu", torch.int32).numpy()
    found = _best_rows(logits, k, threads or team())[0].astype(np.int32)
    for row in np.flatnonzero(found[:, 0] == HOLDS_NAN):
        found[row] = logits[int(row)].float().topk(k).indices.numpy()
    return found


def is_readable(logits: torch.Tensor) -> bool:
    """Whether the kernel can read these logits."""
    return logits.device.type == "cpu" and logits.dtype in DTYPES


def _best_rows(logits: torch.Tensor, most: int, threads: Team) -> tuple[Int64Array, np.ndarray[Any, Any]]:
    logits = logits.detach()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    count = len(logits)
    ids, values = np.empty((count, most), np.int64), np.empty((count, most), np.float32)
    if count == 0:
        return ids, values
    size = logits.dtype.itemsize
    block = np.array(
        [
            logits.data_ptr(), logits.stride(0) * size, count,
            logits.shape[1], most, size == 2, ids.ctypes.data, values.ctypes.data, 0,
        ],
        np.int64,
    )  # fmt: skip
    # A team is not worth waking for what one thread reads in a few microseconds.
    num_threads = threads.num_threads if count > 1 and count * logits.shape[1] * size > 2**17 else 1
    threads.run(_kernel(), block.ctypes.data, num_threads)
    return ids, values


@functools.cache
def _kernel() -> Kernel:
    digest = hashlib.sha256(Path(__file__).with_name("simd.py").read_bytes()).hexdigest()

    def logits(block):  # type: ignore[no-untyped-def]
        if digest:  # a part of the cache's key: of other files' changes Numba takes no notice
            _read_rows(block)

    return Kernel(c_function(logits))


@inner
def _number(row: Any, at: Any, halves: Any) -> Any:
    return load_half(row + 2 * at) if halves else load_float(row + 4 * at)


@inner
def _is_dull(row: Any, at: Any, halves: Any, threshold: Any) -> Any:
    """Whether 64 numbers from ``at`` on are all at most the threshold, and none is NaN."""
    if halves:
        row += 2 * at
        if exceeds(load_halves(row), load_halves(row + 32), threshold):
            return False
        return not exceeds(load_halves(row + 64), load_halves(row + 96), threshold)
    row += 4 * at
    if exceeds(load(row), load(row + 64), threshold):
        return False
    return not exceeds(load(row + 128), load(row + 192), threshold)


@inner
def _insert(ids: Any, values: Any, count: Any, token: Any, value: Any) -> None:
    """Put a token at its place in a list of ``count`` that has room for one more: behind its equals."""
    at = count
    while at > 0 and value > load_float(values + 4 * (at - 1)):
        store_float(values + 4 * at, load_float(values + 4 * (at - 1)))
        store_int64(ids + 8 * at, load_field(ids, at - 1))
        at -= 1
    store_float(values + 4 * at, value)
    store_int64(ids + 8 * at, token)


@inner
def _read_row(row: Any, width: Any, most: Any, halves: Any, ids: Any, values: Any) -> None:
    """The best tokens of one row, in a single pass that skips what lies below the least of them so far."""
    count = at = 0
    least = numba.float32(NEGATIVE_INFINITY)
    while at < width:
        if count == most:
            threshold = splat(least)
            while at + _STEP <= width and _is_dull(row, at, halves, threshold):
                at += _STEP
        for token in range(at, min(at + _STEP, width)):
            value = _number(row, token, halves)
            if value != value:
                store_int64(ids, HOLDS_NAN)
                return
            if count < most or value > least:
                _insert(ids, values, min(count, most - 1), token, value)
                count = min(count + 1, most)
                least = load_float(values + 4 * (count - 1))
        at += _STEP


@inner
def _read_rows(block: Any) -> None:
    """One thread's share."""
    p = address_of(block)
    most = load_field(p, _MOST)
    i = fetch_add(p + 8 * _NEXT, 1)
    while i < load_field(p, _NUM_ROWS):
        _read_row(
            load_field(p, _LOGITS) + i * load_field(p, _STRIDE),
            load_field(p, _WIDTH),
            most,
            load_field(p, _HALVES),
            load_field(p, _IDS) + 8 * i * most,
            load_field(p, _VALUES) + 4 * i * most,
        )
        i = fetch_add(p + 8 * _NEXT, 1)
