"""Building a corpus: read and encode, spool, freeze shard by shard, publish by one rename.

Everything is made in a folder beside OUT, ``.OUT.building-PID``. The manifest is written last, and what is renamed to OUT
is complete and on the disk; whatever interrupts a build, OUT is either what it was before or the whole new corpus.
"""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from outpace._memory import free_main_memory
from outpace._version import __version__
from outpace.corpora.documents import FORMATS, DocumentReader, Part, Source
from outpace.corpora.memory import num_cpus, peak_resident, resident, size_text
from outpace.corpora.place import building_folder, translated, usable_place
from outpace.corpora.pool import run_jobs
from outpace.corpora.records import RecordReader
from outpace.corpora.spool import Spool, plan_shards, remove_spool
from outpace.corpora.worker import Job
from outpace.errors import ConfigError, InputError, UnknownNameError
from outpace.suffix.corpus import SOURCES, Manifest, ShardEntry, TokenizerEntry, describe_file
from outpace.tokenizers import TextTokenizer
from outpace.tree import Int32Array

BYTES_PER_TOKEN = 128  # that a build needs at its peak; measured: 100 to 120
MOST_TOKENS = 2**27  # of a shard: positions, states and words of its image have int32 numbers

_PROCESS = 110 * 10**6  # bytes of a process that builds nothing yet
_LEAST_SHARE = 2**28  # bytes of a process, before there are fewer of them
_LEAST_MEMORY = 2**20
_BATCH = 2**21  # characters that are encoded at a time
_TELL_EVERY = 0.1  # seconds


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How a corpus is built.

    Attributes:
        tokenizer: As `TextTokenizer.load` takes it.
        format: ``"text"``, ``"jsonl"``, ``"ids"``, or ``"auto"``: by each file's name.
        fields: Of a JSON line; see `RecordReader`.
        chat: Render conversations with the tokenizer's chat template; see `RecordReader`.
        skip_bad_lines: Count lines that cannot be used, instead of ending at the first.
        memory: Bytes that all building processes together may take, about; half of what is free by default. Inputs for
            which that is not enough become shards.
        workers: Processes that build shards, between which the memory is divided; as many as there are CPUs by default, fewer
            where shards would become very small.
        force: Replace a corpus that is already there.

    Raises:
        ConfigError: A number is too small.
        UnknownNameError: There is no such format.
    """

    tokenizer: str
    format: str = "auto"
    fields: tuple[str, ...] = ()
    chat: bool = False
    skip_bad_lines: bool = False
    memory: int | None = None
    workers: int | None = None
    force: bool = False

    def __post_init__(self) -> None:
        """Check numbers and names."""
        if self.format not in FORMATS:
            raise UnknownNameError("format", self.format, FORMATS)
        if self.memory is not None and self.memory < _LEAST_MEMORY:
            raise ConfigError(f"memory must be at least {size_text(_LEAST_MEMORY)}, found {size_text(self.memory)}")
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"workers must be at least 1, found {self.workers}")


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """How far a build has come.

    Attributes:
        stage: ``"reading"`` (done and total in bytes) or ``"building"`` (in tokens).
        done: So far.
        total: In all; 0 where that is not known.
        tokens: Read so far.
        seconds: Since this stage began.
        memory: Bytes that all processes hold now.
    """

    stage: str
    done: int
    total: int
    tokens: int
    seconds: float
    memory: int


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What a build made.

    Attributes:
        folder: The corpus.
        manifest: Its manifest.
        seconds_reading: Reading, encoding and spooling.
        seconds_building: Building and writing the shards.
        peak_memory: The most bytes that one process held, mapped files included.
        peak_worker: The same of the processes that built shards; 0 if this one did.
        notes: What the user should know: something was left out, another build is under way.
    """

    folder: Path
    manifest: Manifest
    seconds_reading: float
    seconds_building: float
    peak_memory: int
    peak_worker: int
    notes: tuple[str, ...]


Tell = Callable[[BuildProgress], None]


def build_corpus(
    out: str | Path, inputs: SequenceOf[str | Path], options: BuildOptions, progress: Tell | None = None
) -> BuildReport:
    """Build a corpus.

    Args:
        out: Folder to make. If it is there, ``options.force`` replaces it, given that it is a corpus.
        inputs: Files and folders with documents.
        options: How.
        progress: Called several times a second.

    Raises:
        ConfigError: An option cannot work, or ``out`` is there already.
        InputError: An input is missing, unreadable or malformed, or holds no token at all.
        CorpusError: It cannot be written; nothing was left behind.
    """
    place = usable_place(Path(out), options.force)
    tokenizer = TextTokenizer.load(options.tokenizer)
    records = RecordReader(tokenizer, options.fields, options.chat)
    reader = DocumentReader(inputs, options.format, records, options.skip_bad_lines)
    if options.fields and reader.total_bytes and not reader.reads_fields:
        raise ConfigError(
            "no input is read as lines of JSON, so --field means nothing; --format jsonl reads every file so"
        )
    with translated(place), building_folder(place, options.force) as building:
        run = _Build(building.folder, tokenizer, reader, options, progress or _ignore)
        manifest = run.make(inputs)
        building.publish()
    notes = (*building.notes, *_notes(reader, manifest))
    peak = max(run.peak_worker, peak_resident())
    return BuildReport(place, manifest, run.seconds_reading, run.seconds_building, peak, run.peak_worker, notes)


class _Build:
    """One build: its parts, and the figures that come together on the way."""

    def __init__(
        self, folder: Path, tokenizer: TextTokenizer, reader: DocumentReader, options: BuildOptions, tell: Tell
    ) -> None:
        self.folder, self.tokenizer, self.reader, self.options, self.tell = folder, tokenizer, reader, options, tell
        self.memory = options.memory or max(free_main_memory() // 2, _LEAST_MEMORY)
        wanted = options.workers or num_cpus()
        self.workers = max(1, min(wanted, self.memory // _LEAST_SHARE))
        # One process alone may take all the memory: what fits into it needs no shards.
        self.fits = _tokens_in(self.memory)
        self.limit = _tokens_in(self.memory // self.workers)
        self.seconds_reading = self.seconds_building = 0.0
        self.peak_worker = 0
        self._told = 0.0

    def make(self, inputs: SequenceOf[str | Path]) -> Manifest:
        begin = time.perf_counter()
        spool = self._read(begin)
        self.seconds_reading = time.perf_counter() - begin
        begin = time.perf_counter()
        shards = self._freeze(spool, begin)
        self.seconds_building = time.perf_counter() - begin
        remove_spool(self.folder)
        manifest = self._manifest(spool, shards, inputs)
        manifest.write(self.folder)
        return manifest

    def _read(self, begin: float) -> Spool:
        with (
            Spool(self.folder, self.limit - 1) as spool,
            (self.folder / SOURCES).open("w", encoding="ascii") as sources,
        ):
            first = 0
            for event in encoded(self.reader, self.tokenizer):
                if isinstance(event, Source):
                    line = {"path": event.path, "bytes": event.bytes, "sha256": event.sha256}
                    sources.write(json.dumps({**line, "first": first, "documents": spool.documents - first}) + "\n")
                    first = spool.documents
                    continue
                ids, last = event
                spool.add(ids)
                if last:
                    spool.end()
                self._tell("reading", self.reader.bytes_read, self.reader.total_bytes, spool.tokens, begin)
            self._tell("reading", self.reader.bytes_read, self.reader.total_bytes, spool.tokens, begin, last=True)
            sources.flush()
            os.fsync(sources.fileno())
        if spool.tokens == 0:
            raise InputError(
                f"nothing to build a corpus from: no document holds a token ({_left_out(self.reader, spool)})"
            )
        return spool

    def _freeze(self, spool: Spool, begin: float) -> list[ShardEntry]:
        limit = self.limit
        if spool.tokens + spool.documents - len(spool.cuts) <= self.fits:
            limit = self.fits
            if spool.cuts:
                _renumber_sources(self.folder / SOURCES, spool)
                spool.rejoin(self.folder)
        plan = plan_shards(self.folder, limit)
        jobs = [Job(self.folder, f"shard-{i:05}.frozen", first, last) for i, (first, last) in enumerate(plan)]
        built: list[ShardEntry] = []

        def tell(done: list[ShardEntry], processes: list[int]) -> None:
            tokens = sum(shard.tokens for shard in done)
            ends = tokens in (0, spool.tokens)
            self._tell("building", tokens, spool.tokens, spool.tokens, begin, processes, last=ends)

        tell(built, [])
        built, self.peak_worker = run_jobs(jobs, spool.tokens, self.workers, tell)
        tell(built, [])
        return built

    def _manifest(self, spool: Spool, shards: list[ShardEntry], inputs: SequenceOf[str | Path]) -> Manifest:
        tokenizer, skipped = self.tokenizer, self.reader.skipped
        return Manifest(
            tokenizer=TokenizerEntry(tokenizer.name, tokenizer.source, tokenizer.fingerprint, tokenizer.vocab_size),
            documents=spool.documents,
            tokens=spool.tokens,
            largest_token=spool.largest,
            shards=tuple(shards),
            sources=describe_file(self.folder / SOURCES),
            skipped={
                "empty_documents": spool.empty,
                "bad_lines": skipped.bad_lines,
                "unreadable_files": skipped.unreadable_files,
            },
            provenance={
                "inputs": [os.path.abspath(given) for given in inputs],
                "format": self.options.format,
                "fields": list(self.options.fields),
                "chat": self.options.chat,
                "first_bad_line": skipped.first_bad_line,
                "first_unreadable_file": skipped.first_unreadable_file,
                "cut_documents": spool.cut,
                "memory": self.memory,
                "workers": self.workers,
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "seconds_reading": round(self.seconds_reading, 3),
                "seconds_building": round(self.seconds_building, 3),
            },
            outpace=__version__,
        )

    def _tell(
        self,
        stage: str,
        done: int,
        total: int,
        tokens: int,
        begin: float,
        processes: SequenceOf[int] = (),
        last: bool = False,
    ) -> None:
        now = time.perf_counter()
        if now - self._told < _TELL_EVERY and not last:
            return
        self._told = now
        memory = resident([os.getpid(), *processes])
        self.tell(BuildProgress(stage, done, total, tokens, now - begin, memory))


def _renumber_sources(path: Path, spool: Spool) -> None:
    """Let a list of sources say which documents they hold once documents that were cut are whole again."""
    renumbered = path.with_name(f"{path.name}.joined")
    with path.open(encoding="ascii") as lines, renumbered.open("w", encoding="ascii") as out:
        for line in lines:
            source = json.loads(line)
            first = spool.before_cuts(source["first"])
            last = spool.before_cuts(source["first"] + source["documents"])
            out.write(json.dumps({**source, "first": first, "documents": last - first}) + "\n")
        out.flush()
        os.fsync(out.fileno())
    os.replace(renumbered, path)


def _tokens_in(num_bytes: int) -> int:
    """Tokens, a separator for each document included, that one process can build with; the process itself takes some."""
    room = max(num_bytes - _PROCESS, num_bytes // 2)
    return min(room // BYTES_PER_TOKEN, MOST_TOKENS)


def encoded(
    events: Iterator[Part | Source] | DocumentReader, tokenizer: TextTokenizer
) -> Iterator[tuple[Int32Array, bool] | Source]:
    """Token ids for texts, many at a time; the order of events stays.

    Yields:
        For each part its ids and whether it ends its document; sources as they are.
    """
    waiting: list[Part | Source] = []
    size = 0
    for event in events:
        waiting.append(event)
        size += len(event.content) if isinstance(event, Part) else 0
        if size >= _BATCH:
            yield from _encode_all(waiting, tokenizer)
            waiting, size = [], 0
    yield from _encode_all(waiting, tokenizer)


def _encode_all(events: list[Part | Source], tokenizer: TextTokenizer) -> Iterator[tuple[Int32Array, bool] | Source]:
    texts = [event.content for event in events if isinstance(event, Part) and isinstance(event.content, str)]
    ids = iter(tokenizer.encode_batch(texts))
    for event in events:
        if isinstance(event, Source):
            yield event
        elif isinstance(event.content, str):
            yield np.array(next(ids), np.int32), event.last
        else:
            yield event.content, event.last


def _left_out(reader: DocumentReader, spool: Spool) -> str:
    found = {
        "empty documents": spool.empty,
        "bad lines": reader.skipped.bad_lines,
        "files that cannot be read, are no text or of another format": reader.skipped.unreadable_files,
        "corpora": reader.skipped.corpora,
    }
    return ", ".join(f"{count:,} {what}" for what, count in found.items() if count) or "no documents at all"


def _notes(reader: DocumentReader, manifest: Manifest) -> Iterator[str]:
    skipped = reader.skipped
    empty, cut = manifest.skipped["empty_documents"], manifest.provenance["cut_documents"]
    if empty:
        yield f"documents without tokens, left out: {empty:,}"
    if skipped.bad_lines:
        yield f"bad lines, left out: {skipped.bad_lines:,}; the first: {skipped.first_bad_line}"
    if skipped.unreadable_files:
        yield (
            f"files in folders that cannot be read, are no text in UTF-8 or of another format, left out: "
            f"{skipped.unreadable_files:,}; the first: {skipped.first_unreadable_file}"
        )
    if skipped.corpora:
        yield f"corpora in folders, left out: {skipped.corpora:,}"
    if cut:
        yield f"documents larger than a shard, cut into several: {cut:,}"


def _ignore(_progress: BuildProgress) -> None:
    pass
