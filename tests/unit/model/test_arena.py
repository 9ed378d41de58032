from __future__ import annotations

import numpy as np
import pytest
import torch

from outpace.errors import ArenaFullError, LifecycleError
from outpace.model import KVArena, LayerKV, available_rows
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
    assert message.startswith("no room for keys and values: 7 rows (0.0 MiB) needed, 6 of 16 free")
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
        (lambda arena: setattr(arena, "capacity", 12), "rows, 12, 16"),
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
