from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from frozentwin import Twin, compare, compare_text, compare_walk, frozen

small = st.integers(1, 4).flatmap(lambda k: st.lists(st.integers(0, k - 1), max_size=30))
wide = st.lists(st.one_of(st.integers(0, 200_000), st.integers(65_533, 65_537)), max_size=20)
loops = st.builds(
    lambda head, loop, times, tail: head + loop * times + tail,
    st.lists(st.integers(0, 3), max_size=4),
    st.lists(st.integers(0, 3), min_size=1, max_size=5),
    st.integers(1, 8),
    st.lists(st.integers(0, 3), max_size=4),
)
texts = st.one_of(small, wide, loops)
tiny = st.lists(st.lists(st.integers(0, 2), max_size=2), max_size=40)


def _copying(documents: list[list[int]], spans: list[tuple[int, int, int]]) -> list[list[int]]:
    """Add documents that are parts of others, so that beginnings and ends of documents occur elsewhere too."""
    for source, begin, size in spans:
        if documents:
            document = documents[source % len(documents)]
            begin %= len(document) + 1
            documents = [*documents, document[begin : begin + size]]
    return documents


spans = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60), st.integers(0, 60)), max_size=4)
corpora = st.builds(_copying, st.one_of(st.lists(texts, max_size=5), tiny), spans).filter(any)


@settings(max_examples=200, deadline=None)
@given(corpora)
def test_every_string_equals_brute_force(documents: list[list[int]]) -> None:
    automaton, twin = frozen(documents), Twin(documents)
    strings = sorted(twin.ends, key=len)
    compare(automaton, twin, [(), *strings[:60], *strings[-30:]])
    compare_text(automaton, twin)


@settings(max_examples=200, deadline=None)
@given(corpora, texts)
def test_walk_over_another_text_equals_brute_force(documents: list[list[int]], other: list[int]) -> None:
    automaton, twin = frozen(documents), Twin(documents)
    compare_walk(automaton, twin, other)
    compare_walk(automaton, twin, [t for d in reversed(twin.documents) for t in d][:80])


@settings(max_examples=200, deadline=None)
@given(corpora)
def test_audit_holds(documents: list[list[int]]) -> None:
    frozen(documents).check()
