"""Building and cutting verdicts."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from outpace.tree import Int32Array, Verdicts


def verdicts_of(
    paths: SequenceOf[SequenceOf[int] | Int32Array], tokens: SequenceOf[SequenceOf[int] | Int32Array]
) -> Verdicts:
    """Verdicts from one path and one list of committed tokens for each sequence."""
    path_offsets, path = _flatten(paths)
    token_offsets, flat_tokens = _flatten(tokens)
    return Verdicts(path_offsets, path, token_offsets, flat_tokens)


def truncate(verdicts: Verdicts, keep: Int32Array) -> Verdicts:
    """Cut every sequence's committed tokens, for instance after an end-of-sequence token.

    Example: a path of 2 nodes and 3 committed tokens, cut to 3, 2, 1 and 0 tokens, leaves 2, 2, 1 and 0 nodes.

    Args:
        verdicts: What was verified. Unchanged.
        keep: ``int32[B]``, most committed tokens to keep of each sequence, at least 0.

    Returns:
        Verdicts whose paths end where their tokens do; ``verdicts`` itself where nothing has to be cut.
    """
    counts = np.diff(verdicts.token_offsets)
    if bool((counts <= keep).all()):
        return verdicts
    sizes = np.minimum(counts, keep)
    path_sizes = np.minimum(np.diff(verdicts.path_offsets), keep)
    paths = [verdicts.path_of(b)[:size] for b, size in enumerate(path_sizes)]
    tokens = [verdicts.tokens_of(b)[:size] for b, size in enumerate(sizes)]
    return verdicts_of(paths, tokens)


def _flatten(parts: SequenceOf[SequenceOf[int] | Int32Array]) -> tuple[Int32Array, Int32Array]:
    offsets = np.zeros(len(parts) + 1, np.int32)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    flat = np.empty(int(offsets[-1]), np.int32)
    for part, begin, end in zip(parts, offsets[:-1], offsets[1:], strict=True):
        flat[begin:end] = part
    return offsets, flat
