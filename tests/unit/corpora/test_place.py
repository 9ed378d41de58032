from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from corpora_support import SHARDED, beside, options
from outpace.corpora import place, pool
from outpace.corpora.build import BuildProgress, build_corpus
from outpace.errors import ConfigError, CorpusError
from outpace.suffix.corpus import MANIFEST, Corpus

pytestmark = pytest.mark.usefixtures("load_once")


def test_an_existing_corpus(tmp_path: Path, lines: Path, arrays: list[Path]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    build_corpus(out, [lines], options())  # an empty folder is no corpus to be lost
    with pytest.raises(ConfigError, match="exists already; --force replaces"):
        build_corpus(out, arrays, options())
    still_open = Corpus.open(out)
    build_corpus(out, arrays, options(force=True))
    assert Corpus.open(out).num_documents == 10
    assert still_open.shards[0].document(0).size > 0  # who has the old one open keeps it
    (out / MANIFEST).write_text((out / MANIFEST).read_text()[:300])
    build_corpus(out, [lines], options(force=True))  # damaged, but a corpus
    assert Corpus.open(out).num_documents == 3
    assert beside(tmp_path, lines, *arrays) == ["out"]


def test_what_is_no_corpus_is_never_replaced(tmp_path: Path, lines: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("x")
    for manifest in (None, '{"name": "a web app"}'):
        if manifest is not None:
            (precious / MANIFEST).write_text(manifest)
        with pytest.raises(ConfigError, match="is no corpus: it will not be replaced"):
            build_corpus(precious, [lines], options(force=True))
    with pytest.raises(ConfigError, match="is no corpus"):
        build_corpus(lines, [lines], options(force=True))
    assert (precious / "thesis.txt").read_text() == "x"


def test_somebody_else_was_faster(tmp_path: Path, lines: Path) -> None:
    out = tmp_path / "out"

    def make(_now: BuildProgress) -> None:
        out.mkdir(exist_ok=True)
        (out / "theirs").write_text("x")

    with pytest.raises(ConfigError, match="was made by somebody else meanwhile"):
        build_corpus(out, [lines], options(), make)
    assert beside(tmp_path, lines) == ["out"]
    assert [path.name for path in out.iterdir()] == ["theirs"]


@pytest.mark.parametrize("stage", ["reading", "building"])
def test_ctrl_c_leaves_nothing(tmp_path: Path, arrays: list[Path], stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = pool._start

    def note(job: Any) -> Any:
        worker = start(job)
        started.append(worker.process)
        return worker

    def interrupt(now: BuildProgress) -> None:
        if now.stage == stage and (stage == "reading" or started):
            raise KeyboardInterrupt

    monkeypatch.setattr(pool, "_start", note)
    with pytest.raises(KeyboardInterrupt):
        build_corpus(tmp_path / "out", arrays, options(memory=SHARDED, workers=2), interrupt)
    assert beside(tmp_path, *arrays) == []
    assert all(process.returncode is not None for process in started)
    assert bool(started) == (stage == "building")


def test_a_killed_build_leaves_nothing_that_opens(tmp_path: Path, arrays: list[Path]) -> None:
    script = (
        "import os, sys, signal\n"
        "from outpace.corpora.build import BuildOptions, build_corpus\n"
        "def tell(now):\n"
        "    if now.stage == 'building':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "build_corpus(sys.argv[1], sys.argv[2:], BuildOptions('outpace-tiny', memory=2**24), tell)\n"
    )
    out = tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", script, str(out), *map(str, arrays)], capture_output=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (left,) = beside(tmp_path, *arrays)
    assert left.startswith(".out.building-")
    for folder in (out, tmp_path / left):
        with pytest.raises(CorpusError):
            Corpus.open(folder)
    report = build_corpus(out, arrays, options())
    assert report.notes == (f"deleted what a build that did not end had left: {str(tmp_path / left)!r}",)
    assert beside(tmp_path, *arrays) == ["out"]


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_build_that_died_between_two_renames(tmp_path: Path, lines: Path) -> None:
    out = tmp_path / "out"
    build_corpus(out, [lines], options())
    out.rename(tmp_path / f".out.replaced-{dead_process()}")
    with pytest.raises(ConfigError, match="exists already"):
        build_corpus(out, [lines], options())
    assert Corpus.open(out).num_documents == 3
    assert beside(tmp_path, lines) == ["out"]


def test_an_earlier_process_had_the_same_number(tmp_path: Path, lines: Path) -> None:
    out = tmp_path / "out"
    build_corpus(out, [lines], options())
    out.rename(tmp_path / f".out.replaced-{os.getpid()}-0123abcd")
    (tmp_path / f".out.building-{os.getpid()}-0123abcd").mkdir()
    report = build_corpus(out, [lines], options(force=True))
    assert "deleted what a build that did not end had left" in report.notes[0]
    assert Corpus.open(out).num_documents == 3
    assert beside(tmp_path, lines) == ["out"]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("number", [0, 1])
def test_ctrl_c_between_two_renames(
    tmp_path: Path, lines: Path, arrays: list[Path], number: int, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before or after either: what stands there is the old corpus or the new one."""
    out = tmp_path / "out"
    build_corpus(out, [lines], options())
    rename, calls = os.rename, []

    def interrupted(source: Path, target: Path) -> None:
        calls.append(source)
        now = len(calls) == number + 1
        if not now or after:
            rename(source, target)
        if now:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build_corpus(out, arrays, options(force=True))
    assert Corpus.open(out).num_documents == (10 if (number, after) == (1, True) else 3)
    assert beside(tmp_path, lines, *arrays) == ["out"]


def test_two_builds_in_one_process(tmp_path: Path, lines: Path, arrays: list[Path]) -> None:
    notes: list[str] = []

    def build_another(now: BuildProgress) -> None:
        if now.stage == "building" and not notes:
            notes.append("")
            notes.extend(build_corpus(tmp_path / "out", [lines], options()).notes)

    with pytest.raises(ConfigError, match="was made by somebody else meanwhile"):
        build_corpus(tmp_path / "out", arrays, options(), build_another)
    assert any("seems to build the same corpus" in note for note in notes)
    assert Corpus.open(tmp_path / "out").num_documents == 3
    assert beside(tmp_path, lines, *arrays) == ["out"]


def test_another_build_under_way_is_named(tmp_path: Path, lines: Path) -> None:
    other = tmp_path / f".out.building-{os.getppid()}"
    other.mkdir()
    (tmp_path / ".out.building-me").mkdir()  # no number: none of ours
    report = build_corpus(tmp_path / "out", [lines], options())
    assert f"process {os.getppid()} seems to build the same corpus" in report.notes[0]
    assert beside(tmp_path, lines) == [other.name, ".out.building-me", "out"]


def test_names_with_signs_of_patterns(tmp_path: Path, lines: Path) -> None:
    (tmp_path / f".o[ab]*.building-{dead_process()}").mkdir()
    (tmp_path / f".oa.building-{dead_process()}").mkdir()
    build_corpus(tmp_path / "o[ab]*", [lines], options())
    assert [name.split("-")[0] for name in beside(tmp_path, lines)] == [".oa.building", "o[ab]*"]
    assert place._is_alive(os.getpid())
