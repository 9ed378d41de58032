"""The static suffix automaton of SAM-Decoding (section 3.1) over many documents, compact and mapped into memory.

Words, beside those of `outpace.suffix.growing`:

- A **separator** stands before every document and after the last. It matches nothing, so no match, link or continuation
  reaches from one document into another. Text positions count separators too.
- A **leaf** is the state of strings that occur once: all that end at one position and are too long to occur elsewhere.
  Its number is ``-1 - position``, and nothing of it is stored but its link.
- An **inner state** stands for strings that occur more than once. Its number is 0 (the root) or higher.
- A state's **count** is how often its strings occur. How often token t follows a state's strings is the count of the
  transition's target.

Example: documents ``[7, 8, 9, 7, 8]`` and ``[7, 8]`` lie in the text as ``| 7 8 9 7 8 | 7 8 |``, positions 0 to 8. The
string ``7`` occurs three times and ``8`` always follows, so ``7`` is an inner state with the count 3, its only target
the state of ``7 8``. After ``7 8`` comes ``9`` once, then two ends. ``7 8 9`` is the leaf at position 3, number -4.

Where the construction takes about 60 bytes a token, an image takes about 22. Opening an image checks its header only; a
damaged body is found by `FrozenAutomaton.check`, and by the checksums of whoever keeps the file.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import numpy as np

from outpace._compile import compiled
from outpace._files import sync_folder
from outpace.errors import CorpusError
from outpace.suffix import image as layout
from outpace.suffix.freeze import frozen_image, header_checksum
from outpace.suffix.frozen_audit import audit_frozen
from outpace.suffix.image import (
    continuations,
    count_of,
    endpos_of,
    length_of,
    link_of,
    next_of,
    step_frozen,
    text_at,
)
from outpace.tree import Int32Array, Int64Array

__all__ = [
    "FrozenAutomaton",
    "continuations",
    "count_of",
    "endpos_of",
    "length_of",
    "link_of",
    "next_of",
    "step_frozen",
    "text_at",
]


class FrozenAutomaton:
    """A suffix automaton that no longer changes. Any number of threads and processes may read it.

    Args:
        image: ``int32[...]``, as `build` makes it; made read-only.

    Attributes:
        image: The same, for the compiled queries of this module.
    """

    __slots__ = ("image",)

    def __init__(self, image: Int32Array) -> None:
        image.flags.writeable = False  # also so that compiled code sees one type, mapped or not
        self.image = image

    @classmethod
    def build(cls, tokens: Int32Array, offsets: Int64Array) -> FrozenAutomaton:
        """Build from documents.

        Beside the input it takes 80 to 95 bytes of memory a token on real text, up to 130 on random bits. The image takes
        22 to 25, and up to 38.

        Args:
            tokens: ``int32[n]``, the documents one after the other.
            offsets: ``int64[D + 1]``, where each begins, then ``n``. Documents without tokens are left out.

        Raises:
            InputError: The offsets do not fit the tokens, a token id is negative (the message names the document), there
                is no token at all, or there are too many for one automaton.
        """
        return cls(frozen_image(tokens, offsets))

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> FrozenAutomaton:
        """Map a file that `save` wrote; nothing is read but its header.

        Raises:
            CorpusError: The file is missing, truncated, of another version or none of ours, or its header is damaged.
        """
        try:
            size = os.path.getsize(path)
            if size < 4 * layout.HEADER_SIZE:
                raise CorpusError(f"{path}: {size} bytes are too few for a frozen automaton; the file is truncated")
            mapped = np.memmap(path, np.dtype("<i4"), "r", shape=(size // 4,))
        except OSError as error:
            raise CorpusError(f"{path}: cannot be read: {error.strerror or error}") from error
        image: Int32Array = np.asarray(mapped).view(np.ndarray)
        _check_header(path, image, size)
        return cls(image)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the image to a file: beside it first, then under its name, so that no half-written file ever bears it.

        Raises:
            OSError: The disk is full, or the folder cannot be written to; what was there stays as it was.
        """
        target = Path(path)
        beside = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
        try:
            with open(beside, "xb") as file:
                self.image.astype("<i4", copy=False).tofile(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, target)
        except BaseException:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise
        sync_folder(target.parent)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.image[layout.NUM_TOKENS])

    @property
    def num_documents(self) -> int:
        """Documents that hold a token."""
        return int(self.image[layout.NUM_DOCUMENTS])

    @property
    def num_states(self) -> int:
        """Inner states, the root included."""
        return int(self.image[layout.NUM_STATES])

    @property
    def nbytes(self) -> int:
        """Bytes of the image."""
        return self.image.nbytes

    def transfer(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Match one more token of some other text (Algorithm 1); see `step_frozen`."""
        return step_frozen(self.image, state, length, token)

    def match(self, tokens: Int32Array | SequenceOf[int]) -> tuple[int, int]:
        """State and length of the longest suffix of a text that occurs in a document; ``(0, 0)`` if none does."""
        return _match(self.image, np.ascontiguousarray(tokens, np.int32))

    def document(self, index: int) -> Int32Array:
        """The tokens of a document, ``int32[n]``, in the order of `build` without the empty ones.

        Raises:
            IndexError: There is no such document.
        """
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents}")
        begin = int(self.image[layout.DOCUMENTS_BEGIN]) + index
        return _copy_text(self.image, self.image[begin] + 1, self.image[begin + 1])

    def documents(self) -> Iterator[Int32Array]:
        """The documents one after the other."""
        return map(self.document, range(self.num_documents))

    def check(self) -> None:
        """Audit the whole structure in pure Python; for tests and `verify`.

        Raises:
            AssertionError: Naming the first invariant that does not hold.
        """
        audit_frozen(self.image)


@compiled
def _match(image: Int32Array, tokens: Int32Array) -> tuple[int, int]:
    state = length = 0
    for token in tokens:
        state, length = step_frozen(image, state, length, token)
    return state, length


@compiled
def _copy_text(image: Int32Array, begin: int, end: int) -> Int32Array:
    tokens = np.empty(end - begin, np.int32)
    for i in range(end - begin):
        tokens[i] = text_at(image, begin + i)
    return tokens


def _check_header(path: str | os.PathLike[str], image: Int32Array, size: int) -> None:
    if image[layout.MAGIC_AT] != layout.MAGIC:
        raise CorpusError(
            f"{path}: not a frozen automaton: begins with {int(image[0]) & 0xFFFFFFFF:08x}, not {layout.MAGIC:08x}"
        )
    if image[layout.VERSION_AT] != layout.VERSION:
        raise CorpusError(
            f"{path}: format version {image[layout.VERSION_AT]}, this program reads {layout.VERSION}; build it again"
        )
    if image[layout.CHECKSUM] != header_checksum(image):
        raise CorpusError(f"{path}: the header is damaged: its checksum does not fit")
    if size != 4 * int(image[layout.NUM_WORDS]):
        raise CorpusError(f"{path}: {size} bytes, its header says {4 * int(image[layout.NUM_WORDS])}; it was cut off")
