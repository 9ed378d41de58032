from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from datafiles import data_path
from drafting import committed
from outpace.draft import Signals, build_drafter
from outpace.draft.candidates import _MOST_ROWS
from outpace.draft.recycling import ESTIMATES, RecyclingDrafter
from outpace.draft.shapes import find_shape
from outpace.errors import ConfigError, InputError, LifecycleError, UnknownNameError
from outpace.tree import DraftTrees, Origin

CAP = np.array([1000], np.int32)
Rows = Sequence[tuple[int, Sequence[int]]]  # token and its candidates


def signals(*sequences: Rows) -> Signals:
    """What a pass would show: for each sequence its rows, as (input token, best next tokens)."""
    rows = [row for sequence in sequences for row in sequence]
    offsets = np.cumsum([0, *map(len, sequences)]).astype(np.int32)
    width = max((len(top) for _, top in rows), default=8)
    top = np.array([top for _, top in rows], np.int32).reshape(-1, width)
    return Signals(offsets, np.zeros(len(sequences), np.int32), np.array([t for t, _ in rows], np.int32), top, {})


def recycling(spec: str = "recycling") -> RecyclingDrafter:
    drafter = build_drafter(spec)
    assert isinstance(drafter, RecyclingDrafter)
    return drafter


def show(drafter: RecyclingDrafter, key: int, rows: Rows, tokens: Sequence[int] = ()) -> None:
    drafter.observe([key], committed([tokens]), signals(rows))


def tree_of(drafter: RecyclingDrafter, key: int, cap: int = 1000) -> DraftTrees:
    return drafter.propose([key], np.array([cap], np.int32)).validate()


def paths_of(trees: DraftTrees) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(trees.tokens.tolist(), trees.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@pytest.mark.data
def test_shapes_are_the_published_ones() -> None:
    published = json.loads(data_path("trees.json").read_text())
    for name, tree in (
        ("token-recycling", "token-recycling/2.2.2"),
        ("sam-decoding", "sam-decoding/default_tree_6_60"),
    ):
        assert find_shape(name).paths() == [tuple(path) for path in published[tree]]


@pytest.mark.parametrize(("size", "name", "depth"), [(80, "token-recycling", 6), (60, "sam-decoding", 5)])
def test_shapes_are_well_formed(size: int, name: str, depth: int) -> None:
    shape = find_shape(size)
    paths = shape.paths()
    assert (len(shape), shape.name, max(map(len, paths))) == (size, name, depth)
    assert paths == sorted(paths, key=lambda path: (len(path), path))
    assert shape.depths.tolist() == [len(path) for path in paths]
    assert len(set(paths)) == size
    assert all(path[:-1] in {(), *paths} and max(path) < 8 for path in paths)


def test_the_tree_follows_the_candidates() -> None:
    drafter = recycling()
    drafter.open(0, np.array([3, 5], np.int32))
    assert tree_of(drafter, 0).num_nodes == 0  # nothing was seen yet
    show(drafter, 0, [(5, [7, 2, 9, 11, 12, 13, 14, 15]), (7, [9, 1, 20, 21, 22, 23, 24, 25])])
    trees = tree_of(drafter, 0)
    assert paths_of(trees) == [(t,) for t in (7, 2, 9, 11, 12, 13, 14, 15)] + [
        (7, t) for t in (9, 1, 20, 21, 22, 23, 24, 25)
    ]
    assert set(trees.origins.tolist()) == {int(Origin.RECYCLING)}
    assert (np.diff(trees.log_probs[:8]) < 0).all()
    assert paths_of(tree_of(drafter, 0, cap=3)) == [(7,), (2,), (7, 9)]
    show(drafter, 0, [(5, [8] * 8), (7, [1, 0, 2, 3, 4, 5, 6, 7])], [2, 7])  # the latest candidates count, each once
    assert paths_of(tree_of(drafter, 0))[:9] == [(t,) for t in (1, 0, 2, 3, 4, 5, 6, 7)] + [(5, 8)]


def test_later_rows_of_a_token_overwrite_earlier_ones() -> None:
    drafter = recycling()
    drafter.open(0, np.array([5], np.int32))
    show(drafter, 0, [(5, [1, 2, 3, 4]), (5, [6, 7, 8, 9])])  # four candidates only, as from a tiny vocabulary
    assert paths_of(tree_of(drafter, 0))[:4] == [(6,), (7,), (8,), (9,)]
    assert tree_of(drafter, 0).num_nodes == 4


def test_namespaces_do_not_mix_and_the_oldest_is_dropped() -> None:
    drafter = recycling("recycling(namespaces=2)")
    for key, name in enumerate(("a", "b", "c")):
        drafter.open(key, np.array([5], np.int32), name)
        show(drafter, key, [(5, [key] * 8)])
    for key in range(3):  # all are open, so none is dropped
        assert tree_of(drafter, key).tokens.tolist() == [key]
    assert [len(t) for t in (drafter.matrices.namespaces, drafter.matrices.rows)] == [3, 3]
    for key in (1, 2, 0):
        drafter.close(key)
    drafter.open(9, np.array([5], np.int32), "b")  # used again: "a" is the oldest now
    drafter.open(10, np.array([5], np.int32), "d")
    assert drafter.matrices.namespaces == ["b", "d"]  # no more than two, now that others are closed
    assert tree_of(drafter, 10).num_nodes == 0
    assert tree_of(drafter, 9).tokens.tolist() == [1]
    drafter.open(11, np.array([5], np.int32), "a")
    assert tree_of(drafter, 11).num_nodes == 0
    assert len(drafter.matrices.rows) == 3


def test_forks_share_the_candidates_and_hold_their_namespace() -> None:
    drafter = recycling("recycling(namespaces=1)")
    drafter.open(0, np.array([5], np.int32), "a")
    drafter.fork(0, 1)
    drafter.close(0)
    show(drafter, 1, [(5, [4] * 8), (6, [3] * 8)], [6])
    drafter.open(2, np.array([5], np.int32), "b")
    assert tree_of(drafter, 1).tokens.tolist() == [3]
    drafter.open(3, np.array([5], np.int32), "a")
    assert tree_of(drafter, 3).tokens.tolist() == [4]


def test_large_ids_grow_the_matrix_and_absurd_ones_are_left_out() -> None:
    drafter = recycling()
    drafter.open(0, np.array([5], np.int32))
    drafter.open(1, np.array([5], np.int32), "other")
    show(drafter, 0, [(5, [99_999, 2**31 - 2, 3])])
    show(drafter, 1, [(5, [1, 2, 3])])
    show(drafter, 0, [(99_999, [5, 4, 3]), (2**31 - 2, [7, 8, 9])])
    assert paths_of(tree_of(drafter, 0))[:6] == [(99_999,), (2**31 - 2,), (3,), (99_999, 5), (99_999, 4), (99_999, 3)]
    assert tree_of(drafter, 1).tokens.tolist() == [1, 2, 3]
    assert drafter.matrices.rows.shape[1] < 130_000
    assert drafter.matrices.nbytes == 2 * drafter.matrices.rows.shape[1] * 33


def test_without_signals_nothing_is_drafted() -> None:
    drafter = recycling()
    drafter.open(0, np.zeros(0, np.int32))
    assert drafter.propose([0], CAP).num_nodes == 0
    drafter.observe([0], committed([[4]]))
    assert drafter.propose([0], CAP).num_nodes == 0
    assert drafter.propose([], np.zeros(0, np.int32)).batch_size == 0


def test_misuse_raises() -> None:
    drafter = recycling()
    drafter.open(1, np.array([1], np.int32))
    with pytest.raises(LifecycleError, match="already open"):
        drafter.open(1, np.array([1], np.int32))
    for call in (lambda: drafter.close(2), lambda: drafter.fork(2, 3), lambda: drafter.propose([2], CAP)):
        with pytest.raises(LifecycleError, match="sequence 2 is not open"):
            call()
    with pytest.raises(LifecycleError, match="already open"):
        drafter.fork(1, 1)
    with pytest.raises(LifecycleError, match="sequence 2 is not open"):
        drafter.observe([2], committed([[1]]))
    drafter.close(1)


@pytest.mark.parametrize("tree", ["81", "medusa", "60.5", "true"])
def test_unknown_shapes(tree: str) -> None:
    with pytest.raises(ConfigError, match=r"recycling: .*tree shape"):
        build_drafter(f"recycling(tree={tree})")
    with pytest.raises(UnknownNameError, match="known: 60, 80, sam-decoding, token-recycling"):
        build_drafter("recycling(mesh)")
    assert recycling("recycling(sam-decoding)").shape.name == recycling("recycling(60)").shape.name == "sam-decoding"


def taught() -> RecyclingDrafter:
    drafter = recycling()
    drafter.open(0, np.array([5], np.int32), "a")
    show(drafter, 0, [(5, [7, 2, 8]), (5, [7, 2, 9]), (7000, [9, 1, 2**31 - 2]), (7, [1, 2, 3])])
    return drafter


def test_saved_candidates_come_back(tmp_path: Path) -> None:
    path = tmp_path / "candidates.npz"
    drafter = taught()
    drafter.save(path, "a", fingerprint="llama")
    other = recycling()
    other.open(4, np.array([5], np.int32), "b")
    show(other, 4, [(5, [4, 4, 4]), (6, [1, 1, 1])], [6])
    other.load(path, "b", fingerprint="llama")
    assert tree_of(other, 4).num_nodes == 0  # what was learned before is gone
    show(other, 4, [], [5])
    assert paths_of(tree_of(other, 4)) == paths_of(tree_of(drafter, 0))
    assert tree_of(other, 4).log_probs.tolist() == tree_of(drafter, 0).log_probs.tolist()
    assert tree_of(drafter, 0).num_nodes == 6
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    other.load(path, "c")  # without a fingerprint nothing is compared
    with pytest.raises(InputError, match="another tokenizer: expected mistral, found llama"):
        other.load(path, "b", fingerprint="mistral")
    with pytest.raises(ConfigError, match=r"namespace 'z' to save \(known: \['b', 'c'\]\)"):
        other.save(path, "z")
    recycling().load(path)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "candidates.npz"
    taught().save(path, "a")
    before = path.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(OSError, match="No space left"):
        taught().save(path, "a")
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_bad_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "candidates.npz"
    good = {
        "format": np.int64(1),
        "fingerprint": np.array(""),
        "tokens": np.array([3, 9], np.int32),
        "candidates": np.arange(16, dtype=np.int32).reshape(2, 8),
        "repeats": np.array([0, 255], np.uint8),
    }
    bad = {
        "format 1 expected, found 7": {"format": np.int64(7)},
        "8 candidates for each of 2": {"candidates": np.arange(8, dtype=np.int32).reshape(1, 8)},
        "token ids must rise": {"tokens": np.array([9, 3], np.int32)},
        "token ids must rise, ": {"tokens": np.array([-1, 3], np.int32)},
        "token ids must rise, from 0": {"tokens": np.array([3, _MOST_ROWS], np.int32)},
        "1-D int32 expected, found 1-D int64": {"tokens": np.array([3, 9])},
        "repeats: 2 expected, found 1": {"repeats": np.zeros(1, np.uint8)},
        "must be different ids": {"candidates": np.zeros((2, 8), np.int32)},
        "must be different ids$": {"candidates": np.arange(16, dtype=np.int32).reshape(2, 8) - 5},
    }
    drafter = taught()
    before = paths_of(tree_of(drafter, 0))
    for problem, change in bad.items():
        np.savez(path, **{**good, **change})
        with pytest.raises(InputError, match=f"candidates.npz: .*{problem}"):
            drafter.load(path, "a")
    for missing in good:
        np.savez(path, **{name: value for name, value in good.items() if name != missing})
        with pytest.raises(InputError, match=missing):
            drafter.load(path, "a")
    np.save(tmp_path / "one.npy", np.zeros(3))
    for name in ("one.npy", "absent.npz", "text", "empty"):
        (tmp_path / "text").write_text("no archive")
        (tmp_path / "empty").write_bytes(b"")
        with pytest.raises(InputError, match=name):
            drafter.load(tmp_path / name, "a")
    assert paths_of(tree_of(drafter, 0)) == before


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "candidates.npz"
    taught().save(path, "a")
    whole = path.read_bytes()
    refused = 0
    for at in range(0, len(whole), 7):
        for content in (whole[:at], whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :]):
            path.write_bytes(content)
            drafter = taught()
            before = paths_of(tree_of(drafter, 0))
            try:
                drafter.load(path, "a")
            except InputError:
                refused += 1
            assert paths_of(tree_of(drafter, 0)) == before  # a flipped bit of a date, for instance, changes nothing
    assert refused > len(whole) // 7


def test_a_candidate_that_comes_again_is_trusted_more() -> None:
    drafter = recycling()
    drafter.open(0, np.array([5], np.int32))
    best = []
    for second in range(300):
        show(drafter, 0, [(5, [7, 100 + second, 9])])
        best.append(float(tree_of(drafter, 0).log_probs[0]))
    assert best == sorted(best)
    assert np.exp(best[0]) < 0.4
    assert np.exp(best[-1]) > 0.9
    show(drafter, 0, [(5, [9, 7, 2])])
    assert tree_of(drafter, 0).log_probs[0] == best[0]
    assert (np.exp(ESTIMATES).sum(1) < 1).all()
