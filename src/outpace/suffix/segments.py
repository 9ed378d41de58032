"""Segments of a memory: when they are merged, and how others are built from them.

Pure functions; `outpace.suffix.memory` says what the words mean.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np

from outpace._compile import compiled
from outpace.suffix import image as layout
from outpace.suffix.frozen import FrozenAutomaton
from outpace.suffix.image import text_at
from outpace.tree import Int32Array, Int64Array

MOST_SEGMENTS = 8
_SMALL = 1024  # tokens; a smaller segment is always merged with newer ones


@dataclass(frozen=True, slots=True)
class Texts:
    """What a namespace holds at one moment; replaced as a whole.

    Attributes:
        segments: Oldest first.
        pending: ``int32[n]`` each, responses that are in no segment yet.
        stale: Leading responses, counted from the oldest segment's first, that are dropped but still there.
    """

    segments: tuple[FrozenAutomaton, ...] = ()
    pending: tuple[Int32Array, ...] = ()
    stale: int = 0

    @property
    def has_work(self) -> bool:
        """Whether segments would have to be built."""
        return bool(self.pending or self.stale)


def merge_begin(sizes: SequenceOf[int], new: int) -> int:
    """From which segment on all are merged with new text; ``len(sizes)`` if it stays alone.

    Args:
        sizes: Tokens of the segments, oldest first.
        new: Tokens of the new text.
    """
    total = sum(sizes) + new
    ratio = max(1.0, (total / max(new, _SMALL)) ** (1 / (MOST_SEGMENTS - 1)) - 1)
    begin, newer = len(sizes), new
    for index in range(len(sizes) - 1, -1, -1):
        if sizes[index] < ratio * newer or sizes[index] < _SMALL or index >= MOST_SEGMENTS - 1:
            begin = index
        newer += sizes[index]
    return begin


def built(texts: Texts) -> tuple[FrozenAutomaton, ...]:
    """Segments that hold what ``texts`` holds, without what is stale."""
    segments, pending, stale = list(texts.segments), texts.pending, texts.stale
    while segments and stale >= segments[0].num_documents:
        stale -= segments.pop(0).num_documents
    if not segments:
        pending, stale = pending[stale:], 0
    new = sum(map(len, pending))
    begin = merge_begin([s.num_tokens for s in segments], new) if new else len(segments)
    merged = [_texts_of(segments[i].image, stale if i == 0 else 0) for i in range(begin, len(segments))]
    if stale and begin > 0:
        segments[0] = _freeze([_texts_of(segments[0].image, stale)])
    merged += [(text, np.array([len(text)], np.int64)) for text in pending]
    return (*segments[:begin], *((_freeze(merged),) if merged else ()))


def _freeze(parts: SequenceOf[tuple[Int32Array, Int64Array]]) -> FrozenAutomaton:
    """An automaton over the documents of several parts, each with its tokens and its documents' lengths."""
    lengths = np.concatenate([part[1] for part in parts])
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return FrozenAutomaton.build(np.concatenate([part[0] for part in parts]), offsets)


def _texts_of(image: Int32Array, first: int) -> tuple[Int32Array, Int64Array]:
    """The documents of an automaton from number ``first`` on, one after the other, and their lengths."""
    lengths = lengths_of(image)[first:]
    tokens = np.empty(int(lengths.sum()), np.int32)
    _copy_texts(image, first, tokens)
    return tokens, lengths


def lengths_of(image: Int32Array) -> Int64Array:
    """``int64[D]``, tokens of each document."""
    begin = int(image[layout.DOCUMENTS_BEGIN])
    separators: Any = image[begin : begin + int(image[layout.NUM_DOCUMENTS]) + 1].astype(np.int64)
    lengths: Int64Array = np.diff(separators) - 1
    return lengths


def largest_token(image: Int32Array) -> int:
    """The largest token id in the text of an automaton."""
    begin, length = int(image[layout.TEXT_BEGIN]), int(image[layout.TEXT_LENGTH])
    if not image[layout.NARROW]:
        return int(image[begin : begin + length].max())
    halves = image[begin : begin + (length + 1) // 2].view(np.uint16)
    return int(halves.max(where=halves != layout.NARROW_SEPARATOR, initial=0))


@compiled
def _copy_texts(image: Int32Array, first: int, out: Int32Array) -> None:
    position = int(image[np.int64(image[layout.DOCUMENTS_BEGIN]) + first])
    written = 0
    while written < len(out):
        token = text_at(image, position)
        if token >= 0:
            out[written] = token
            written += 1
        position += 1
