"""The arena against a shadow: a dictionary that holds, for each sequence, the stamps of its rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outpace.errors import ArenaFullError
from outpace.model import KVArena, LayerKV
from outpace.tree import Verdicts
from outpace.verify import verdicts_of

CPU = torch.device("cpu")
LAYERS = [
    LayerKV(2, 4, 2, 4, torch.float32, CPU),
    LayerKV(1, 3, 1, 2, torch.bfloat16, CPU),
    LayerKV(2, 4, 2, 4, torch.float32, CPU),  # alike, so stacked with the first, though not its neighbour
    LayerKV(2, 2, 1, 5, torch.float64, CPU),
]
BASE = 200  # contents stay below 256, which bfloat16 holds exactly


def content(stamps: list[int], layer: int, heads: int, dim: int, is_value: bool) -> torch.Tensor:
    """``[rows, heads, dim]``: tells stamps, layers, heads and keys from values apart."""
    digits = torch.tensor([[stamp // BASE ** (d % 2) % BASE for d in range(dim)] for stamp in stamps]).view(-1, 1, dim)
    return digits + 5 * layer + torch.arange(heads).view(1, -1, 1) + (25 if is_value else 0)


class ArenaMachine(RuleBasedStateMachine):
    @initialize(max_rows=st.sampled_from([12, 40, 90]), initial_rows=st.sampled_from([1, 7, 1000]))
    def start(self, max_rows: int, initial_rows: int) -> None:
        self.arena = KVArena(LAYERS, max_rows=max_rows, initial_rows=initial_rows)
        self.shadow: dict[int, list[int]] = {}
        self.next_key = 0
        self.next_stamp = 1

    # --- what may happen -------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.shadow) < 6)
    @rule()
    def open(self) -> None:
        self.arena.open(self.next_key)
        self.shadow[self.next_key] = []
        self.next_key += 1

    @precondition(lambda self: self.shadow)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Reserve for several sequences, write, and commit, or give the step up."""
        keys = data.draw(st.lists(st.sampled_from(sorted(self.shadow)), min_size=1, unique=True))
        pending = [data.draw(st.integers(1, 8)) for _ in keys]
        trees = [self._tree(data) for _ in keys]
        if not self._reserve(data, keys, pending, [len(tree) for tree in trees]):
            trees = [[] for _ in keys]  # as the engine does: again without drafts
            if not self._reserve(data, keys, pending, [0 for _ in keys]):
                return
        if data.draw(st.integers(0, 5)) == 0:
            self.arena.compact()
        written = [self._write(key, count + len(tree)) for key, count, tree in zip(keys, pending, trees, strict=True)]
        self.arena.check()
        outcome = data.draw(st.sampled_from(["verdicts", "verdicts", "verdicts", "prefill", "failure"]))
        if outcome == "failure":
            for key in keys:
                self.arena.release(key)
            return
        paths = [self._path(data, tree) if outcome == "verdicts" else [] for tree in trees]
        verdicts: Verdicts | None = None
        if outcome == "verdicts":
            verdicts = verdicts_of(paths, [[7] * (len(path) + 1) for path in paths])
        self.arena.commit(keys, pending, verdicts)
        for key, count, path, stamps in zip(keys, pending, paths, written, strict=True):
            self.shadow[key] += stamps[:count] + [stamps[count + node] for node in path]

    @precondition(lambda self: 0 < len(self.shadow) < 6)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.shadow)))
        self.arena.fork(key, self.next_key)
        self.shadow[self.next_key] = list(self.shadow[key])
        self.next_key += 1

    @precondition(lambda self: self.shadow)
    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.shadow)))
        self.arena.reset(key)
        self.shadow[key] = []

    @precondition(lambda self: self.shadow)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.shadow)))
        self.arena.free(key)
        del self.shadow[key]

    @rule()
    def compact(self) -> None:
        self.arena.compact()
        assert self.arena.num_free == self.arena.capacity - self._rows_used()

    # --- what must hold --------------------------------------------------------------------------------------------

    @invariant()
    def audit(self) -> None:
        if not hasattr(self, "arena"):
            return
        self.arena.check()
        assert self.arena.num_used == self._rows_used()
        assert self.arena.num_available == self.arena.max_rows - self._rows_used()
        for key, stamps in self.shadow.items():
            segments = self.arena.segments(key)
            assert all(length > 0 for _, length in segments)
            assert self.arena.cached_length(key) == sum(length for _, length in segments) == len(stamps)
            rows = [row for start, length in segments for row in range(start, start + length)]
            for index, layer in enumerate(LAYERS):
                keys, values = self.arena.layer(index)
                expected_keys = content(stamps, index, layer.key_heads, layer.key_dim, False)
                expected_values = content(stamps, index, layer.value_heads, layer.value_dim, True)
                assert torch.equal(keys[rows], expected_keys.to(layer.dtype)), (key, index)
                assert torch.equal(values[rows], expected_values.to(layer.dtype)), (key, index)

    # --- parts -----------------------------------------------------------------------------------------------------

    def _rows_used(self) -> int:
        return len(
            {stamp for stamps in self.shadow.values() for stamp in stamps}
        )  # forks share stamps as they share rows

    def _tree(self, data: st.DataObject) -> list[int]:
        size = data.draw(st.sampled_from([0, 1, 3, 6, 9]))
        return [data.draw(st.integers(-1, node - 1)) for node in range(size)]

    def _path(self, data: st.DataObject, parents: list[int]) -> list[int]:
        path: list[int] = []
        while children := [n for n in range(len(parents)) if parents[n] == (path[-1] if path else -1)]:
            choice = data.draw(st.sampled_from([*children, None]))
            if choice is None:
                break
            path.append(choice)
        return path

    def _reserve(self, data: st.DataObject, keys: list[int], pending: list[int], sizes: list[int]) -> bool:
        promised = 0
        for key, count, size in zip(keys, pending, sizes, strict=True):
            free = self.arena.max_rows - self._rows_used() - promised
            wish = data.draw(st.sampled_from([0, 0, 5, 30, 1000]))
            if count + size > free:
                with pytest.raises(ArenaFullError) as caught:
                    self.arena.prepare(key, count + size, wish)
                error = caught.value
                assert (error.needed, error.free, error.capacity) == (count + size, free, self.arena.max_rows)
                for other in keys:
                    self.arena.release(other)
                self.audit()
                return False
            self.arena.prepare(key, count + size, wish)
            promised += count + size
        return True

    def _write(self, key: int, count: int) -> list[int]:
        stamps = list(range(self.next_stamp, self.next_stamp + count))
        self.next_stamp += count
        rows = slice(self.arena.write_start(key), self.arena.write_start(key) + count)
        for index, layer in enumerate(LAYERS):
            keys, values = self.arena.layer(index)
            keys[rows] = content(stamps, index, layer.key_heads, layer.key_dim, False).to(layer.dtype)
            values[rows] = content(stamps, index, layer.value_heads, layer.value_dim, True).to(layer.dtype)
        return stamps


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("alone", [False, True])
def test_a_sequence_may_take_every_row(alone: bool) -> None:
    """It grows where it stands, pushing its neighbours aside; no second extent is needed to move into."""
    arena = KVArena(LAYERS, max_rows=40, initial_rows=8)
    for key in range(3):
        arena.open(key)
        arena.prepare(key, 5)
        arena.commit([key], [5], None)
    if alone:
        arena.free(0)
        arena.free(2)
    rest = 40 - arena.num_used
    for _ in range(rest):
        arena.prepare(1, 1)
        arena.commit([1], [1], None)
        arena.check()
    assert arena.cached_length(1) == 5 + rest
    with pytest.raises(ArenaFullError, match=r"1 rows .* needed, 0 of 40 free"):
        arena.prepare(1, 1)
