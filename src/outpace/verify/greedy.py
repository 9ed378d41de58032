"""Greedy verification of a whole batch, compiled.

The **choice** at a row is the arg max of its logits, the lowest id among equals. The walk starts at the root's row;
while the chosen token is held by a child, it goes on at the child's row.

Rows are packed: the root's of tree ``b`` is ``offsets[b] + b``, its nodes' follow.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from outpace._compile import compiled
from outpace.tree import BoolArray, DraftTrees, Int32Array, Verdicts

# A choice below 0 says why there is none.
CHOICE_NAN, CHOICE_INFINITE, CHOICE_NOTHING = -1, -2, -3
UNDECIDABLE: dict[int, float] = {CHOICE_NAN: np.nan, CHOICE_INFINITE: np.inf, CHOICE_NOTHING: -np.inf}

_BLOCK = 1024
_BITS = {
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
    torch.float32: (torch.int32, 0x7F800000),
    torch.float64: (torch.int64, 0x7FF0000000000000),
}


def greedy_verdicts(trees: DraftTrees, choices: Int32Array) -> Verdicts:
    """Walk every tree along the model's choices.

    Example: the tree ``7 -> 8`` beside ``9`` and the choices ``[7, 8, 5, 1]`` (after the root, ``7``, ``8`` and ``9``)
    give the path ``[0, 1]`` and the committed tokens ``7 8 5``.

    Args:
        trees: ``B`` trees with ``n`` nodes in all.
        choices: ``int32[n + B]``, the model's choice at every row, at least 0.

    Returns:
        The accepted paths and the committed tokens, bonus token included.
    """
    everyone = np.ones(trees.batch_size, np.bool_)
    return Verdicts(*_walk(trees.offsets, trees.tokens, trees.parents, choices, 0, everyone)[:4])


def greedy_walk(trees: DraftTrees, logits: torch.Tensor, selected: BoolArray) -> tuple[Verdicts, Int32Array]:
    """Walk the selected trees over the model's logits.

    On the CPU only the rows that a walk reaches are read, as bits: torch reads bfloat16 six times slower than float32.
    Elsewhere every selected row's arg max is taken in one call.

    Args:
        trees: ``B`` trees with ``n`` nodes in all.
        logits: ``[n + B, V]``, any float dtype and device.
        selected: ``bool[B]``; the other trees get an empty verdict.

    Returns:
        Verdicts, and ``int32[B]``: 0, or for a root without a choice one of the keys of `UNDECIDABLE`. Such a tree has
        an empty verdict. At a node without a choice the walk ends: the node's token becomes the bonus token.
    """
    if logits.device.type == "cpu" and logits.dtype in _BITS:
        as_int, infinity = _BITS[logits.dtype]
        source: npt.NDArray[Any] = logits.detach().contiguous().view(as_int).numpy()
    else:
        source, infinity = _choices(trees, logits, selected), 0
    *parts, undecided = _walk(trees.offsets, trees.tokens, trees.parents, source, infinity, selected)
    return Verdicts(*parts), undecided


def _choices(trees: DraftTrees, logits: torch.Tensor, selected: BoolArray) -> Int32Array:
    """``int32[n + B]``: choices at the rows of selected trees."""
    rows = np.flatnonzero(np.repeat(selected, trees.sizes + 1))
    choices = np.zeros(len(logits), np.int32)
    if not len(rows):
        return choices
    if len(rows) < len(logits):
        logits = logits[torch.from_numpy(rows).to(logits.device)]
    best, tokens = logits.detach().max(dim=-1)
    best = best.to(torch.promote_types(best.dtype, torch.float32))
    as_int = torch.int64 if best.dtype == torch.float64 else torch.int32
    # One transfer, as integers: some devices (MPS) have no float64, and float32 does not hold every token id.
    both = torch.stack([best.view(as_int), tokens.to(as_int)]).cpu().numpy()
    values: npt.NDArray[Any] = both[0].view(f"f{both.itemsize}")
    chosen = both[1].astype(np.int32)
    chosen[np.isnan(values)] = CHOICE_NAN
    chosen[np.isposinf(values)] = CHOICE_INFINITE
    chosen[np.isneginf(values)] = CHOICE_NOTHING
    choices[rows] = chosen
    return choices


@compiled
def find_child(tokens: Int32Array, parents: Int32Array, begin: int, end: int, node: int, token: int) -> int:
    """Index within the tree ``begin:end`` of the child of ``node`` (-1: the root) that holds ``token``, or -1."""
    for child in range(begin + node + 1, end):
        if parents[child] == node and tokens[child] == token:
            return child - begin
    return -1


@compiled
def _extremes(bits: npt.NDArray[Any]) -> tuple[int, int]:
    """The highest number and the largest magnitude of a block of floats, both as integers that order like floats."""
    # Numba widens integers in every operation; cast back, or LLVM does not vectorise: ten times slower.
    as_type = bits.dtype.type
    mask = as_type(np.iinfo(bits.dtype).max)
    highest, largest = as_type(-mask), as_type(0)
    for i in range(len(bits)):
        magnitude = as_type(bits[i] & mask)
        highest = max(highest, as_type(-magnitude) if bits[i] < as_type(0) else magnitude)
        largest = max(largest, magnitude)
    return highest, largest


@compiled
def _row_choice(bits: npt.NDArray[Any], infinity: int) -> int:
    mask = np.int64(np.iinfo(bits.dtype).max)
    best, best_begin, largest = -mask, 0, np.int64(0)
    for begin in range(0, len(bits), _BLOCK):
        block_best, block_largest = _extremes(bits[begin : begin + _BLOCK])
        largest = max(largest, np.int64(block_largest))
        if block_best > best:
            best, best_begin = np.int64(block_best), begin
    if largest > infinity:
        return CHOICE_NAN
    if best == infinity:
        return CHOICE_INFINITE
    if best == -infinity:
        return CHOICE_NOTHING
    token = best_begin
    while best != (-(bits[token] & mask) if bits[token] < 0 else bits[token]):
        token += 1
    return token


@compiled
def _choice_at(source: npt.NDArray[Any], row: int, infinity: int) -> int:
    if source.ndim == 1:  # Numba drops the other branch
        return int(source[row])
    return int(_row_choice(source[row], infinity))


@compiled
def _walk(
    offsets: Int32Array,
    tokens: Int32Array,
    parents: Int32Array,
    source: npt.NDArray[Any],  # choices int32[n + B], or the bits of logits int[n + B, V]
    infinity: int,
    selected: BoolArray,
) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array, Int32Array]:
    batch = len(offsets) - 1
    path_offsets, token_offsets = np.zeros(batch + 1, np.int32), np.zeros(batch + 1, np.int32)
    path, committed = np.empty(len(tokens), np.int32), np.empty(len(tokens) + batch, np.int32)
    undecided = np.zeros(batch, np.int32)
    num_path = num_committed = 0
    for b in range(batch):
        begin, end = offsets[b], offsets[b + 1]
        node = -1
        while selected[b]:
            choice = _choice_at(source, begin + b + 1 + node, infinity)
            if choice < 0:
                if node < 0:
                    undecided[b] = choice
                else:
                    num_path -= 1
                break
            committed[num_committed] = choice
            num_committed += 1
            node = find_child(tokens, parents, begin, end, node, choice)
            if node < 0:
                break
            path[num_path] = node
            num_path += 1
        path_offsets[b + 1], token_offsets[b + 1] = num_path, num_committed
    return path_offsets, path[:num_path], token_offsets, committed[:num_committed], undecided
