from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from frozentwin import Twin, compare, compare_text, compare_walk, frozen
from outpace._compile import compiled
from outpace.errors import CorpusError, InputError
from outpace.suffix import FrozenAutomaton, GrowingAutomaton, freeze
from outpace.suffix import image as layout
from outpace.suffix.frozen import continuations, count_of, endpos_of, next_of, step_frozen
from suffixtwin import ADVERSARIAL, de_bruijn, fibonacci_word

_RNG = np.random.default_rng(5)
CORPORA: dict[str, list[list[int]]] = {
    "fibonacci words": [fibonacci_word(n) for n in (34, 21, 30)],
    "de bruijn": [de_bruijn(2, 4), de_bruijn(3, 2), de_bruijn(2, 5)],
    "all equal": [[7] * n for n in (12, 1, 20, 12)],
    "binary": _RNG.integers(0, 2, (3, 25)).tolist(),
    "alphabet of 200,000": _RNG.integers(0, 200_000, (3, 30)).tolist(),
    "ids around 16 bits": _RNG.integers(65_532, 65_538, (3, 20)).tolist(),
    "many tiny documents": [_RNG.integers(0, 3, n).tolist() for n in _RNG.integers(0, 4, 100)],
    "equal documents": [[3, 1, 4, 1, 5, 9, 2, 6]] * 6,
    "documents of one token": [[int(t)] for t in _RNG.integers(0, 5, 40)],
    "one token": [[4]],
    "two tokens": [[4, 5]],
    "prefixes and suffixes of one": [fibonacci_word(20)[i:j] for i, j in ((0, 20), (0, 9), (5, 20), (7, 8), (3, 17))],
    "one state with many edges": [[0, t] for t in range(1, 150)] + [[0, t] for t in range(1, 150, 3)] + [[9, 0]],
}


@pytest.mark.parametrize("name", CORPORA)
def test_every_query_equals_brute_force(name: str) -> None:
    automaton, twin = frozen(CORPORA[name]), Twin(CORPORA[name])
    automaton.check()
    strings = sorted(twin.ends, key=len)
    compare(automaton, twin, [(), *strings[:150], *strings[-20:]])
    compare_text(automaton, twin)
    for other in ([7, 7, 7, 0, 1, 0, 0, 1], [t for d in twin.documents[::-1] for t in d][:150], [0, 5, 0, 149, 0, 200]):
        compare_walk(automaton, twin, other)


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_texts_alone_and_twice(name: str) -> None:
    text = ADVERSARIAL[name]
    for documents in ([text], [text, text[5:], text[:9]]):
        automaton, twin = frozen(documents), Twin(documents)
        automaton.check()
        strings = sorted(twin.ends, key=len)
        compare(automaton, twin, [(), *strings[:40], *strings[40 :: max(1, len(strings) // 40)]])
        compare_walk(automaton, twin, text[10:] + text[:20])


def test_worked_example() -> None:
    automaton = frozen([[7, 8, 9, 7, 8], [7, 8]])
    image = automaton.image
    seven, seven_eight = automaton.match([7])[0], automaton.match([7, 8])[0]
    assert count_of(image, seven) == count_of(image, seven_eight) == 3
    assert (seven_eight, endpos_of(image, seven_eight)) == (seven + 1, 2)
    assert automaton.match([7, 8, 9]) == (-4, 3)
    out = np.zeros((3, 4), np.int32)
    assert continuations(image, seven_eight, 4, *out) == 1
    assert out[:, 0].tolist() == [9, 1, -4]
    assert not any(next_of(image, -9, token)[0] for token in (7, 8, 9))  # the end of the last document


def test_agrees_with_the_growing_automaton_on_a_longer_text() -> None:
    rng = np.random.default_rng(6)
    text = np.minimum(rng.zipf(1.3, 20_000), 3000).astype(np.int32)
    automaton, growing = frozen([text.tolist()]), GrowingAutomaton(text)
    assert (
        automaton.image[automaton.image[layout.STATES_BEGIN] + layout.EDGES] <= layout.INDEXED
    )  # the root's list has an index
    state, length, other = 0, 0, (0, 0)
    for token in np.minimum(rng.zipf(1.3, 3000), 3300).tolist():
        state, length = automaton.transfer(state, length, token)
        other = growing.transfer(*other, token)
        assert length == other[1]
        assert endpos_of(automaton.image, state) - 1 == growing.min_endpos(other[0]) or length == 0
    automaton.check()


def test_empty_documents_are_left_out() -> None:
    automaton = frozen([[], [1, 2], [], [], [3], []])
    assert [d.tolist() for d in automaton.documents()] == [[1, 2], [3]]
    assert automaton.num_documents == 2
    assert automaton.document(1).tolist() == [3]
    for index in (-1, 2):
        with pytest.raises(IndexError, match="of 2"):
            automaton.document(index)


def test_more_states_than_the_first_guess_has_room_for() -> None:
    # Block after block: 2 states a token, where a growing block begins with room for 1.5.
    documents = [[2 * i + 1] + [2 * i] * 63 for i in range(64)]
    automaton = frozen(documents)
    automaton.check()
    assert [d.tolist() for d in automaton.documents()] == documents


def test_room_runs_out_at_every_place(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [d for d in CORPORA["many tiny documents"] if d] + [fibonacci_word(70), [1] + [2] * 80, [5], [6]]
    expected = frozen(documents).image
    new_block = freeze.growing.new_block
    monkeypatch.setattr(freeze.growing, "new_block", lambda capacity: new_block(1))
    assert np.array_equal(frozen(documents).image, expected)


def test_tokens_and_offsets_need_no_special_types() -> None:
    automaton = FrozenAutomaton.build(np.arange(9)[::2], np.array([0, 2, 5], np.int32))  # type: ignore[arg-type]
    assert [d.tolist() for d in automaton.documents()] == [[0, 2], [4, 6, 8]]


@pytest.mark.parametrize(
    ("tokens", "offsets", "message"),
    [
        ([], [0], "no token"),
        ([], [0, 0, 0], "no token.*2 documents, all empty"),
        ([1, 2, -5, 3], [0, 0, 2, 4], "document 2: .*at least 0, found -5"),
        ([1, -1], [0, 2], "document 0: .*found -1"),
        ([1, 2], [0, 1], "2 tokens"),
        ([1, 2], [1, 2], "from 0"),
        ([1, 2], [], "from 0"),
        ([1, 2, 3], [0, 3, 1, 3], r"document 1 has \[3, 1\]"),
    ],
)
def test_input_that_cannot_be_used(tokens: list[int], offsets: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FrozenAutomaton.build(np.array(tokens, np.int32), np.array(offsets, np.int64))


def test_too_many_tokens_are_refused_before_any_work() -> None:
    tokens = np.broadcast_to(np.int32(1), 2**29)
    with pytest.raises(InputError, match=r"at most 536870912 tokens.*split"):
        freeze._check_input(tokens, np.array([0, 2**29]))


def test_image_that_would_be_too_large_is_refused() -> None:
    block = GrowingAutomaton([1, 2]).block
    with pytest.raises(InputError, match="split"):
        freeze._empty_image(block, 1, 3 * 10**8, 4 * 10**8, 0, 9)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[FrozenAutomaton, Path]:
    automaton = frozen(CORPORA["one state with many edges"])
    automaton.save(tmp_path / "automaton")
    return automaton, tmp_path / "automaton"


def test_round_trip(saved: tuple[FrozenAutomaton, Path]) -> None:
    automaton, path = saved
    again = FrozenAutomaton.open(path)
    assert type(again.image) is np.ndarray
    assert np.array_equal(again.image, automaton.image)
    assert (again.num_tokens, again.num_documents, again.nbytes) == (398 + 2, 200, path.stat().st_size)
    again.check()
    assert again.match([0, 149]) == automaton.match([0, 149])
    assert os.listdir(path.parent) == ["automaton"]
    with pytest.raises(ValueError, match="read-only"):
        again.image[0] = 1


def test_compiled_code_sees_one_type_mapped_or_not(saved: tuple[FrozenAutomaton, Path]) -> None:
    @compiled
    def walk(image: np.ndarray, tokens: np.ndarray) -> int:
        state = length = 0
        for token in tokens:
            state, length = step_frozen(image, state, length, token)
        return length

    automaton, path = saved
    tokens = np.array([8, 0, 4], np.int32)
    assert walk(automaton.image, tokens) == walk(FrozenAutomaton.open(path).image, tokens) == 2
    assert len(walk.signatures) == 1  # type: ignore[attr-defined]


def _damaged(path: Path, word: int, value: int) -> Path:
    image = np.fromfile(path, "<i4")
    image[word] = value
    image.tofile(path)
    return path


def test_damaged_files_are_refused(saved: tuple[FrozenAutomaton, Path]) -> None:
    _, path = saved
    whole = path.read_bytes()
    for size in (0, 3, 127, 128, len(whole) - 4, len(whole) - 1, len(whole) // 2):
        path.write_bytes(whole[:size])
        with pytest.raises(CorpusError, match=rf"automaton: {size} bytes"):
            FrozenAutomaton.open(path)
    path.write_bytes(whole + b"more")
    with pytest.raises(CorpusError, match="its header says"):
        FrozenAutomaton.open(path)
    path.write_bytes(whole)
    with pytest.raises(CorpusError, match="not a frozen automaton: begins with 464c457f"):
        FrozenAutomaton.open(_damaged(path, layout.MAGIC_AT, 0x464C457F))
    path.write_bytes(whole)
    with pytest.raises(CorpusError, match=f"format version 9, this program reads {layout.VERSION}"):
        FrozenAutomaton.open(_damaged(path, layout.VERSION_AT, 9))
    for bit in range(2 * 32, 32 * layout.HEADER_SIZE):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(CorpusError, match="header is damaged"):
            FrozenAutomaton.open(path)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="none: cannot be read: No such file"):
        FrozenAutomaton.open(tmp_path / "none")
    with pytest.raises(CorpusError, match="cannot be read"):
        FrozenAutomaton.open(tmp_path)
    with pytest.raises(OSError, match="No such file"):
        frozen([[1]]).save(tmp_path / "no folder" / "file")


def test_full_disk_leaves_what_was_there(saved: tuple[FrozenAutomaton, Path]) -> None:
    _, path = saved
    before = path.read_bytes()
    larger = frozen([_RNG.integers(0, 50, 5000).tolist()])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (larger.nbytes // 2, hard))
    try:
        with pytest.raises(OSError):  # noqa: PT011 - NumPy's words for a short write
            larger.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["automaton"]


def test_crash_before_the_rename_leaves_what_was_there(
    saved: tuple[FrozenAutomaton, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path = saved
    before = path.read_bytes()

    def fails(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="Input/output"):
        frozen([[1, 2]]).save(path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["automaton"]


@pytest.mark.parametrize("largest", [70, 70_000])
@pytest.mark.parametrize("region", ["documents", "text", "links", "states", "edges", "slots"])
def test_audit_finds_every_change(region: str, largest: int) -> None:
    # Every word counts: a change of any one of them is found.
    documents = [[0, t] for t in range(1, 40)] + [[5, 0, 7, 5, 0, 8], [5, 0, 7, 5], [largest]]
    image = frozen(documents).image
    begins = [*image[layout.DOCUMENTS_BEGIN : layout.SLOTS_BEGIN + 1].tolist(), len(image)]
    index = ["documents", "text", "links", "states", "edges", "slots"].index(region)
    assert begins[index] < begins[index + 1]
    for at in range(begins[index], begins[index + 1]):
        for change in (1, -1):
            damaged = image.copy()
            damaged[at] += change
            with pytest.raises((AssertionError, IndexError, KeyError)):
                FrozenAutomaton(damaged).check()


def test_bytes_a_token_on_text_like_numbers() -> None:
    rng = np.random.default_rng(8)
    text = np.minimum(rng.zipf(1.2, 50_000), 30_000).astype(np.int32)
    automaton = FrozenAutomaton.build(text, np.arange(0, 50_001, 100))
    assert automaton.nbytes / 50_000 < 26
