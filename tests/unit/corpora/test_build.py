from __future__ import annotations

import errno
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from corpora_support import MEMORY, SHARDED, beside, options
from outpace.assets import BUILTIN_MODEL
from outpace.corpora import build
from outpace.corpora.build import BuildProgress, build_corpus
from outpace.corpora.spool import Spool, plan_shards, read_spool
from outpace.errors import ConfigError, CorpusError, InputError, UnknownNameError
from outpace.suffix.corpus import MANIFEST, SOURCES, Corpus, verify
from outpace.suffix.frozen import FrozenAutomaton
from outpace.tokenizers import TextTokenizer

pytestmark = pytest.mark.usefixtures("load_once")


def test_one_shard(tmp_path: Path, lines: Path, box: TextTokenizer) -> None:
    told: list[BuildProgress] = []
    report = build_corpus(tmp_path / "new" / "out", [lines], options(), told.append)
    corpus = Corpus.open(tmp_path / "new" / "out", box.fingerprint, BUILTIN_MODEL, box.vocab_size)
    assert report.manifest == corpus.manifest
    texts = [box.decode(document.tolist()) for shard in corpus.shards for document in shard.documents()]
    assert texts == [json.loads(line)["text"] for line in lines.read_text().splitlines() if '""' not in line]
    assert (corpus.num_documents, len(corpus.shards)) == (3, 1)
    assert corpus.manifest.largest_token == max(max(box.encode(text)) for text in texts)
    assert corpus.manifest.skipped == {"empty_documents": 1, "bad_lines": 0, "unreadable_files": 0}
    assert report.notes == ("documents without tokens, left out: 1",)
    assert corpus.manifest.provenance["inputs"] == [str(lines)]
    (source,) = [json.loads(line) for line in (corpus.folder / SOURCES).read_text().splitlines()]
    assert (source["path"], source["first"], source["documents"]) == (str(lines), 0, 3)
    assert source["bytes"] == lines.stat().st_size
    assert sorted(path.name for path in corpus.folder.iterdir()) == [MANIFEST, "shard-00000.frozen", SOURCES]
    assert list(verify(corpus.folder)) == []
    assert beside(tmp_path / "new") == ["out"]
    assert {progress.stage for progress in told} == {"reading", "building"}
    assert told[-1].done == told[-1].total == told[-1].tokens == corpus.num_tokens
    assert report.peak_memory > 0


def test_shards_hold_the_same_documents(tmp_path: Path, arrays: list[Path]) -> None:
    build_corpus(tmp_path / "one", arrays, options())
    report = build_corpus(tmp_path / "many", arrays, options(memory=SHARDED, workers=2))
    one, many = Corpus.open(tmp_path / "one"), Corpus.open(tmp_path / "many")
    assert (len(one.shards), len(many.shards)) == (1, 5)
    assert [shard.num_tokens for shard in many.shards] == [8000] * 5
    documents = [[document for shard in corpus.shards for document in shard.documents()] for corpus in (one, many)]
    assert len(documents[0]) == 10
    for mine, other, path in zip(*documents, arrays, strict=True):
        assert mine.tolist() == other.tolist() == np.load(path).tolist()
    assert report.peak_memory >= report.peak_worker > 0
    assert list(verify(many.folder)) == []
    sources = [json.loads(line) for line in (many.folder / SOURCES).read_text().splitlines()]
    assert [(source["first"], source["documents"]) for source in sources] == [(number, 1) for number in range(10)]


def test_a_document_larger_than_a_shard_is_cut(tmp_path: Path) -> None:
    ids = np.arange(25_000) % 4096
    np.save(tmp_path / "x.npy", ids)
    report = build_corpus(tmp_path / "out", [tmp_path / "x.npy"], options(memory=SHARDED))
    corpus = Corpus.open(tmp_path / "out")
    assert "cut into several: 1" in report.notes[0]
    assert corpus.num_documents == len(corpus.shards) == 4
    joined = np.concatenate([document for shard in corpus.shards for document in shard.documents()])
    assert joined.tolist() == ids.tolist()


def test_no_document_is_cut_where_the_whole_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several workers' shares are smaller than the memory that one process may take alone."""
    monkeypatch.setattr(build, "_LEAST_SHARE", 2**20)
    paths = [tmp_path / f"{number}.npy" for number in range(4)]
    arrays = [np.arange(size) % 4096 for size in (10, 25_000, 20, 3_000)]
    for path, ids in zip(paths, arrays, strict=True):
        np.save(path, ids)
    report = build_corpus(tmp_path / "out", paths, options(memory=2**23, workers=4))
    corpus = Corpus.open(tmp_path / "out")
    assert report.notes == ()
    assert report.manifest.provenance["workers"] == 4
    assert len(corpus.shards) == 1
    assert [document.tolist() for document in corpus.shards[0].documents()] == [ids.tolist() for ids in arrays]
    sources = [json.loads(line) for line in (corpus.folder / SOURCES).read_text().splitlines()]
    assert [(source["first"], source["documents"]) for source in sources] == [(number, 1) for number in range(4)]
    assert list(verify(corpus.folder)) == []
    assert sorted(path.name for path in corpus.folder.iterdir()) == [MANIFEST, "shard-00000.frozen", SOURCES]


@pytest.mark.parametrize("seed", range(5))
def test_plans(tmp_path: Path, seed: int) -> None:
    """Every document once, in order; no shard over the limit; not many more shards than needed."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 60, 200).tolist()
    limit = int(rng.integers(61, 900))
    with Spool(tmp_path, limit - 1) as spool:
        for size in sizes:
            spool.add(np.full(size, size, np.int32))
            spool.end()
    plan = plan_shards(tmp_path, limit)
    assert [first for first, _ in plan] == [0, *(last for _, last in plan[:-1])]
    assert plan[-1][1] == len(sizes)
    weights = [sum(sizes[first:last]) + last - first for first, last in plan]
    assert max(weights) <= limit
    assert len(plan) <= -(-sum(weights) // max(limit - 61, 60))
    for first, last in plan:
        tokens, offsets = read_spool(tmp_path, first, last)
        assert tokens.tolist() == [size for size in sizes[first:last] for _ in range(size)]
        assert np.diff(offsets).tolist() == sizes[first:last]


def test_documents_cut_at_any_place(tmp_path: Path) -> None:
    with Spool(tmp_path, 4) as spool:
        for sizes in ((1,), (), (4,), (5,), (2, 2), (3, 9), (0,)):
            for size in sizes:
                spool.add(np.arange(size, dtype=np.int32))
            spool.end()
    _, offsets = read_spool(tmp_path, 0, spool.documents)
    assert np.diff(offsets).tolist() == [1, 4, 4, 1, 4, 4, 4, 4]
    assert (spool.documents, spool.tokens, spool.empty, spool.cut, spool.largest) == (8, 26, 2, 2, 8)
    assert spool.cuts == [2, 5, 6]
    assert [spool.before_cuts(number) for number in range(9)] == [0, 1, 2, 2, 3, 4, 4, 4, 5]
    spool.rejoin(tmp_path)
    _, offsets = read_spool(tmp_path, 0, spool.documents)
    assert np.diff(offsets).tolist() == [1, 4, 5, 4, 12]


def test_nothing_to_build_from(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": ""}\n{"text": ""}\n{}\n')
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=r"no document holds a token \(2 empty documents, 1 bad lines\)"):
        build_corpus(tmp_path / "out", [path], options(skip_bad_lines=True))
    with pytest.raises(InputError, match="no documents at all"):
        build_corpus(tmp_path / "out", [tmp_path / "folder"], options())
    assert beside(tmp_path, path, tmp_path / "folder") == []


def test_bad_lines_are_counted_and_the_first_named(tmp_path: Path, lines: Path) -> None:
    with lines.open("a") as file:
        file.write('{"text": 5}\n{"more"\n')
    with pytest.raises(InputError, match=r"in\.jsonl:5: field 'text' must be a string"):
        build_corpus(tmp_path / "out", [lines], options())
    assert beside(tmp_path, lines) == []
    report = build_corpus(tmp_path / "out", [lines], options(skip_bad_lines=True))
    assert report.manifest.skipped["bad_lines"] == 2
    assert f"bad lines, left out: 2; the first: {lines}:5: field 'text'" in report.notes[1]


def test_options_that_cannot_work(tmp_path: Path, lines: Path) -> None:
    with pytest.raises(UnknownNameError, match="unknown format 'xml'"):
        options(format="xml")
    with pytest.raises(ConfigError, match=r"memory must be at least 1\.05 MB, found 5 bytes"):
        options(memory=5)
    with pytest.raises(ConfigError, match="workers must be at least 1"):
        options(workers=0)
    with pytest.raises(InputError, match="no such file"):
        build_corpus(tmp_path / "out", [tmp_path / "nowhere"], options())
    assert beside(tmp_path, lines) == []


def test_fields_of_what_has_none(tmp_path: Path, lines: Path, arrays: list[Path]) -> None:
    text = tmp_path / "x.txt"
    text.write_text('{"body": "x"}\n')
    for inputs in ([text], arrays):
        with pytest.raises(ConfigError, match="--field means nothing; --format jsonl"):
            build_corpus(tmp_path / "out", inputs, options(fields=("body",)))
    assert build_corpus(tmp_path / "one", [text], options(fields=("body",), format="jsonl")).manifest.documents == 1
    assert build_corpus(tmp_path / "two", [text, lines], options(fields=("text",))).manifest.documents == 4


def test_the_corpus_in_the_folder_that_is_read(tmp_path: Path, lines: Path) -> None:
    for _ in range(2):
        report = build_corpus(tmp_path / "out", [tmp_path], options(force=True))
        assert report.manifest.documents == 3
    assert report.notes[-1] == "corpora in folders, left out: 1"


def test_the_default_memory_is_half_of_what_is_free(
    tmp_path: Path, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "free_main_memory", lambda: 4 * 10**9)
    report = build_corpus(tmp_path / "out", [lines], options(memory=None, workers=64))
    assert report.manifest.provenance["memory"] == 2 * 10**9
    assert report.manifest.provenance["workers"] == 7  # 64 would leave next to nothing to each


@contextmanager
def no_file_over(num_bytes: int) -> Iterator[None]:
    """As a full disk: no file, of this process or one that it starts, grows beyond ``num_bytes``."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [100, 20_000, 161_000])
@pytest.mark.parametrize("memory", [MEMORY, SHARDED])
def test_a_full_disk(tmp_path: Path, arrays: list[Path], lines: Path, room: int, memory: int) -> None:
    """Full while spooling, or while a shard is written, in this process or another."""
    out = tmp_path / "out"
    build_corpus(out, [lines], options())
    with no_file_over(room), pytest.raises(CorpusError, match=r"no room to build .*nothing was left behind"):
        build_corpus(out, arrays, options(memory=memory, workers=2, force=True))
    assert beside(tmp_path, lines, *arrays) == ["out"]
    assert Corpus.open(out).num_documents == 3
    assert list(verify(out)) == []


def test_a_full_disk_at_the_very_end(tmp_path: Path, lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(build.Manifest, "write", full)
    with pytest.raises(CorpusError, match="No space left on device"):
        build_corpus(tmp_path / "out", [lines], options())
    assert beside(tmp_path, lines) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path, lines: Path) -> None:
    with pytest.raises(CorpusError, match=r"cannot write .*: (File exists|Not a directory)"):
        build_corpus(lines / "out", [lines], options())


@pytest.mark.parametrize(
    ("script", "error", "problem"),
    [
        ("kill -9 $$", CorpusError, "not enough memory to build .*smaller --memory"),
        ("""echo '{"out_of_memory": true}'""", CorpusError, "not enough memory"),
        (
            "echo 'ValueError: so it goes' >&2; exit 1",
            CorpusError,
            r"built shard-0000\d\.frozen failed: ValueError: so",
        ),
        ("echo garbage", CorpusError, "failed: exit status 0"),
        ("""echo '{"errno": 13, "strerror": "Permission denied"}'""", CorpusError, "cannot write .*Permission denied"),
    ],
)
def test_workers_that_fail(
    tmp_path: Path,
    arrays: list[Path],
    script: str,
    error: type[Exception],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(error, match=problem):
        build_corpus(tmp_path / "out", arrays, options(memory=SHARDED, workers=2))
    assert beside(tmp_path, program, *arrays) == []


def test_modules_in_the_current_folder_are_not_imported(
    tmp_path: Path, arrays: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy.py").write_text("raise ValueError('not this one')\n")
    monkeypatch.chdir(tmp_path)
    build_corpus("out", arrays, options(memory=SHARDED, workers=2))
    assert len(Corpus.open("out").shards) == 5


def test_a_worker_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    waiting = (
        "import threading, time; from outpace.corpora import worker\n"
        "threading.Thread(target=worker._end_with_input, daemon=True).start()\n"
        "print(flush=True)\n"
        "time.sleep(300)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", waiting], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.readline()
    assert process.poll() is None
    process.stdin.close()
    assert process.wait(60) == 1
    process.stdout.close()


def test_out_of_memory_here(tmp_path: Path, lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(FrozenAutomaton, "build", no_memory)
    with pytest.raises(CorpusError, match="not enough memory"):
        build_corpus(tmp_path / "out", [lines], options())


def test_progress_is_told_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "many.jsonl"
    path.write_text('{"text": "x"}\n' * 5000)
    told: list[BuildProgress] = []
    begin = time.perf_counter()
    build_corpus(tmp_path / "out", [path], options(), told.append)
    assert len(told) <= 5 + (time.perf_counter() - begin) / build._TELL_EVERY
    assert [now.tokens for now in told if now.stage == "reading"][-1] == 5000
