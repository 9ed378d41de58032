"""Token ids on their way to the shards: written to disk as they come, so that memory stays bounded at any size."""

from __future__ import annotations

import os
from bisect import bisect_left
from pathlib import Path
from types import TracebackType

import numpy as np

from outpace.tree import Int32Array, Int64Array

_TOKENS, _OFFSETS = "tokens.spool", "offsets.spool"
_WRITTEN_AT_ONCE = 2**16  # offsets


class Spool:
    """Writes documents, tokens to one file and offsets to another.

    Args:
        folder: Where the two files are made.
        longest: Tokens of the longest document; a longer one is cut into several.

    Attributes:
        tokens: Written so far.
        documents: Written so far, the pieces of a cut one each; those without tokens are not written.
        empty: Documents without tokens.
        cut: Documents that were cut.
        cuts: Numbers of the pieces that another piece of the same document follows.
        largest: The largest token id, -1 before the first.
    """

    def __init__(self, folder: Path, longest: int) -> None:
        self._tokens_file = (folder / _TOKENS).open("wb")
        self._offsets_file = (folder / _OFFSETS).open("wb")
        self._offsets = [0]
        self._longest = longest
        self._length = 0  # of the document at hand, since its last cut
        self._was_cut = False
        self.tokens = self.documents = self.empty = self.cut = 0
        self.cuts: list[int] = []
        self.largest = -1

    def __enter__(self) -> Spool:
        """Nothing to do: the files are open."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Write what is left, unless something went wrong, and close the files."""
        try:
            if kind is None:
                self._write_offsets()
        finally:
            try:
                self._tokens_file.close()
            finally:
                self._offsets_file.close()

    def add(self, ids: Int32Array) -> None:
        """Append tokens to the document at hand."""
        while len(ids):
            if self._length == self._longest:
                self.cuts.append(self.documents)
                self._end_piece()
                self._was_cut = True
            taken = ids[: self._longest - self._length]
            self._tokens_file.write(np.ascontiguousarray(taken, np.int32).data)
            self.largest = max(self.largest, int(taken.max()))
            self._length += len(taken)
            self.tokens += len(taken)
            ids = ids[len(taken) :]

    def end(self) -> None:
        """End the document at hand."""
        if self._length:
            self._end_piece()
        else:
            self.empty += 1
        self.cut += self._was_cut
        self._was_cut = False

    def before_cuts(self, number: int) -> int:
        """The number that document ``number`` would have had if no document were cut."""
        return number - bisect_left(self.cuts, number)

    def rejoin(self, folder: Path) -> None:
        """Make the pieces of cut documents whole again, in the files of a spool that is closed."""
        offsets = np.delete(_offsets_of(folder), np.array(self.cuts, np.int64) + 1)
        joined = folder / f"{_OFFSETS}.joined"
        joined.write_bytes(offsets.data)
        os.replace(joined, folder / _OFFSETS)
        self.documents -= len(self.cuts)
        self.cut = 0
        self.cuts.clear()

    def _end_piece(self) -> None:
        self._length = 0
        self.documents += 1
        self._offsets.append(self.tokens)
        if len(self._offsets) >= _WRITTEN_AT_ONCE:
            self._write_offsets()

    def _write_offsets(self) -> None:
        self._offsets_file.write(np.array(self._offsets, np.int64).data)
        self._offsets.clear()


def read_spool(folder: Path, first: int, last: int) -> tuple[Int32Array, Int64Array]:
    """Documents ``first`` to ``last - 1`` of a spool, mapped: ``int32[n]`` tokens and ``int64[last - first + 1]`` offsets."""
    offsets = np.asarray(_offsets_of(folder)[first : last + 1])
    # Copy on write, so that compiled code sees the type of array that it was compiled for.
    tokens = np.asarray(np.memmap(folder / _TOKENS, np.int32, "c")[offsets[0] : offsets[-1]])
    return tokens, offsets - offsets[0]


def remove_spool(folder: Path) -> None:
    """Delete the two files."""
    for name in (_TOKENS, _OFFSETS):
        (folder / name).unlink(missing_ok=True)


def plan_shards(folder: Path, limit: int) -> list[tuple[int, int]]:
    """Which documents go into which shard: as few shards as the limit allows, of about the same size.

    Args:
        folder: Where the spool is.
        limit: Most tokens of a shard, a separator for each document included; no document is longer.

    Returns:
        First document of each shard, and the one after its last.
    """
    offsets = _offsets_of(folder)
    weights = offsets + np.arange(len(offsets))
    shards = []
    first = 0
    while first < len(weights) - 1:
        left = int(weights[-1] - weights[first])
        target = -(-left // -(-left // limit))  # so that the shards to come are alike
        last = int(np.searchsorted(weights, weights[first] + target))
        if weights[last] - weights[first] > limit:
            last -= 1
        shards.append((first, last))
        first = last
    return shards


def _offsets_of(folder: Path) -> Int64Array:
    offsets: Int64Array = np.memmap(folder / _OFFSETS, np.int64, "c")
    return offsets
