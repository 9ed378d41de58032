"""A corpus: frozen suffix automata over many documents, as a folder.

::

    manifest.json        what follows, and of whom: format, tokenizer, counts, checksums, where it came from
    sources.jsonl        one JSON object a line for each file that was read; not needed to open the corpus
    shard-00000.frozen   the image of one `outpace.suffix.frozen.FrozenAutomaton`; more shards where memory was short
    ...

Documents are numbered through all shards. The manifest carries a checksum of itself and one of every other file.
Opening reads the manifest and maps the shards: it looks at sizes and headers, and takes milliseconds whatever the
corpus's size. `verify` reads everything.

`outpace.corpora` builds such folders.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outpace.errors import CorpusError
from outpace.suffix.frozen import FrozenAutomaton

FORMAT = "outpace corpus"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
SOURCES = "sources.jsonl"

_CHUNK = 2**23  # bytes read at a time for a checksum
_CHECKSUM = "checksum"
_AGAIN = "build the corpus again (outpace corpus build)"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of the folder: its name, its size in bytes, and the SHA-256 of its content."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ShardEntry(FileEntry):
    """A shard's file, and the numbers of its documents, tokens, inner states and stored transitions."""

    documents: int
    tokens: int
    states: int
    edges: int


@dataclass(frozen=True, slots=True)
class TokenizerEntry:
    """The tokenizer of a corpus.

    Attributes:
        name: As it was given to the build.
        source: Where it was read: an absolute path, or the hub id.
        fingerprint: See `outpace.tokenizers.fingerprint`.
        vocab_size: Every id of the tokenizer is below it.
    """

    name: str
    source: str
    fingerprint: str
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What manifest.json says.

    Attributes:
        tokenizer: Which tokenizer's ids these are.
        documents: Documents in all shards, those without tokens not counted.
        tokens: Tokens in all shards.
        largest_token: The largest id among them.
        shards: In the order of their documents.
        sources: The file that lists what was read.
        skipped: What was left out, by reason (empty documents, bad lines, files that are no text), and how often.
        provenance: What was asked for, when, where and how long it took.
        outpace: Version of Outpace that built it.
    """

    tokenizer: TokenizerEntry
    documents: int
    tokens: int
    largest_token: int
    shards: tuple[ShardEntry, ...]
    sources: FileEntry
    skipped: Mapping[str, int] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    outpace: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.bytes for shard in self.shards)

    def to_json(self) -> dict[str, Any]:
        """As it is written, with its checksum."""
        content = {"format": FORMAT, "version": FORMAT_VERSION, **dataclasses.asdict(self), "bytes": self.nbytes}
        return {**content, _CHECKSUM: _checksum_of(content)}

    def write(self, folder: Path) -> None:
        """Write manifest.json into ``folder`` and see it onto the disk."""
        with (folder / MANIFEST).open("w", encoding="utf-8") as file:
            file.write(json.dumps(self.to_json(), indent=2) + "\n")  # in ASCII: a path may be no text
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: str | Path) -> Manifest:
        """Read a corpus's manifest; nothing else is looked at.

        Raises:
            CorpusError: There is no such folder, it is no corpus, of another format version, or damaged.
        """
        path = Path(folder) / MANIFEST
        content = _read_json(path)
        if content.get("format") != FORMAT:
            raise CorpusError(f"{path} is not of a corpus: expected format {FORMAT!r}, found {content.get('format')!r}")
        if content.get("version") != FORMAT_VERSION:
            raise CorpusError(
                f"{str(folder)!r} is a corpus of format version {content.get('version')}, built by Outpace "
                f"{content.get('outpace')}; this version reads {FORMAT_VERSION}: {_AGAIN}"
            )
        if content.pop(_CHECKSUM, None) != _checksum_of(content):
            raise CorpusError(f"{path} was changed or is damaged: its checksum does not fit; {_AGAIN}")
        try:
            for name in ("format", "version", "bytes"):
                del content[name]
            return cls(
                tokenizer=TokenizerEntry(**content.pop("tokenizer")),
                shards=tuple(ShardEntry(**shard) for shard in content.pop("shards")),
                sources=FileEntry(**content.pop("sources")),
                **content,
            )
        except (KeyError, TypeError) as error:
            raise CorpusError(
                f"{path} has other fields than this version of Outpace writes ({error}); {_AGAIN}"
            ) from error


@dataclass(frozen=True, eq=False, slots=True)
class Corpus:
    """A corpus, open for reading. Processes that open the same folder share its memory.

    Attributes:
        folder: Where it lies.
        manifest: What it says of itself.
        shards: The automata, in the order of their documents. Asked together: the longest match wins, counts add.
    """

    folder: Path
    manifest: Manifest
    shards: tuple[FrozenAutomaton, ...]

    @classmethod
    def open(
        cls,
        folder: str | Path,
        fingerprint: str | None = None,
        tokenizer: str | None = None,
        vocab_size: int | None = None,
    ) -> Corpus:
        """Map a corpus into memory, in milliseconds at any size.

        Sizes, headers and the manifest's checksum are looked at, the shards' checksums are not: see `verify`.

        Args:
            folder: The folder that `outpace corpus build` wrote.
            fingerprint: Of the tokenizer that will be used with it (`outpace.tokenizers.fingerprint`).
            tokenizer: That tokenizer's name, for the error.
            vocab_size: How many token ids the model knows; a corpus with a larger id is refused.

        Raises:
            CorpusError: It is not there, of another format version, of another tokenizer, or visibly damaged.
        """
        folder = Path(folder)
        manifest = Manifest.read(folder)
        _check_tokenizer(folder, manifest, fingerprint, tokenizer)
        if vocab_size is not None and manifest.largest_token >= vocab_size:
            raise CorpusError(
                f"corpus {str(folder)!r} holds token id {manifest.largest_token}, and the model knows {vocab_size} ids: "
                "build it with the model's own tokenizer"
            )
        return cls(folder, manifest, tuple(_open_shard(folder, shard) for shard in manifest.shards))

    @property
    def num_tokens(self) -> int:
        """Tokens of all shards."""
        return self.manifest.tokens

    @property
    def num_documents(self) -> int:
        """Documents of all shards."""
        return self.manifest.documents


def verify(
    folder: str | Path, *, deep: bool = False, progress: Callable[[str, int, int], None] | None = None
) -> Iterator[str]:
    """Read a whole corpus and compare it with its checksums.

    Args:
        folder: The corpus.
        deep: Audit every automaton as well, in plain Python: minutes for a million tokens.
        progress: Called with a file's name, how many bytes of it were read, and its size.

    Yields:
        One line for each damage, with the file and what is wrong with it; nothing for a sound corpus.
    """
    folder = Path(folder)
    try:
        manifest = Manifest.read(folder)
    except CorpusError as error:
        yield str(error)
        return
    damaged = False
    for entry in (*manifest.shards, manifest.sources):
        problem = _damage(folder, entry, progress)
        if problem is not None:
            damaged = True
            yield problem
    if damaged:
        return
    for shard in manifest.shards:
        try:
            automaton = _open_shard(folder, shard)
            if deep:
                automaton.check()
        except (CorpusError, AssertionError) as error:  # an audit asserts
            yield str(error) if isinstance(error, CorpusError) else f"{folder / shard.name}: {error}"


def describe_file(path: Path, progress: Callable[[str, int, int], None] | None = None) -> FileEntry:
    """Size and checksum of a file."""
    hashed = hashlib.sha256()
    size, done = path.stat().st_size, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            hashed.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress(path.name, done, size)
    return FileEntry(path.name, done, hashed.hexdigest())


def _checksum_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    folder = str(path.parent)
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        if not path.parent.exists():
            raise CorpusError(f"no corpus at {folder!r}: there is nothing of that name") from error
        raise CorpusError(f"{folder!r} is no corpus: it has no {MANIFEST}") from error
    except OSError as error:
        raise CorpusError(f"cannot read corpus {folder!r}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{path} is damaged: invalid JSON ({error}); {_AGAIN}") from error
    if not isinstance(content, dict):
        raise CorpusError(f"{path} is damaged: expected a JSON object; {_AGAIN}")
    return content


def _check_tokenizer(folder: Path, manifest: Manifest, fingerprint: str | None, tokenizer: str | None) -> None:
    own = manifest.tokenizer
    if fingerprint is not None and fingerprint != own.fingerprint:
        other = f"tokenizer {tokenizer!r}" if tokenizer else "this tokenizer"
        raise CorpusError(
            f"corpus {str(folder)!r} was built with tokenizer {own.name!r} (fingerprint {own.fingerprint[:12]}), which is not "
            f"{other} (fingerprint {fingerprint[:12]}): their ids mean different texts; build the corpus again with it"
        )


def _open_shard(folder: Path, entry: ShardEntry) -> FrozenAutomaton:
    path = folder / entry.name
    problem = _wrong_size(path, entry)
    if problem is not None:
        raise CorpusError(problem)
    automaton = FrozenAutomaton.open(path)
    if (automaton.num_tokens, automaton.num_documents) != (entry.tokens, entry.documents):
        raise CorpusError(
            f"{path} holds {automaton.num_tokens} tokens in {automaton.num_documents} documents, and the manifest says "
            f"{entry.tokens} in {entry.documents}; {_AGAIN}"
        )
    return automaton


def _wrong_size(path: Path, entry: FileEntry) -> str | None:
    try:
        size = path.stat().st_size
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}; {_AGAIN}"
    if size != entry.bytes:
        return f"{path} has {size:,} bytes, and the manifest says {entry.bytes:,}; {_AGAIN}"
    return None


def _damage(folder: Path, entry: FileEntry, progress: Callable[[str, int, int], None] | None) -> str | None:
    path = folder / entry.name
    problem = _wrong_size(path, entry)
    if problem is not None:
        return problem
    try:
        found = describe_file(path, progress).sha256
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    if found != entry.sha256:
        return (
            f"{path} is damaged: its SHA-256 is {found[:12]}..., and the manifest says {entry.sha256[:12]}...; {_AGAIN}"
        )
    return None
