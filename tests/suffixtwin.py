"""Brute-force twin of the suffix automaton, and texts that are hard for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def longest_match(text: Sequence[int]) -> tuple[int, int]:
    """Length of the longest suffix that also ended earlier, and the earliest position where it ended (-1 if none)."""
    text = list(text)
    for length in range(len(text) - 1, 0, -1):
        suffix = text[-length:]
        for end in range(length - 1, len(text) - 1):
            if text[end - length + 1 : end + 1] == suffix:
                return length, end
    return 0, -1


def longest_foreign_match(text: Sequence[int], other: Sequence[int]) -> tuple[int, int]:
    """Length of the longest suffix of `other` that occurs in `text`, and the earliest position where it ends there."""
    text, other = list(text), list(other)
    for length in range(min(len(text), len(other)), 0, -1):
        for end in range(length - 1, len(text)):
            if text[end - length + 1 : end + 1] == other[-length:]:
                return length, end
    return 0, -1


def fibonacci_word(size: int) -> list[int]:
    shorter, longer = [0], [0, 1]
    while len(longer) < size:
        shorter, longer = longer, longer + shorter
    return longer[:size]


def de_bruijn(alphabet: int, order: int) -> list[int]:
    """Every word of `order` letters once: as many distinct substrings as a text can have."""
    seen, word = set(), [0] * order
    while True:
        for letter in range(alphabet - 1, -1, -1):
            window = (*word[len(word) - order + 1 :], letter) if order > 1 else (letter,)
            if window not in seen:
                seen.add(window)
                word.append(letter)
                break
        else:
            return word


ADVERSARIAL = {
    "all equal": [7] * 60,
    "equal, then new": [7] * 30 + [8] + [7] * 31,
    "alternating": [1, 2] * 30,
    "a b^n": [1] + [2] * 50,
    "a b^n c": [1] + [2] * 50 + [3],  # the most transitions
    "abb...": [1, 2] + [2] * 40 + [1, 2],  # the most states
    "fibonacci": fibonacci_word(60),
    "thue-morse": [bin(i).count("1") % 2 for i in range(64)],
    "de bruijn 2": de_bruijn(2, 5),
    "de bruijn 3": de_bruijn(3, 3),
    "all different": list(range(60)),
    "loop of 7": [5, 1, 4, 1, 5, 9, 2] * 9,
    "huge ids": np.random.default_rng(0).integers(2**31 - 5, 2**31 - 1, 60).tolist(),
}
