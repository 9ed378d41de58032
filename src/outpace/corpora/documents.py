"""Documents out of files: plain text, JSON lines, arrays of token ids.

A reader turns files into a stream of events: `Part` after `Part` of a document, the last one marked, and a `Source`
after the last document of each file. Long texts come in several parts, cut after a line's end, so that memory stays
bounded; a document is still one document.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import stat
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from outpace.corpora.place import is_corpus
from outpace.corpora.records import Content, RecordReader, parse_line
from outpace.errors import InputError, UnknownNameError
from outpace.suffix.corpus import describe_file
from outpace.tree import Int32Array

FORMATS = ("auto", "ids", "jsonl", "text")
_LINES = (".jsonl", ".ndjson")
_ARRAY = ".npy"
_PIECE = 2**20  # bytes of text in a part, about
_LONGEST_PIECE = 4 * _PIECE  # where a text has no line ends
_IDS = 2**20  # token ids in a part


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a document: text, or token ids that are within the vocabulary; ``last`` ends the document."""

    content: Content
    last: bool


@dataclass(frozen=True, slots=True)
class Source:
    """A file that was read to its end: its path, its bytes, and the SHA-256 of its content."""

    path: str
    bytes: int
    sha256: str


@dataclass(slots=True)
class Skipped:
    """What a reader left out, and how often.

    Attributes:
        bad_lines: Lines of JSON files that could not be used, and why the first could not.
        unreadable_files: Files in folders that are no text in UTF-8, not of the wanted kind or cannot be read, and the
            first of them. A folder that cannot be listed counts as one.
        corpora: Corpora in folders, whose files are no documents.
    """

    bad_lines: int = 0
    first_bad_line: str = ""
    unreadable_files: int = 0
    first_unreadable_file: str = ""
    corpora: int = 0


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    format: str
    from_folder: bool


@dataclass(eq=False)
class DocumentReader:
    """Reads the documents of files and folders, in the order given; those in a folder by name.

    A file that is given must be usable. What lies in a folder and is not is counted and left out; corpora are left out.

    Args:
        inputs: Files and folders.
        format: One of `FORMATS`; ``"auto"`` goes by each file's name.
        records: What a line of a JSON file or a text means.
        skip_bad_lines: Count bad lines of JSON files and go on.

    Attributes:
        total_bytes: Of all files.
        bytes_read: So far.
        skipped: What was left out so far.

    Raises:
        InputError: An input does not exist, cannot be listed, or is a corpus.
        UnknownNameError: There is no such format.
    """

    inputs: SequenceOf[str | Path]
    format: str
    records: RecordReader
    skip_bad_lines: bool = False
    total_bytes: int = 0
    bytes_read: int = 0
    skipped: Skipped = field(default_factory=Skipped)

    def __post_init__(self) -> None:
        """List the files."""
        if self.format not in FORMATS:
            raise UnknownNameError("format", self.format, FORMATS)
        self._files = [file for given in self.inputs for file in self._files_of(Path(given))]
        self.total_bytes = sum(_size_of(file.path) for file in self._files)

    @property
    def reads_fields(self) -> bool:
        """Whether any file is read line by line, so that names of fields mean something."""
        return any(
            file.format == "jsonl" or (file.format == "ids" and not _is_array(file.path)) for file in self._files
        )

    def __iter__(self) -> Iterator[Part | Source]:
        """Read everything, once.

        Raises:
            InputError: A file cannot be read, or a line of it cannot be used; file and line are named.
        """
        readers = {"text": self._read_text, "jsonl": self._read_lines, "ids": self._read_lines}
        for file in self._files:
            try:
                if file.from_folder and not self._is_usable(file):
                    self._skip_file(file.path)
                    self.bytes_read += _size_of(file.path)
                elif file.format == "ids" and _is_array(file.path):
                    yield from self._read_array(file.path)
                else:
                    yield from readers[file.format](file.path, file.format)
            except OSError as error:
                raise InputError(f"cannot read {file.path}: {error.strerror or error}") from error

    def _files_of(self, given: Path) -> Iterator[_File]:
        if not given.is_dir():
            if not given.exists():
                raise InputError(f"no such file or folder: {str(given)!r}")
            yield _File(given, self._format_of(given), False)
            return
        if is_corpus(given):
            raise InputError(
                f"{str(given)!r} is a corpus, which holds no documents to read; give what it was built from"
            )
        for folder, names, files in os.walk(given, onerror=lambda error: self._skip_folder(given, error)):
            if is_corpus(Path(folder)):
                self.skipped.corpora += 1
                names.clear()
                continue
            names[:] = sorted(name for name in names if not name.startswith("."))
            for name in sorted(files):
                path = Path(folder, name)
                if name.startswith(".") or not _is_file(path):
                    continue
                if self._is_wanted(path):
                    yield _File(path, self._format_of(path), True)
                else:
                    self._skip_file(path)

    def _format_of(self, path: Path) -> str:
        if self.format != "auto":
            return self.format
        suffix = path.suffix.lower()
        return "ids" if suffix == _ARRAY else "jsonl" if suffix in _LINES else "text"

    def _is_wanted(self, path: Path) -> bool:
        """Whether a file in a folder is of the wanted format, by its name."""
        wanted = {"jsonl": _LINES, "ids": (_ARRAY, *_LINES)}.get(self.format)
        return wanted is None or path.suffix.lower() in wanted

    def _is_usable(self, file: _File) -> bool:
        """Whether a file in a folder can be read as what its name says; lines of JSON are looked at when they are read."""
        try:
            if file.format == "text":
                return _is_text(file.path)
            if file.format == "ids" and _is_array(file.path):
                array = _load_array(file.path)
                for begin in range(0, len(array), _IDS):
                    self.records.checked(np.asarray(array[begin : begin + _IDS]), begin)
            else:
                file.path.open("rb").close()
        except (OSError, InputError):
            return False
        return True

    def _skip_folder(self, given: Path, error: OSError) -> None:
        if str(error.filename) == str(given):
            raise InputError(f"cannot read {given}: {error.strerror or error}") from error
        self._skip_file(Path(error.filename))

    def _skip_file(self, path: Path) -> None:
        self.skipped.unreadable_files += 1
        self.skipped.first_unreadable_file = self.skipped.first_unreadable_file or str(path)

    def _read_text(self, path: Path, _format: str) -> Iterator[Part | Source]:
        hashed = hashlib.sha256()
        size, lines, waiting, first = 0, 1, "", True
        pieces = []
        with path.open("rb") as file:
            for content in _chunks(file.fileno()):
                hashed.update(content)
                size += len(content)
                self.bytes_read += len(content)
                text = _decoded(str(path), lines, content.removeprefix(codecs.BOM_UTF8) if first else content)
                lines, first = lines + text.count("\n"), False
                if self.records.chat:
                    pieces.append(text)  # a template wants all of it
                    continue
                if waiting:
                    yield Part(waiting, False)
                waiting = text
        if self.records.chat:
            waiting = self.records.answer("".join(pieces))
        yield Part(waiting, True)
        yield Source(str(path), size, hashed.hexdigest())

    def _read_lines(self, path: Path, file_format: str) -> Iterator[Part | Source]:
        hashed = hashlib.sha256()
        size = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                hashed.update(line)
                size += len(line)
                self.bytes_read += len(line)
                if not line.strip():
                    continue
                try:
                    content = self._content_of(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, file_format)
                except InputError as error:
                    problem = f"{path}:{number}: {error}"
                    if not self.skip_bad_lines:
                        raise InputError(f"{problem} (--skip-bad-lines counts such lines and goes on)") from error
                    self.skipped.bad_lines += 1
                    self.skipped.first_bad_line = self.skipped.first_bad_line or problem
                    continue
                yield from _parts(content)
        yield Source(str(path), size, hashed.hexdigest())

    def _content_of(self, line: bytes, file_format: str) -> Content:
        record = parse_line(line)
        return self.records.ids(record) if file_format == "ids" else self.records.text(record)

    def _read_array(self, path: Path) -> Iterator[Part | Source]:
        array = _load_array(path)
        for begin in range(0, max(len(array), 1), _IDS):
            part = np.asarray(array[begin : begin + _IDS])
            try:
                checked: Int32Array = self.records.checked(part, begin)
            except InputError as error:
                raise InputError(f"{path}: {error}") from error
            self.bytes_read += part.nbytes
            yield Part(checked, begin + _IDS >= len(array))
        entry = describe_file(path)
        yield Source(str(path), entry.bytes, entry.sha256)


def _is_array(path: Path) -> bool:
    return path.suffix.lower() == _ARRAY


def _is_file(path: Path) -> bool:
    """Whether it is an ordinary file, or one that cannot be looked at."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:  # a link to nowhere
        return False
    except OSError:
        return True


def _load_array(path: Path) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r" if _size_of(path) > _IDS else None, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise InputError(f"{path} is no array of token ids: {error}") from error
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
        found = f"shape {list(array.shape)} and dtype {array.dtype}" if isinstance(array, np.ndarray) else "an archive"
        raise InputError(f"{path}: expected integers in one dimension, which are one document, found {found}")
    return array


def _chunks(descriptor: int) -> Iterator[bytes]:
    """The content of a file in pieces that end after a line, or after a character where there is none; at least one."""
    rest = b""
    while content := os.read(descriptor, _PIECE):
        rest += content
        cut = rest.rfind(b"\n") + 1
        if cut == 0 and len(rest) >= _LONGEST_PIECE:
            cut = _character_begin(rest)
        if cut:
            yield rest[:cut]
            rest = rest[cut:]
    yield rest


def _character_begin(content: bytes) -> int:
    """The last place, within the four last bytes, where a character begins; the end where none does."""
    for place in range(len(content) - 1, len(content) - 5, -1):
        if content[place] & 0xC0 != 0x80:
            return place
    return len(content)


def _parts(content: Content) -> Iterator[Part]:
    """One document in parts of moderate size."""
    begin = 0
    size = _PIECE if isinstance(content, str) else _IDS
    while len(content) - begin > size:
        cut = content.rfind("\n", begin, begin + size) + 1 if isinstance(content, str) else 0
        end = cut if cut > begin else begin + size
        yield Part(content[begin:end], False)
        begin = end
    yield Part(content[begin:], True)


def _decoded(path: str, line: int, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line += content.count(b"\n", 0, error.start)
        raise InputError(
            f"{path}:{line}: expected text in UTF-8, found byte 0x{content[error.start]:02x}; convert the file, or leave it out"
        ) from error


def _is_text(path: Path) -> bool:
    """Whether a file is UTF-8 without NUL characters."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as file:
        while content := file.read(_PIECE):
            try:
                decoder.decode(content)
            except UnicodeDecodeError:
                return False
            if b"\0" in content:
                return False
    return not decoder.getstate()[0]


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
