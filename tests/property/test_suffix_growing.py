from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.suffix import GrowingAutomaton
from outpace.suffix.block import SEPARATOR
from suffixtwin import longest_foreign_match, longest_match

small = st.integers(2, 4).flatmap(lambda k: st.lists(st.integers(0, k - 1), max_size=50))
wide = st.lists(st.integers(0, 200_000), max_size=50)
loops = st.builds(
    lambda head, loop, times, tail: head + loop * times + tail,
    st.lists(st.integers(0, 3), max_size=6),
    st.lists(st.integers(0, 3), min_size=1, max_size=8),
    st.integers(1, 12),
    st.lists(st.integers(0, 3), max_size=6),
)
# Copying spans of itself is how generated text repeats its prompt, and makes states split again and again.
copies = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9), st.integers(0, 200_000)), max_size=10).map(
    lambda spans: _copying(spans)
)
texts = st.one_of(small, wide, loops, copies)


def _copying(spans: list[tuple[int, int, int]]) -> list[int]:
    text: list[int] = []
    for begin, size, fresh in spans:
        begin %= len(text) + 1
        text += [*text[begin : begin + size], fresh]
    return text


@settings(max_examples=150, deadline=None)
@given(texts)
def test_match_equals_brute_force_after_every_token(text: list[int]) -> None:
    automaton = GrowingAutomaton()
    for i, token in enumerate(text):
        automaton.extend([token])
        match = automaton.match
        assert (match.length, match.min_endpos) == longest_match(text[: i + 1])


@settings(max_examples=100, deadline=None)
@given(texts)
def test_audit_holds_after_every_token(text: list[int]) -> None:
    automaton = GrowingAutomaton()
    for token in text:
        automaton.extend([token])
        automaton.check()


@settings(max_examples=100, deadline=None)
@given(texts, texts)
def test_transfer_equals_brute_force(text: list[int], other: list[int]) -> None:
    automaton = GrowingAutomaton(text)
    state = length = 0
    for i, token in enumerate(other):
        state, length = automaton.transfer(state, length, token)
        assert (length, automaton.min_endpos(state)) == longest_foreign_match(text, other[: i + 1])


@settings(max_examples=100, deadline=None)
@given(texts, st.integers(0, 50), texts, texts)
def test_forks_do_not_share(text: list[int], at: int, one: list[int], other: list[int]) -> None:
    automaton = GrowingAutomaton(text[:at])
    twin = automaton.fork()
    automaton.extend(one)
    twin.extend(other)
    for grown, expected in ((automaton, text[:at] + one), (twin, text[:at] + other)):
        grown.check()
        assert grown.text.tolist() == expected
        assert grown.match[1:] == longest_match(expected)


@settings(max_examples=150, deadline=None)
@given(st.lists(texts, max_size=5), st.integers(1, 40), st.booleans())
def test_audit_holds_with_counts_and_documents(documents: list[list[int]], count_walk: int, begins: bool) -> None:
    """The audit counts end positions anew, and sees to it that nothing reaches over a separator."""
    automaton = GrowingAutomaton(count_walk=count_walk)
    for number, document in enumerate(documents):
        if begins or number:
            automaton.extend([SEPARATOR])
        for begin in range(0, len(document), 7):
            automaton.extend(document[begin : begin + 7])
            automaton.check()


@settings(max_examples=150, deadline=None)
@given(texts, st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_counts_equal_brute_force(text: list[int], pattern: list[int]) -> None:
    automaton = GrowingAutomaton(text, count_walk=1000)
    state = length = 0
    for token in pattern:
        state, length = automaton.transfer(state, length, token)
    found = sum(text[i : i + len(pattern)] == pattern for i in range(len(text)))
    assert (automaton.count(state) if length == len(pattern) else 0) == found


def test_short_contexts_are_counted_too_low_where_the_walk_ends() -> None:
    automaton = GrowingAutomaton([5] * 100, count_walk=8)
    automaton.check()
    state, _ = automaton.transfer(0, 0, 5)
    assert 8 <= automaton.count(state) < 100
