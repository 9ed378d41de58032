"""Keys and values of all sequences, without padding (EMS-SD, section 3.2, "unpad KV cache").

Every layer's storage is one block of **rows**, a row being one token's keys and values. A sequence owns an **extent**: a
run of consecutive rows with its own start, which grows by moving to a larger gap. In front of it may stand shared,
read-only **prefixes** that several sequences refer to (after `KVArena.fork`). So a sequence's cache is a short list of
segments ``(start, length)``, and no two sequences need to have equal lengths.

After a verdict the rows of accepted nodes move up behind the rows that are kept, for all sequences and all layers that
are alike in one indexed copy.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch

from outpace.errors import ArenaFullError, LifecycleError
from outpace.model.storage import OUT_OF_ROWS, LayerKV, RowStorage
from outpace.tree import Verdicts


@dataclass(slots=True, eq=False)
class _Run:
    """Consecutive rows: an own extent, or a shared prefix with the number of sequences that refer to it."""

    start: int
    capacity: int
    length: int
    promised: int = 0  # rows behind `length` that the step under way will write
    references: int = 1

    @property
    def held(self) -> int:
        return self.length + self.promised


@dataclass(slots=True, eq=False)
class _Entry:
    prefixes: list[_Run] = field(default_factory=list)
    own: _Run | None = None

    def cached(self) -> int:
        return sum(run.length for run in self.prefixes) + (self.own.length if self.own else 0)


class KVArena:
    """Storage, allocation and movement of rows.

    Args:
        layers: What each layer stores, in the order in which the model calls its attention layers.
        max_rows: Most rows that the arena may ever have.
        initial_rows: Rows to begin with; storage doubles when it runs out, up to ``max_rows``.
    """

    def __init__(self, layers: SequenceOf[LayerKV], *, max_rows: int, initial_rows: int = 1024) -> None:
        self.layers = list(layers)
        self.max_rows = max_rows
        self.row_bytes = sum(layer.row_bytes for layer in self.layers)
        self._entries: dict[int, _Entry] = {}
        self._runs: list[_Run] = []  # sorted by start; only runs with capacity
        self.num_relocations = 0
        self.num_compactions = 0
        self._storage = RowStorage(self.layers, max(1, min(initial_rows, max_rows)))

    # --- storage ---------------------------------------------------------------------------------------------------

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys ``[rows, heads, key_dim]`` and values ``[rows, heads, value_dim]`` of one layer, as views."""
        return self._storage.layer(index)

    @property
    def capacity(self) -> int:
        """Rows of the present storage."""
        return self._storage.num_rows

    # --- figures ---------------------------------------------------------------------------------------------------

    @property
    def num_used(self) -> int:
        """Rows that hold a token."""
        return sum(run.length for run in self._runs)

    @property
    def num_free(self) -> int:
        """Rows of the present storage that belong to nobody."""
        return self.capacity - sum(run.capacity for run in self._runs)

    @property
    def num_available(self) -> int:
        """Rows that could be had if storage grew as far as it may and every run were as short as its content."""
        return self.max_rows - sum(run.held for run in self._runs)

    def cached_length(self, key: int) -> int:
        """Tokens of a sequence that have keys and values."""
        return self._entry(key).cached()

    def segments(self, key: int) -> list[tuple[int, int]]:
        """``(start, length)`` of a sequence's non-empty segments, in order."""
        entry = self._entry(key)
        runs = entry.prefixes if entry.own is None else [*entry.prefixes, entry.own]
        return [(run.start, run.length) for run in runs if run.length]

    # --- life of a sequence ----------------------------------------------------------------------------------------

    def open(self, key: int) -> None:
        """Start a sequence without any rows."""
        if key in self._entries:
            raise LifecycleError(f"sequence {key} is already open in the arena")
        self._entries[key] = _Entry()

    def prepare(self, key: int, new_rows: int, reserve: int = 0) -> None:
        """Make room behind a sequence's rows, moving its extent if need be.

        The room is held until `commit`, `release` or `reset`. Other sequences' preparation may still move it, so ask for
        `write_start` when all are prepared.

        Args:
            key: The sequence.
            new_rows: Rows that the next step writes.
            reserve: Rows that the sequence will probably need in all, shared ones included; a wish, not a demand.

        Raises:
            ArenaFullError: Even after compaction and growth there is no room; no content has changed.
            LifecycleError: The sequence is not open, or nothing is to be written.
        """
        entry = self._entry(key)
        if new_rows < 1:
            raise LifecycleError(f"sequence {key}: expected at least one new row, found {new_rows}")
        own = entry.own
        length = own.length if own else 0
        needed = length + new_rows
        if own is None or own.capacity < needed:
            own_reserve = reserve - sum(run.length for run in entry.prefixes)
            self._relocate(entry, needed, max(needed, own_reserve, min(2 * length, needed + 4096)))
        assert entry.own is not None
        entry.own.promised = new_rows

    def write_start(self, key: int) -> int:
        """The row for the first new token of a prepared sequence."""
        own = self._entry(key).own
        if own is None or not own.promised:
            raise LifecycleError(f"sequence {key} was not prepared")
        return own.start + own.length

    def release(self, key: int) -> None:
        """Give up what `prepare` promised, after a step that was not run."""
        own = self._entry(key).own
        if own is not None:
            own.promised = 0

    def commit(self, keys: SequenceOf[int], num_pending: SequenceOf[int], verdicts: Verdicts | None) -> None:
        """Keep the pending tokens' rows and the accepted nodes' rows of a step; the rest are overwritten later.

        Args:
            keys: The sequences of the step.
            num_pending: Pending tokens that the step wrote for each.
            verdicts: Accepted paths, or None if nothing was verified.

        Raises:
            LifecycleError: A sequence is not open, or keeps rows that were not prepared; nothing is committed then.
        """
        source: list[int] = []
        target: list[int] = []
        kept: list[tuple[_Run, int]] = []
        for b, key in enumerate(keys):
            own = self._entry(key).own
            if own is None:
                raise LifecycleError(f"sequence {key} has no extent to commit to")
            path = [] if verdicts is None else verdicts.path_of(b).tolist()
            pending = int(num_pending[b])
            written = pending + max(path, default=-1) + 1
            if written > own.promised:
                raise LifecycleError(f"sequence {key}: {own.promised} rows were prepared, {written} are needed")
            base = own.start + own.length + pending
            for place, node in enumerate(path):
                if node != place:
                    source.append(base + node)
                    target.append(base + place)
            kept.append((own, pending + len(path)))
        self._storage.move(source, target)
        for own, rows in kept:
            own.length += rows
            own.promised = 0

    def fork(self, key: int, new_key: int) -> None:
        """Open ``new_key`` with the same rows as ``key``, which both share from now on."""
        entry = self._entry(key)
        self.open(new_key)
        if entry.own is not None and entry.own.length:
            entry.own.capacity, entry.own.promised = entry.own.length, 0
            entry.prefixes.append(entry.own)
            entry.own = None
        for run in entry.prefixes:
            run.references += 1
        self._entries[new_key].prefixes = list(entry.prefixes)

    def reset(self, key: int) -> None:
        """Drop all rows of a sequence; it stays open."""
        entry = self._entry(key)
        for run in entry.prefixes:
            run.references -= 1
            if run.references == 0:
                self._runs.remove(run)
        if entry.own is not None:
            self._runs.remove(entry.own)
        self._entries[key] = _Entry()

    def free(self, key: int) -> None:
        """Drop all rows of a sequence and forget it."""
        self.reset(key)
        del self._entries[key]

    # --- allocation ------------------------------------------------------------------------------------------------

    def _entry(self, key: int) -> _Entry:
        try:
            return self._entries[key]
        except KeyError:
            raise LifecycleError(f"sequence {key} is not open in the arena") from None

    def _relocate(self, entry: _Entry, needed: int, wanted: int) -> None:
        """Give an entry an extent of at least ``needed`` rows: where it is, in a gap, or by moving everybody."""
        own = entry.own
        if own is not None and self._grow_in_place(own, needed, wanted):
            return
        gap = self._find_gap(needed, wanted)
        if gap is None:
            self._make_room(entry, needed, wanted)
            return
        new = _Run(*gap, own.length if own else 0)
        if own is not None:
            if own.length:
                self._storage.move(range(own.start, own.start + own.length), range(new.start, new.start + own.length))
                self.num_relocations += 1
            self._runs.remove(own)
        bisect.insort(self._runs, new, key=lambda run: run.start)
        entry.own = new

    def _grow_in_place(self, own: _Run, needed: int, wanted: int) -> bool:
        place = self._runs.index(own)
        end = self._runs[place + 1].start if place + 1 < len(self._runs) else self.capacity
        room = end - own.start
        if room < needed:
            return False
        own.capacity = min(room, wanted)
        return True

    def _find_gap(self, needed: int, wanted: int) -> tuple[int, int] | None:
        """A gap with at least ``needed`` rows, as it is or by growth."""
        gap = self._best_gap(needed, wanted)
        if gap is None and self.capacity < self.max_rows:
            tail = self.capacity - (self._runs[-1].start + self._runs[-1].capacity if self._runs else 0)
            target = max(2 * self.capacity, self.capacity - tail + wanted)
            if min(target, self.max_rows) - (self.capacity - tail) >= needed:
                with contextlib.suppress(ArenaFullError):  # then there is compaction
                    self._storage.grow(min(target, self.max_rows))
                gap = self._best_gap(needed, wanted)
        return gap

    def _make_room(self, entry: _Entry, needed: int, wanted: int) -> None:
        """Compact, and widen the entry's extent where it stands: a gap beside it would have to hold all of it again."""
        own = entry.own
        length = own.length if own else 0
        room = self.max_rows - sum(run.held for run in self._runs if run is not own)
        if needed > room:
            raise ArenaFullError(needed - length, room - length, self.max_rows, self.row_bytes, OUT_OF_ROWS)
        if self.capacity < self.max_rows:
            room = self._grow_or_do_with_less(needed, room)
        if own is None:
            own = entry.own = _Run(self.capacity, 0, 0)
            self._runs.append(own)
        # Half of what is left beyond the need, since others will ask next.
        self._compact(own, needed + (min(wanted, room) - needed) // 2)

    def _grow_or_do_with_less(self, needed: int, room: int) -> int:
        """Take all rows that there may be; what an extent can have then, also where memory ends before."""
        try:
            self._storage.grow(self.max_rows)
        except ArenaFullError:
            room -= self.max_rows - self.capacity
            if needed > room:
                raise
        return room

    def _best_gap(self, needed: int, wanted: int) -> tuple[int, int] | None:
        """The smallest gap that fits the wish, else the largest that fits the need."""
        best: tuple[int, int] | None = None
        position = 0
        for run_start, run_end in [*((r.start, r.start + r.capacity) for r in self._runs), (self.capacity, 0)]:
            size = run_start - position
            if size >= needed:
                better = best is None or (
                    size < best[1] if size >= wanted and best[1] >= wanted else size > best[1] and best[1] < wanted
                )
                if better:
                    best = (position, size)
            position = run_end
        return None if best is None else (best[0], min(best[1], wanted))

    def compact(self) -> None:
        """Slide all runs together, each with just the rows that it uses."""
        self._compact(None, 0)

    def _compact(self, widened: _Run | None, capacity: int) -> None:
        """Slide all runs together; ``widened`` gets ``capacity`` rows, the others what they hold."""
        starts, capacities = [], []
        position = 0
        for run in self._runs:
            starts.append(position)
            capacities.append(capacity if run is widened else run.held)
            position += capacities[-1]
        # Runs that go down from the lowest up, then runs that go up from the highest down: no row is overwritten unread.
        source: list[int] = []
        target: list[int] = []
        for run, start in zip(self._runs, starts, strict=True):
            if start < run.start:
                source.extend(range(run.start, run.start + run.length))
                target.extend(range(start, start + run.length))
        for run, start in zip(reversed(self._runs), reversed(starts), strict=True):
            if start > run.start:
                source.extend(range(run.start + run.length - 1, run.start - 1, -1))
                target.extend(range(start + run.length - 1, start - 1, -1))
        self._storage.move(source, target)
        for run, start, rows in zip(self._runs, starts, capacities, strict=True):
            run.start, run.capacity = start, rows
        self.num_compactions += 1
        for entry in self._entries.values():
            if entry.own is not None and entry.own.capacity == 0:
                entry.own = None
        self._runs = [run for run in self._runs if run.capacity]

    def check(self) -> None:
        """Audit: runs are sorted and disjoint, counted right, and each belongs to somebody.

        Raises:
            AssertionError: With what is wrong.
        """
        position = 0
        for run in self._runs:
            assert run.start >= position, f"run at {run.start} overlaps the one that ends at {position}"
            assert 0 <= run.length <= run.held <= run.capacity, f"run at {run.start}: {run.held} rows of {run.capacity}"
            position = run.start + run.capacity
        assert position <= self.capacity <= max(self.max_rows, 1), f"{position} rows, {self.capacity}, {self.max_rows}"
        references: dict[int, int] = {}
        for key, entry in self._entries.items():
            for run in [*entry.prefixes, *([entry.own] if entry.own else [])]:
                assert any(run is other for other in self._runs), f"sequence {key} refers to a freed run"
                references[id(run)] = references.get(id(run), 0) + 1
        for run in self._runs:
            found = references.get(id(run), 0)
            assert found == run.references, f"run at {run.start}: {run.references} references, {found} referrers"
        self._storage.check()
