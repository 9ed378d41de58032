"""Brute-force twin of the frozen automaton: where every string of the documents ends, by listing them all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from outpace.suffix import FrozenAutomaton
from outpace.suffix.frozen import (
    continuations,
    count_of,
    endpos_of,
    length_of,
    link_of,
    next_of,
    step_frozen,
    text_at,
)

Documents = Sequence[Sequence[int]]
String = tuple[int, ...]


def frozen(documents: Documents) -> FrozenAutomaton:
    offsets = np.concatenate([[0], np.cumsum([len(d) for d in documents])]).astype(np.int64)
    return FrozenAutomaton.build(np.array([t for d in documents for t in d], np.int32), offsets)


class Twin:
    """Everything that `FrozenAutomaton` answers, from a dictionary of all strings."""

    def __init__(self, documents: Documents) -> None:
        self.documents = [list(d) for d in documents if len(d)]
        self.ends: dict[String, list[int]] = defaultdict(list)  # text positions, with a separator before each document
        self.text = [-1]
        for document in self.documents:
            for token in document:
                self.text.append(token)
                begin = len(self.text)
                while self.text[begin - 1] >= 0:
                    begin -= 1
                    self.ends[tuple(self.text[begin:])].append(len(self.text) - 1)
            self.text.append(-1)
        self.tokens = sorted({t for t in self.text if t >= 0})

    def same(self, one: String, other: String) -> bool:
        return (self.ends[one] if one else None) == (self.ends[other] if other else None)

    def longest(self, string: String) -> int:
        """Length of the longest string that ends where this one does."""
        end, length = self.ends[string][0], len(string)
        while self.text[end - length] >= 0 and self.same(tuple(self.text[end - length : end + 1]), string):
            length += 1
        return length

    def link(self, string: String) -> String:
        """The longest suffix that ends at more positions."""
        suffix = string[1:]
        while suffix and self.same(suffix, string):
            suffix = suffix[1:]
        return suffix

    def continuations(self, string: String) -> list[tuple[int, int]]:
        """Tokens and counts, most frequent first, then as they first followed."""
        found = []
        for token in self.tokens:
            ends = self.ends.get((*string, token))
            if ends:
                found.append((-len(ends), ends[0], token))
        return [(token, -count) for count, _, token in sorted(found)]

    def match(self, string: String) -> String:
        """The longest suffix that occurs."""
        while string and string not in self.ends:
            string = string[1:]
        return string


def compare(automaton: FrozenAutomaton, twin: Twin, strings: Sequence[String]) -> None:
    """Ask both everything about some strings that occur."""
    image = automaton.image
    for string in strings:
        state, length = automaton.match(string)
        assert length == len(string)
        if string:
            assert endpos_of(image, state) == twin.ends[string][0]
            assert count_of(image, state) == len(twin.ends[string])
            assert length_of(image, state) == twin.longest(string)
            assert link_of(image, state) == automaton.match(twin.link(string))[0]
            assert (state < 0) == (len(twin.ends[string]) == 1)
        else:
            assert (state, endpos_of(image, 0), length_of(image, 0)) == (0, -1, 0)
            assert count_of(image, 0) == automaton.num_tokens
        compare_continuations(automaton, twin, string, state)


def compare_continuations(automaton: FrozenAutomaton, twin: Twin, string: String, state: int) -> None:
    image, expected = automaton.image, twin.continuations(string)
    out = np.full((3, len(expected) + 3), -7, np.int32)
    for most in {0, 1, 2, len(expected), len(expected) + 2}:
        written = continuations(image, state, most, *out)
        assert list(zip(*out[:2, :written].tolist(), strict=True)) == expected[:most]
        assert (out[:, max(most, len(expected)) :] == -7).all()
        for token, target in out[::2, :written].T.tolist():
            assert next_of(image, state, token) == (True, target)
            assert automaton.match((*string, token)) == (target, len(string) + 1)
    followed = {token for token, _ in expected}
    for token in {*twin.tokens[:50], 77_777_777, 65_535, 0} - followed:
        assert not next_of(image, state, token)[0]
    for token in (-1, -2, int(np.iinfo(np.int32).min)):
        assert not next_of(image, state, token)[0]


def compare_walk(automaton: FrozenAutomaton, twin: Twin, other: Sequence[int]) -> None:
    """Follow another text, token by token."""
    state = length = 0
    string: String = ()
    for token in other:
        state, length = step_frozen(automaton.image, state, length, token)
        string = twin.match((*string, token))
        assert length == len(string)
        assert state == automaton.match(string)[0]
        assert endpos_of(automaton.image, state) == (twin.ends[string][0] if string else -1)


def compare_text(automaton: FrozenAutomaton, twin: Twin) -> None:
    assert [d.tolist() for d in automaton.documents()] == twin.documents
    assert [text_at(automaton.image, p) for p in range(len(twin.text))] == twin.text
    assert automaton.num_documents == len(twin.documents)
    assert automaton.num_tokens == sum(map(len, twin.documents))
