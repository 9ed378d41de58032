"""Small helpers for tests of drafters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outpace.draft import build_drafter
from outpace.tree import DraftTrees, Int32Array, Verdicts


def texts(count: int, seed: int) -> list[Int32Array]:
    """Random texts with many repetitions: small alphabets, loops, copied spans."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        alphabet = int(rng.choice([2, 3, 8, 40, 1000]))
        text = rng.integers(0, alphabet, int(rng.integers(2, 70)))
        if i % 3 == 1:
            text = np.concatenate([text, text[: len(text) // 2]])
        if i % 3 == 2:
            text = np.concatenate([text, np.tile(text[-int(rng.integers(1, 6)) :], int(rng.integers(1, 10)))])
        found.append(text.astype(np.int32))
    return found


def draft_one(spec: str, text: Sequence[int] | Int32Array, cap: int = 1000) -> DraftTrees:
    """The tree that a fresh drafter proposes after `text`."""
    drafter = build_drafter(spec)
    drafter.open(0, np.asarray(text, np.int32))
    return drafter.propose([0], np.array([cap], np.int32)).validate()


def committed(tokens: Sequence[Sequence[int] | Int32Array]) -> Verdicts:
    """Verdicts that commit these tokens of each sequence; with empty paths, which drafters of text do not look at."""
    offsets = np.cumsum([0, *map(len, tokens)]).astype(np.int32)
    flat = np.concatenate([np.zeros(0, np.int32), *(np.asarray(part, np.int32) for part in tokens)])
    return Verdicts(np.zeros(len(tokens) + 1, np.int32), np.zeros(0, np.int32), offsets, flat)
