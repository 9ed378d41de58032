"""Patterns found behind the mask functions of Transformers itself."""

from __future__ import annotations

import pytest
import torch
import transformers.masking_utils as hf

from outpace.errors import UnsupportedModelError
from outpace.model import MaskSpec
from outpace.model.masks import FULL, classify

NO_PADDING = torch.zeros(1, dtype=torch.int64)
SIZES = (1, 2, 5, 24, 4096)


def chunked(size: int) -> object:
    return hf.chunked_causal_mask_function(size, NO_PADDING)


def test_full() -> None:
    assert classify(hf.causal_mask_function, None) == FULL
    assert classify(hf.causal_mask_function, 24) == FULL  # a window in the config of a layer that has none
    assert classify(hf.and_masks(hf.causal_mask_function, hf.causal_mask_function), None) == FULL


@pytest.mark.parametrize("size", SIZES)
def test_windows_and_chunks(size: int) -> None:
    assert classify(hf.sliding_window_causal_mask_function(size), size) == MaskSpec("window", size)
    if size > 1:  # of size 1 they are the same
        assert classify(chunked(size), size) == MaskSpec("chunk", size)


def test_overlays_that_change_nothing_are_seen_through() -> None:
    window = hf.sliding_window_causal_mask_function(8)
    assert classify(hf.and_masks(window, hf.causal_mask_function), 8) == MaskSpec("window", 8)
    assert classify(hf.or_masks(window, hf.causal_mask_function), 8) == FULL
    assert classify(hf.or_masks(window, lambda b, h, q, k: (q < 0) & (k < 0)), 8) == MaskSpec("window", 8)


@pytest.mark.parametrize(
    ("mask", "size"),
    [
        (hf.bidirectional_mask_function, None),
        (hf.bidirectional_mask_function, 8),
        (hf.sliding_window_bidirectional_mask_function(8), 8),
        (hf.or_masks(hf.causal_mask_function, lambda b, h, q, k: q // 4 == k // 4), None),
        (hf.or_masks(hf.causal_mask_function, lambda b, h, q, k: k == 0 * q + 1), None),  # a prefix seen by all
        (hf.and_masks(hf.causal_mask_function, lambda b, h, q, k: k != q), None),
        (hf.and_masks(hf.sliding_window_causal_mask_function(8), chunked(16)), 8),
        (hf.or_masks(hf.sliding_window_causal_mask_function(8), lambda b, h, q, k: (k <= q) & (k < 4)), 8),
        (hf.sliding_window_causal_mask_function(9), 8),
        (hf.sliding_window_causal_mask_function(7), 8),
        (chunked(9), 8),
        (chunked(16), 8),
        (hf.sliding_window_causal_mask_function(8), None),
        (hf.sliding_window_causal_mask_function(5000), None),  # far beyond the points nearby
        (chunked(100_000), None),
        (hf.sliding_window_causal_mask_function(5000), 8),
        (lambda b, h, q, k: (q >= 0) & (k < 0), None),
    ],
)
def test_anything_else_is_refused(mask: hf.Callable, size: int | None) -> None:
    with pytest.raises(UnsupportedModelError, match="neither causal, nor a sliding window, nor chunks") as caught:
        classify(mask, size)
    assert (f"size parameter is {size}" in str(caught.value)) == (size is not None)


def test_a_mask_that_reads_a_tensor_by_index_is_not_taken_for_a_pattern() -> None:
    blocks = hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(torch.zeros(1, 13, dtype=torch.int64)))
    with pytest.raises((UnsupportedModelError, IndexError)):
        classify(blocks, None)


@pytest.mark.parametrize("spec", [FULL, *(MaskSpec(kind, size) for kind in ("window", "chunk") for size in (1, 3, 8))])
def test_a_pattern_says_the_same_in_both_ways(spec: MaskSpec) -> None:
    places = torch.arange(30)
    allowed = spec.allows(places[:, None], places[None, :])
    for query in range(30):
        first = spec.first_visible(query)
        assert allowed[query].nonzero().flatten().tolist() == list(range(first, query + 1))
