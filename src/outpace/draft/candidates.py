"""What Token Recycling remembers: after each token, the model's best next tokens as it last saw them.

One row for each token id, one **matrix** for each namespace, all in one array. A matrix takes 33 bytes for each id up to the
largest that was seen (1 MiB for 32,000 tokens, 4.8 MiB for 152,000). Namespaces that no open sequence uses are dropped, the
one that was used longest ago first, where there would be more than a given number.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from outpace._compile import compiled
from outpace.errors import ConfigError, InputError
from outpace.tree import Int32Array

WIDTH = 8  # candidates of each token
MISSING = -1
_MOST_ROWS = 2**21  # token ids from here on are not learned: no vocabulary is that large, and memory stays bounded
_ROWS_STEP = 1024
_FORMAT = 1

StrPath = str | os.PathLike[str]
UInt8Array = npt.NDArray[np.uint8]


class CandidateMatrices:
    """The matrices of all namespaces.

    Attributes:
        rows: ``int32[slots, ids, 8]``: candidates after each token, best first, all different, ``-1`` where none is known.
            Each namespace has one slot.
        repeats: ``uint8[slots, ids]``: how often in a row the best candidate came again; at most 255. After some tokens the
            model always wants the same, after others what it wants depends on more than the token.

    Args:
        most: Namespaces to keep. Those in use count, but are never dropped.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.rows: Int32Array = np.full((1, _ROWS_STEP, WIDTH), MISSING, np.int32)
        self.repeats: UInt8Array = np.zeros((1, _ROWS_STEP), np.uint8)
        self._slots: dict[str, int] = {}  # the namespace that was used last comes last
        self._users: dict[int, int] = {}  # open sequences of each slot in use

    @property
    def namespaces(self) -> list[str]:
        """Those that have a matrix, the one that was used longest ago first."""
        return list(self._slots)

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return self.rows.nbytes + self.repeats.nbytes

    def acquire(self, namespace: str) -> int:
        """The slot of a namespace, which stays until it is released as often as it was acquired."""
        slot = self._slots.pop(namespace, None)
        if slot is None:
            slot = self._free_slot()
            self.rows[slot], self.repeats[slot] = MISSING, 0
        self._slots[namespace] = slot
        self._users[slot] = self._users.get(slot, 0) + 1
        return slot

    def share(self, slot: int) -> None:
        """Acquire a slot that is in use once more."""
        self._users[slot] += 1

    def release(self, slot: int) -> None:
        """Give back what `acquire` or `share` gave."""
        self._users[slot] -= 1
        if not self._users[slot]:
            del self._users[slot]

    def learn(self, slots: Int32Array, row_offsets: Int32Array, input_tokens: Int32Array, top_ids: Int32Array) -> None:
        """Take over the candidates that a pass showed; of several rows of one token the last counts.

        Args:
            slots: ``int32[B]``, the slot of each sequence.
            row_offsets: ``int32[B + 1]``, rows of each sequence.
            input_tokens: ``int32[rows]``.
            top_ids: ``int32[rows, k]``, best first; more than 8 columns are left out.
        """
        largest = _learn(self.rows, self.repeats, slots, row_offsets, input_tokens, top_ids)
        if largest >= self.rows.shape[1]:
            self._grow(largest + 1)
            _learn(self.rows, self.repeats, slots, row_offsets, input_tokens, top_ids)

    def save(self, path: StrPath, namespace: str, fingerprint: str | None) -> None:
        """Write one matrix; see `RecyclingDrafter.save`."""
        if namespace not in self._slots:
            raise ConfigError(f"no candidates of namespace {namespace!r} to save (known: {self.namespaces or 'none'})")
        rows = self.rows[self._slots[namespace]]
        ids = np.flatnonzero((rows != MISSING).any(1)).astype(np.int32)
        target = Path(path)
        descriptor, beside = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                np.savez_compressed(
                    file,
                    format=np.int64(_FORMAT),
                    fingerprint=np.array(fingerprint or ""),
                    tokens=ids,
                    candidates=rows[ids],
                    repeats=self.repeats[self._slots[namespace], ids],
                )
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, target)
        except BaseException:
            os.unlink(beside)
            raise

    def load(self, path: StrPath, namespace: str, fingerprint: str | None) -> None:
        """Read one matrix; see `RecyclingDrafter.load`."""
        ids, candidates, repeats, found = _read(path)
        if fingerprint and found and found != fingerprint:
            raise InputError(f"{path}: candidates of another tokenizer: expected {fingerprint}, found {found}")
        slot = self.acquire(namespace)
        try:
            if len(ids):
                self._grow(int(ids.max()) + 1)
            self.rows[slot], self.repeats[slot] = MISSING, 0
            self.rows[slot, ids], self.repeats[slot, ids] = candidates, repeats
        finally:
            self.release(slot)

    def _free_slot(self) -> int:
        taken = set(self._slots.values())
        unused = [namespace for namespace, slot in self._slots.items() if slot not in self._users]
        for namespace in unused[: max(len(taken) - self.most + 1, 0)]:
            taken.discard(self._slots.pop(namespace))
        free = next((slot for slot in range(len(self.rows)) if slot not in taken), None)
        if free is None:
            free = len(self.rows)
            slots, num_rows = free + max(1, free // 4), self.rows.shape[1]
            self._resize(slots, num_rows)
        return free

    def _grow(self, num_rows: int) -> None:
        slots, known, _ = self.rows.shape
        if num_rows > known:
            num_rows = max(num_rows, known + known // 4)
            self._resize(slots, min(-(-num_rows // _ROWS_STEP) * _ROWS_STEP, _MOST_ROWS))

    def _resize(self, slots: int, num_rows: int) -> None:
        rows = np.full((slots, num_rows, WIDTH), MISSING, np.int32)
        repeats = np.zeros((slots, num_rows), np.uint8)
        known_slots, known_rows, _ = self.rows.shape
        rows[:known_slots, :known_rows] = self.rows
        repeats[:known_slots, :known_rows] = self.repeats
        self.rows, self.repeats = rows, repeats


@compiled
def _learn(
    rows: Int32Array,
    repeats: UInt8Array,
    slots: Int32Array,
    row_offsets: Int32Array,
    input_tokens: Int32Array,
    top_ids: Int32Array,
) -> int:
    """Return the largest token id that has to be written; if it does not fit, nothing is written."""
    largest = 0
    for token in input_tokens:
        if token < _MOST_ROWS:
            largest = max(largest, token)
    if largest >= rows.shape[1]:
        return largest
    width = min(WIDTH, top_ids.shape[1])
    for b in range(len(slots)):
        matrix = rows[slots[b]]
        for row in range(row_offsets[b], row_offsets[b + 1]):
            token = input_tokens[row]
            if token < 0 or token >= len(matrix):
                continue
            repeated = width > 0 and matrix[token, 0] == top_ids[row, 0]
            repeats[slots[b], token] = min(repeats[slots[b], token] + 1, 255) if repeated else 0
            for rank in range(WIDTH):
                candidate = top_ids[row, rank] if rank < width else MISSING
                for other in range(rank):
                    if matrix[token, other] == candidate:
                        candidate = MISSING
                matrix[token, rank] = max(candidate, MISSING)
    return largest


def _read(path: StrPath) -> tuple[Int32Array, Int32Array, UInt8Array, str]:
    """Tokens, candidates, repeats and fingerprint of a file, all checked."""
    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                _refuse(path, "one array instead of several")
            version = _field(path, file, "format", np.int64, 0)
            if int(version) != _FORMAT:
                _refuse(path, f"format {_FORMAT} expected, found {int(version)}")
            tokens = _field(path, file, "tokens", np.int32, 1)
            candidates = _field(path, file, "candidates", np.int32, 2)
            repeats = _field(path, file, "repeats", np.uint8, 1)
            fingerprint = file["fingerprint"]
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    except Exception as error:  # a damaged archive raises whatever its damaged part leads to
        _refuse(path, f"{type(error).__name__}: {error}")
    if len(repeats) != len(tokens):
        _refuse(path, f"repeats: {len(tokens)} expected, found {len(repeats)}")
    if candidates.shape != (len(tokens), WIDTH):
        _refuse(path, f"{WIDTH} candidates for each of {len(tokens)} tokens expected, found {candidates.shape}")
    if len(tokens) and not (tokens[0] >= 0 and bool((np.diff(tokens) > 0).all()) and tokens[-1] < _MOST_ROWS):
        _refuse(path, f"token ids must rise, from 0 to {_MOST_ROWS - 1} at most")
    ordered = np.sort(candidates, 1)
    if (ordered < MISSING).any() or ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != MISSING)).any():
        _refuse(path, "candidates of one token must be different ids")
    return tokens, candidates, repeats, str(fingerprint)


def _field(path: StrPath, file: Any, name: str, dtype: type, ndim: int) -> npt.NDArray[Any]:
    if name not in file:
        _refuse(path, f"no array {name!r}")
    array: npt.NDArray[Any] = file[name]
    if array.dtype != dtype or array.ndim != ndim:
        _refuse(path, f"{name}: {ndim}-D {np.dtype(dtype)} expected, found {array.ndim}-D {array.dtype}")
    return array


def _refuse(path: StrPath, problem: str) -> NoReturn:
    raise InputError(f"{path}: no candidates of Token Recycling: {problem}")
