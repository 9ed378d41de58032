from __future__ import annotations

import numpy as np
import pytest
import torch

from outpace.errors import ArenaFullError, LifecycleError
from outpace.model import KVArena, LayerKV, available_rows, storage
from outpace.tree import Verdicts
from outpace.verify import verdicts_of

CPU = torch.device("cpu")
LAYER = LayerKV(2, 4, 1, 3, torch.float32, CPU)  # 2 * 4 * 4 + 3 * 4 = 44 bytes a row


@pytest.fixture
def arena() -> KVArena:
    arena = KVArena([LAYER, LAYER], max_rows=16, initial_rows=4)
    arena.open(1)
    return arena


def fill(arena: KVArena, key: int, rows: int) -> None:
    arena.prepare(key, rows)
    arena.commit([key], [rows], None)
    arena.check()


def test_sequences_must_be_open(arena: KVArena) -> None:
    with pytest.raises(LifecycleError, match="sequence 1 is already open"):
        arena.open(1)
    for misuse in (
        lambda: arena.segments(2),
        lambda: arena.cached_length(2),
        lambda: arena.prepare(2, 1),
        lambda: arena.write_start(2),
        lambda: arena.release(2),
        lambda: arena.commit([2], [1], None),
        lambda: arena.fork(2, 3),
        lambda: arena.reset(2),
        lambda: arena.free(2),
    ):
        with pytest.raises(LifecycleError, match="sequence 2 is not open"):
            misuse()
    with pytest.raises(LifecycleError, match="sequence 1 is already open"):
        arena.fork(1, 1)
    arena.free(1)
    with pytest.raises(LifecycleError, match="sequence 1 is not open"):
        arena.free(1)
    arena.open(1)
    arena.check()


def test_only_prepared_rows_are_written_and_kept(arena: KVArena) -> None:
    with pytest.raises(LifecycleError, match="sequence 1 was not prepared"):
        arena.write_start(1)
    with pytest.raises(LifecycleError, match="no extent to commit to"):
        arena.commit([1], [1], None)
    for count in (0, -1):
        with pytest.raises(LifecycleError, match=f"at least one new row, found {count}"):
            arena.prepare(1, count)
    fill(arena, 1, 3)
    with pytest.raises(LifecycleError, match="sequence 1 was not prepared"):
        arena.write_start(1)
    with pytest.raises(LifecycleError, match="0 rows were prepared, 1 are needed"):
        arena.commit([1], [1], None)
    arena.prepare(1, 3)
    arena.release(1)
    with pytest.raises(LifecycleError, match="sequence 1 was not prepared"):
        arena.write_start(1)


def test_a_refused_commit_commits_nothing(arena: KVArena) -> None:
    arena.open(2)
    for key in (1, 2):
        arena.prepare(key, 3)
    with pytest.raises(LifecycleError, match="sequence 2: 3 rows were prepared, 4 are needed"):
        arena.commit([1, 2], [1, 1], verdicts_of([[1], [2]], [[7, 8], [7, 8]]))
    assert (arena.cached_length(1), arena.cached_length(2)) == (0, 0)
    arena.commit([1, 2], [1, 1], verdicts_of([[1], [1]], [[7, 8], [7, 8]]))
    assert (arena.cached_length(1), arena.cached_length(2)) == (2, 2)


def test_a_fork_shares_until_the_last_one_leaves(arena: KVArena) -> None:
    fill(arena, 1, 5)
    arena.fork(1, 2)
    arena.fork(2, 3)
    assert arena.segments(1) == arena.segments(2) == arena.segments(3)
    assert arena.num_used == 5
    fill(arena, 2, 2)
    assert arena.num_used == 7
    assert len(arena.segments(2)) == 2
    arena.free(1)
    arena.reset(3)
    assert arena.num_used == 7
    arena.free(2)
    assert arena.num_used == 0
    assert arena.segments(3) == []
    arena.check()


def test_a_full_arena_says_what_it_would_take(arena: KVArena) -> None:
    fill(arena, 1, 10)
    arena.open(2)
    with pytest.raises(ArenaFullError) as caught:
        arena.prepare(2, 7)
    assert (caught.value.needed, caught.value.free, caught.value.capacity, caught.value.row_bytes) == (7, 6, 16, 88)
    message = str(caught.value)
    assert message.startswith("no room for keys and values: 7 rows (0.6 KiB) needed, 6 of 16 free")
    assert "88 bytes a token" in message
    assert "raise kv_tokens" in message
    assert isinstance(caught.value, MemoryError)
    fill(arena, 2, 6)


def test_a_failed_growth_leaves_the_storage_as_it_was(arena: KVArena, monkeypatch: pytest.MonkeyPatch) -> None:
    arena.prepare(1, 4)
    keys, values = arena.layer(1)
    keys.copy_(torch.arange(32.0).view(4, 2, 4))
    values.copy_(torch.arange(12.0).view(4, 1, 3))
    arena.commit([1], [4], None)
    real = torch.zeros

    def no_memory(shape: tuple[int, ...], **options: object) -> torch.Tensor:
        if shape[-1] == 3:  # keys were had, values are not
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real(shape, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", no_memory)
        with pytest.raises(ArenaFullError, match="can't allocate memory"):
            arena.prepare(1, 1)
    arena.check()
    assert arena.capacity == 4
    fill(arena, 1, 1)
    rows = slice(arena.segments(1)[0][0], arena.segments(1)[0][0] + 4)
    assert torch.equal(arena.layer(1)[0][rows], torch.arange(32.0).view(4, 2, 4))
    assert torch.equal(arena.layer(1)[1][rows], torch.arange(12.0).view(4, 1, 3))


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda arena: setattr(arena._runs[1], "start", 0), "overlaps"),
        (lambda arena: setattr(arena._runs[0], "length", 9), "run at 0: 9 rows of"),
        (lambda arena: setattr(arena._runs[0], "references", 5), "5 references, 2 referrers"),
        (lambda arena: arena._runs.pop(0), "freed run"),
        (lambda arena: arena._entries.pop(3), "1 references, 0 referrers"),
        (lambda arena: setattr(arena._storage, "num_rows", 12), "rows, 12, 16"),
    ],
)
def test_the_audit_finds(spoil: object, problem: str) -> None:
    arena = KVArena([LAYER], max_rows=16, initial_rows=16)
    arena.open(1)
    fill(arena, 1, 5)
    arena.fork(1, 2)
    arena.open(3)
    fill(arena, 3, 8)
    spoil(arena)  # type: ignore[operator]
    with pytest.raises(AssertionError, match=problem):
        arena.check()


def test_memory_is_shared_out_by_the_row() -> None:
    few, many = (available_rows([LAYER] * count) for count in (1, 10))
    assert few > many > 1
    assert np.isclose(few / many, 10, rtol=0.2)  # free memory moves a little meanwhile
    assert available_rows([LAYER], share=1e-15) == 1


def stamped(arena: KVArena, key: int, rows: int, first: int) -> None:
    """Give a sequence rows that hold ``first``, ``first + 1``, ..."""
    arena.prepare(key, rows)
    start = arena.write_start(key)
    for layer in range(len(arena.layers)):
        for tensor in arena.layer(layer):
            tensor[start : start + rows] = torch.arange(first, first + rows).view(-1, 1, 1).to(tensor.dtype)
    arena.commit([key], [rows], None)


def stamps(arena: KVArena, key: int) -> list[int]:
    return [
        int(value) for begin, length in arena.segments(key) for value in arena.layer(0)[0][begin : begin + length, 0, 0]
    ]


def test_rows_move_in_small_blocks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_STAGING_BYTES", 1)  # blocks of 16 rows
    layer = LayerKV(1, 2, 1, 2, torch.float32, torch.device("cpu"))
    arena = KVArena([layer, layer], max_rows=200, initial_rows=200)
    for key, first in ((0, 0), (1, 1000), (2, 2000)):
        arena.open(key)
        stamped(arena, key, 50, first)
    arena.free(0)
    arena.prepare(1, 90)  # no gap is that large: the others slide, and sequence 1 is widened where it stands
    arena.check()
    assert stamps(arena, 1) == list(range(1000, 1050))
    assert stamps(arena, 2) == list(range(2000, 2050))
    assert arena.num_compactions == 1


@pytest.mark.parametrize("operation", ["compact", "commit", "relocate"])
def test_memory_that_ends_while_rows_move_costs_nothing(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LayerKV(1, 2, 1, 2, torch.float32, torch.device("cpu"))
    arena = KVArena([layer], max_rows=64, initial_rows=64)
    for key in range(3):
        arena.open(key)
        stamped(arena, key, 8, 100 * key)
    arena.free(0)
    if operation == "commit":
        arena.prepare(1, 4)
    path = Verdicts(*(np.array(a, np.int32) for a in ([0, 1], [2], [0, 2], [5, 6])))
    attempts = {
        "compact": arena.compact,
        "relocate": lambda: arena.prepare(1, 20),
        "commit": lambda: arena.commit([1], [1], path),
    }
    with monkeypatch.context() as broken:
        broken.setattr(storage.torch, "zeros", fail)
        with pytest.raises(ArenaFullError, match="cannot allocate"):
            attempts[operation]()
    arena.check()
    assert stamps(arena, 1) == list(range(100, 108))
    assert stamps(arena, 2) == list(range(200, 208))
    arena.compact()
    assert stamps(arena, 2) == list(range(200, 208))


def fail(*_: object, **__: object) -> torch.Tensor:
    raise RuntimeError("cannot allocate")
