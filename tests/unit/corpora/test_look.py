from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.corpora.look import Found, look_up, source_of
from outpace.errors import CorpusError
from outpace.suffix.corpus import SOURCES, Corpus
from outpace.suffix.frozen import FrozenAutomaton

Documents = list[list[int]]
documents_of_shards = st.lists(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=4), min_size=1, max_size=3
)


def corpus_of(shards: list[Documents], folder: Path = Path("nowhere")) -> Corpus:
    def build(documents: Documents) -> FrozenAutomaton:
        offsets = np.cumsum([0, *map(len, documents)]).astype(np.int64)
        return FrozenAutomaton.build(np.concatenate(documents).astype(np.int32), offsets)

    manifest: Any = SimpleNamespace()
    return Corpus(folder, manifest, tuple(build(documents) for documents in shards))


def look_up_slowly(shards: list[Documents], text: list[int]) -> Found | None:
    documents = [document for shard in shards for document in shard]
    for length in range(len(text), 0, -1):
        end = text[len(text) - length :]
        places = [
            (number, at)
            for number, document in enumerate(documents)
            for at in range(len(document) - length + 1)
            if document[at : at + length] == end
        ]
        if places:
            number, at = places[0]
            after = at + length
            following = Counter(
                documents[other][place + length] for other, place in places if place + length < len(documents[other])
            )
            return Found(
                length,
                len(places),
                number,
                at,
                np.array(documents[number][max(0, at - 3) : at]),
                np.array(documents[number][after : after + 3]),
                tuple(following.items()),
            )
    return None


@settings(deadline=None)
@given(documents_of_shards, st.lists(st.integers(0, 3), max_size=10))
def test_as_by_brute_force(shards: list[Documents], text: list[int]) -> None:
    found = look_up(corpus_of(shards), np.array(text, np.int32), around=3)
    slow = look_up_slowly(shards, text)
    if slow is None or found is None:
        assert found is slow
        return
    assert (found.length, found.count, found.document, found.position) == (
        slow.length,
        slow.count,
        slow.document,
        slow.position,
    )
    assert found.before.tolist() == slow.before.tolist()
    assert found.after.tolist() == slow.after.tolist()
    assert dict(found.next_tokens) == dict(slow.next_tokens)
    counts = [count for _, count in found.next_tokens]
    assert counts == sorted(counts, reverse=True)


def test_no_more_than_was_asked_for() -> None:
    found = look_up(
        corpus_of([[[1, token, token] for token in range(2, 9)]]), np.array([1], np.int32), around=1, most=3
    )
    assert found is not None
    assert len(found.next_tokens) == 3
    assert (len(found.before), len(found.after)) == (0, 1)


def test_source_of_a_document(tmp_path: Path) -> None:
    lines = [{"path": "a", "first": 0, "documents": 3}, {"path": "empty", "first": 3, "documents": 0}]
    lines.append({"path": "b", "first": 3, "documents": 2})
    (tmp_path / SOURCES).write_text("".join(json.dumps(line) + "\n" for line in lines))
    corpus = corpus_of([[[1]]], tmp_path)
    assert [source_of(corpus, number) for number in range(6)] == [
        ("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), None
    ]  # fmt: skip
    assert source_of(corpus_of([[[1]]]), 0) is None
    for damage in ("{", "[]", "5", "{}", '{"first": "x", "documents": 1}', "\xff"):
        (tmp_path / SOURCES).write_text(damage + "\n", encoding="latin-1")
        with pytest.raises(CorpusError, match=rf"{SOURCES} is damaged"):
            source_of(corpus, 0)
