from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from outpace.errors import CorpusError
from outpace.suffix.corpus import (
    FORMAT_VERSION,
    MANIFEST,
    SOURCES,
    Corpus,
    Manifest,
    ShardEntry,
    TokenizerEntry,
    describe_file,
    verify,
)
from outpace.suffix.frozen import FrozenAutomaton
from outpace.suffix.image import HEADER_SIZE, NUM_EDGES, NUM_STATES

OWN, OTHER = "a" * 64, "b" * 64


def write_corpus(folder: Path, shards: Sequence[Sequence[Sequence[int]]]) -> Path:
    """A corpus of lists of documents, one list a shard, without the builder."""
    folder.mkdir()
    entries = []
    for number, documents in enumerate(shards):
        path = folder / f"shard-{number:05}.frozen"
        tokens = np.concatenate([np.array(document, np.int32) for document in documents])
        offsets = np.cumsum([0, *(len(document) for document in documents)]).astype(np.int64)
        automaton = FrozenAutomaton.build(tokens, offsets)
        automaton.save(path)
        file = describe_file(path)
        states, edges = int(automaton.image[NUM_STATES]), int(automaton.image[NUM_EDGES])
        entries.append(ShardEntry(path.name, file.bytes, file.sha256, len(documents), len(tokens), states, edges))
    (folder / SOURCES).write_text(json.dumps({"path": "x", "first": 0, "documents": 9}) + "\n")
    Manifest(
        tokenizer=TokenizerEntry("llama", "/models/llama", OWN, 100),
        documents=sum(entry.documents for entry in entries),
        tokens=sum(entry.tokens for entry in entries),
        largest_token=max(token for documents in shards for document in documents for token in document),
        shards=tuple(entries),
        sources=describe_file(folder / SOURCES),
        provenance={"inputs": ["no\udcfftext.txt"]},
        outpace="0.9",
    ).write(folder)
    return folder


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus", [[[7, 8, 9, 7, 8], [7, 8]], [[1, 2, 3] * 5]])


def rewrite(folder: Path, **changes: object) -> None:
    """Change fields of the manifest, and its checksum with them."""
    content = Manifest.read(folder).to_json() | changes
    del content["checksum"]
    from outpace.suffix.corpus import _checksum_of

    (folder / MANIFEST).write_text(json.dumps({**content, "checksum": _checksum_of(content)}))


def test_opens_what_was_written(corpus: Path) -> None:
    opened = Corpus.open(str(corpus), fingerprint=OWN, tokenizer="anything", vocab_size=10)
    assert (opened.num_documents, opened.num_tokens) == (3, 22)
    assert opened.manifest == Manifest.read(corpus)
    assert [[d.tolist() for d in shard.documents()] for shard in opened.shards] == [
        [[7, 8, 9, 7, 8], [7, 8]],
        [[1, 2, 3] * 5],
    ]
    assert not opened.shards[0].image.flags.writeable
    assert opened.manifest.nbytes == sum((corpus / shard.name).stat().st_size for shard in opened.manifest.shards)
    assert list(verify(corpus)) == []


def test_another_tokenizer_is_refused_with_both_names(corpus: Path) -> None:
    with pytest.raises(
        CorpusError, match=r"built with tokenizer 'llama' \(fingerprint a{12}\).*'qwen' \(fingerprint b{12}\)"
    ):
        Corpus.open(corpus, OTHER, "qwen")
    with pytest.raises(CorpusError, match=r"'llama'.*is not this tokenizer"):
        Corpus.open(corpus, OTHER)


def test_ids_that_the_model_lacks(corpus: Path) -> None:
    with pytest.raises(CorpusError, match=r"holds token id 9, and the model knows 9 ids"):
        Corpus.open(corpus, OWN, "llama", vocab_size=9)


def test_what_is_no_corpus(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(CorpusError, match=r"no corpus at .*/nowhere"):
        Corpus.open(tmp_path / "nowhere")
    with pytest.raises(CorpusError, match=r"is no corpus: it has no manifest\.json"):
        Corpus.open(tmp_path)
    with pytest.raises(CorpusError, match="cannot read corpus"):
        Corpus.open(corpus / MANIFEST)
    (tmp_path / MANIFEST).write_text('{"name": "a web app"}')
    with pytest.raises(CorpusError, match=r"manifest\.json is not of a corpus.*found None"):
        Corpus.open(tmp_path)
    for content in (b"{", b"[]", b"\xff\xfe", b"[" * 100_000):
        (tmp_path / MANIFEST).write_bytes(content)
        with pytest.raises(CorpusError, match=r"manifest\.json is damaged"):
            Corpus.open(tmp_path)


def test_another_format_version(corpus: Path) -> None:
    rewrite(corpus, version=FORMAT_VERSION + 1)
    with pytest.raises(CorpusError, match=r"format version 2, built by Outpace 0\.9; this version reads 1: build"):
        Corpus.open(corpus)
    assert "format version 2" in next(verify(corpus))


def test_fields_of_some_other_program(corpus: Path) -> None:
    rewrite(corpus, surplus=1)
    with pytest.raises(CorpusError, match=r"other fields .*surplus"):
        Corpus.open(corpus)


def test_a_changed_manifest(corpus: Path) -> None:
    text = (corpus / MANIFEST).read_text()
    (corpus / MANIFEST).write_text(text.replace('"name": "llama"', '"name": "qwen"'))
    with pytest.raises(CorpusError, match="its checksum does not fit"):
        Corpus.open(corpus)
    assert "checksum does not fit" in next(verify(corpus))


@pytest.mark.parametrize("lost", ["shard-00000.frozen", "shard-00001.frozen"])
def test_a_missing_shard(corpus: Path, lost: str) -> None:
    (corpus / lost).unlink()
    with pytest.raises(CorpusError, match=f"{lost} cannot be read: No such file.*build the corpus again"):
        Corpus.open(corpus)
    assert [lost in line for line in verify(corpus)] == [True]


@pytest.mark.parametrize("size", [0, 3, 100, -4, 4])
def test_a_shard_of_another_size(corpus: Path, size: int) -> None:
    path = corpus / "shard-00001.frozen"
    content = path.read_bytes()
    path.write_bytes(content + bytes(4) if size == 4 else content[:size])
    with pytest.raises(CorpusError, match=r"shard-00001\.frozen has [\d,]+ bytes, and the manifest says"):
        Corpus.open(corpus)
    assert ["shard-00001.frozen" in line for line in verify(corpus)] == [True]


def test_every_flipped_bit_is_found(corpus: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("shard-00000.frozen", "shard-00001.frozen", SOURCES):
        content = (corpus / name).read_bytes()
        for place in rng.integers(0, len(content), 20).tolist():
            flipped = bytearray(content)
            flipped[place] ^= 1 << int(rng.integers(8))
            (corpus / name).write_bytes(flipped)
            problems = list(verify(corpus))
            assert len(problems) == 1
            assert f"{name} is damaged: its SHA-256" in problems[0]
            if place < 4 * HEADER_SIZE and name != SOURCES:
                with pytest.raises(CorpusError, match=name):
                    Corpus.open(corpus)
        (corpus / name).write_bytes(content)
    assert list(verify(corpus)) == []


def test_shards_that_changed_places(tmp_path: Path) -> None:
    """Of the same size, and each a sound automaton."""
    folder = write_corpus(tmp_path / "corpus", [[[1, 2, 3, 4]], [[1, 2], [3]]])
    small = write_corpus(tmp_path / "other", [[[5, 6, 7, 8]]])
    assert (folder / "shard-00000.frozen").stat().st_size == (small / "shard-00000.frozen").stat().st_size
    shutil.copy(small / "shard-00000.frozen", folder)
    Corpus.open(folder)  # headers alone cannot tell
    assert ["shard-00000.frozen" in line for line in verify(folder)] == [True]


def test_a_shard_with_other_counts_than_the_manifest(corpus: Path) -> None:
    shards = Manifest.read(corpus).to_json()["shards"]
    shards[0]["tokens"] = 6
    rewrite(corpus, shards=shards)
    with pytest.raises(CorpusError, match=r"holds 7 tokens in 2 documents, and the manifest says 6 in 2"):
        Corpus.open(corpus)
    assert [line for line in verify(corpus) if "the manifest says 6 in 2" in line]


def test_deep_verification_audits(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[FrozenAutomaton] = []
    monkeypatch.setattr(FrozenAutomaton, "check", lambda self: asked.append(self))
    assert list(verify(corpus, deep=True)) == []
    assert len(asked) == 2

    def fail(_self: FrozenAutomaton) -> None:
        raise AssertionError("state 3: its link is longer")

    monkeypatch.setattr(FrozenAutomaton, "check", fail)
    assert [line.endswith("state 3: its link is longer") for line in verify(corpus, deep=True)] == [True, True]


def test_progress_of_verification(corpus: Path) -> None:
    told: list[tuple[str, int, int]] = []
    list(verify(corpus, progress=lambda *now: told.append(now)))
    assert {name for name, _, _ in told} == {"shard-00000.frozen", "shard-00001.frozen", SOURCES}
    assert all(done == total for _, done, total in told)
