"""A memory against a list of responses: what is kept, what matches, who sees it."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.suffix.frozen import FrozenAutomaton
from outpace.suffix.memory import ResponseMemory
from outpace.suffix.segments import MOST_SEGMENTS, merge_begin
from suffixtwin import longest_foreign_match

NAMES = ("a", "b", "c")
RESPONSES = st.lists(st.tuples(st.sampled_from(NAMES), st.lists(st.integers(0, 3), max_size=14)), max_size=40)


class Twin:
    """Keeps texts as lists; drops as the memory says it does."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.texts: dict[str, list[list[int]]] = {}

    def remember(self, name: str, tokens: list[int]) -> None:
        texts = self.texts.setdefault(name, [])
        if tokens:
            texts.append(tokens[-self.max_tokens :])
        if self.size(name) > self.max_tokens:
            while self.size(name) > self.max_tokens - self.max_tokens // 8 and len(texts) > 1:
                texts.pop(0)

    def size(self, name: str) -> int:
        return sum(map(len, self.texts.get(name, [])))

    def longest(self, name: str, query: list[int]) -> int:
        return max((longest_foreign_match(text, query)[0] for text in self.texts.get(name, [])), default=0)


def audit(memory: ResponseMemory, twin: Twin) -> None:
    for name in NAMES:
        segments = memory.segments(name)
        assert len(segments) <= MOST_SEGMENTS
        for segment in segments:
            segment.check()
        assert [document.tolist() for s in segments for document in s.documents()] == twin.texts.get(name, [])
    assert memory.token_counts == {name: twin.size(name) for name in memory.token_counts}


@settings(max_examples=60, deadline=None)
@given(RESPONSES, st.sampled_from([1, 7, 40, 1000]), st.lists(st.integers(0, 3), max_size=12), st.booleans())
def test_memory_is_its_responses(
    responses: list[tuple[str, list[int]]], max_tokens: int, query: list[int], background: bool
) -> None:
    memory, twin = ResponseMemory(max_tokens, background), Twin(max_tokens)
    for at, (name, tokens) in enumerate(responses):
        memory.remember(name, tokens)
        twin.remember(name, tokens)
        if at % 3 == 0 or not background:
            memory.flush()
            audit(memory, twin)
    memory.flush()
    audit(memory, twin)
    for name in NAMES:
        found = max((s.match(query)[1] for s in memory.segments(name)), default=0)
        assert found == twin.longest(name, query)
    memory.close()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=400))
def test_merging_keeps_few_segments_and_costs_little(sizes: list[int]) -> None:
    segments: list[int] = []
    for new in sizes:
        begin = merge_begin(segments, new)
        segments = [*segments[:begin], sum(segments[begin:]) + new]
        assert len(segments) <= MOST_SEGMENTS
    assert sum(segments) == sum(sizes)


def test_a_token_is_rebuilt_about_eleven_times() -> None:
    rng = np.random.default_rng(0)
    segments: list[int] = []
    built = total = 0
    while total < 4_000_000:
        new = int(rng.exponential(300)) + 1
        begin = merge_begin(segments, new)
        segments = [*segments[:begin], sum(segments[begin:]) + new]
        built, total = built + segments[-1], total + new
    assert built < 12 * total


def test_snapshots_stay_while_others_are_made() -> None:
    memory = ResponseMemory(background=False)
    taken: list[tuple[tuple[FrozenAutomaton, ...], list[list[int]]]] = []
    texts: list[list[int]] = []
    for i in range(60):
        texts.append([i, i + 1, 7, i % 5])
        memory.remember("", texts[-1])
        taken.append((memory.segments(""), list(texts)))
    for segments, then in taken:
        assert [document.tolist() for s in segments for document in s.documents()] == then
