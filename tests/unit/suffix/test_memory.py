from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from outpace.errors import ConfigError, CorpusError, InputError, LifecycleError, OutpaceError, UnknownNameError
from outpace.suffix import memory as module
from outpace.suffix.frozen import FrozenAutomaton
from outpace.suffix.memory import ResponseMemory


def texts_of(memory: ResponseMemory, namespace: str) -> list[list[int]]:
    return [document.tolist() for segment in memory.segments(namespace) for document in segment.documents()]


def test_responses_of_no_and_one_token() -> None:
    memory = ResponseMemory(background=False)
    memory.remember("a", [])
    assert memory.segments("a") == ()
    memory.remember("a", [5])
    memory.remember("a", np.array([6], np.int32))
    assert texts_of(memory, "a") == [[5], [6]]
    assert memory.token_counts == {"a": 2}
    assert memory.segments("b") == ()


def test_a_long_response_keeps_its_end() -> None:
    memory = ResponseMemory(4, background=False)
    memory.remember("a", [1, 2, 3, 4, 5, 6])
    assert texts_of(memory, "a") == [[3, 4, 5, 6]]


def test_the_namespace_used_least_recently_is_dropped() -> None:
    memory = ResponseMemory(background=False, max_namespaces=2)
    memory.remember("a", [1])
    memory.remember("b", [2])
    memory.segments("a")
    memory.remember("c", [3])
    assert list(memory.token_counts) == ["a", "c"]
    assert memory.segments("b") == ()


def test_an_empty_response_leaves_nothing() -> None:
    memory = ResponseMemory(background=False, max_namespaces=2)
    memory.remember("a", [1])
    memory.remember("b", [2])
    memory.remember("c", [])
    memory.remember("a", [])
    assert memory.token_counts == {"b": 1, "a": 1}


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        (np.array([2**32 + 5, 7], np.int64), "found 4294967301"),
        ([2**31], "found 2147483648"),
        ([2**40, -3], "found -3"),
        ([2**70], "must be integers .*, found object"),
        ([1.5], "must be integers .*, found float64"),
    ],
)
def test_ids_that_are_none_are_refused(tokens: list[int], problem: str) -> None:
    memory = ResponseMemory(background=False)
    with pytest.raises(InputError, match=problem):
        memory.remember("a", tokens)
    assert memory.token_counts == {}
    memory.remember("a", np.array([0, 2**31 - 1], np.uint64))
    assert texts_of(memory, "a") == [[0, 2**31 - 1]]
    assert memory.largest_token() == 2**31 - 1


def test_the_largest_token_of_what_is_built_and_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = ResponseMemory(background=False)
    assert memory.largest_token() == -1
    for largest in (0, 65_534, 65_535, 70_000):
        memory.remember(str(largest), [0, largest, 0])
        assert memory.largest_token() == largest
    monkeypatch.setattr(memory, "_build_all", lambda: None)
    memory.remember("a", [80_000])
    assert memory.largest_token() == 80_000


def test_closing_while_a_thread_looks_for_work() -> None:
    memory = ResponseMemory(background=False)
    memory.remember("a", [1])
    memory.close()
    memory._build_all()
    for _ in range(200):
        memory = ResponseMemory()  # an exception in its thread fails the test
        memory.remember("a", [1, 2, 3])
        memory.close()


def test_misuse() -> None:
    memory = ResponseMemory()
    with pytest.raises(InputError, match="found -2"):
        memory.remember("a", [1, -2])
    memory.remember("a", [1])
    memory.close()
    memory.close()
    for call in (lambda: memory.remember("a", [1]), lambda: memory.segments("a"), memory.flush):
        with pytest.raises(LifecycleError, match="closed"):
            call()
    for values in ({"max_tokens": 0}, {"max_tokens": True}, {"max_namespaces": 0}):
        with pytest.raises(ConfigError, match="at least 1"):
            ResponseMemory(**values)


@pytest.mark.parametrize("background", [True, False])
def test_what_fails_while_building_comes_to_light_once(monkeypatch: pytest.MonkeyPatch, background: bool) -> None:
    memory = ResponseMemory(background=background)
    memory.remember("a", [1, 2])
    memory.flush()
    right = module.built

    def wrong(_texts: object) -> tuple[FrozenAutomaton, ...]:
        raise MemoryError("no room")

    monkeypatch.setattr(module, "built", wrong)
    with pytest.raises(OutpaceError, match="MemoryError: no room"):  # noqa: PT012 (background: at the latest in flush)
        memory.remember("a", [3, 4])
        memory.flush()
    monkeypatch.setattr(module, "built", right)
    memory.remember("a", [5])
    memory.flush()
    assert texts_of(memory, "a") == [[1, 2], [5]]
    assert memory.token_counts == {"a": 3}


def test_failing_to_drop_what_is_stale_does_not_fail_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = ResponseMemory(8, background=False)
    memory.remember("a", [1, 2, 3])
    memory.remember("a", [4, 5, 6])
    with monkeypatch.context() as patch:
        patch.setattr(module, "built", lambda texts: 1 / 0)
        with pytest.raises(OutpaceError, match="ZeroDivisionError"):
            memory.remember("a", [7, 8, 9])
    memory.remember("a", [10, 11])
    assert sum(map(len, texts_of(memory, "a"))) == memory.token_counts["a"]
    assert texts_of(memory, "a")[-1] == [10, 11]


def test_readers_see_whole_states_while_segments_merge() -> None:
    memory = ResponseMemory(3000)
    problems: list[str] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            found = texts_of(memory, "a")
            numbers = [text[0] for text in found]
            if numbers != list(range(numbers[0], numbers[0] + len(numbers))) if numbers else False:
                problems.append(f"a gap in {numbers}")
            if any(text != [text[0], 7, 8, text[0] % 3] for text in found):
                problems.append("a text was changed")
            if texts_of(memory, "b"):
                problems.append("text of another namespace")

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(1500):
        memory.remember("a", [number, 7, 8, number % 3])
    memory.flush()
    done.set()
    for reader in readers:
        reader.join()
    assert not problems
    assert memory.token_counts["a"] <= 3000
    for segment in memory.segments("a"):
        segment.check()


def test_several_threads_remember() -> None:
    memory = ResponseMemory()
    threads = [
        threading.Thread(target=lambda name=name: [memory.remember(name, [i, i]) for i in range(200)])
        for name in "abcd"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    memory.flush()
    assert all(texts_of(memory, name) == [[i, i] for i in range(200)] for name in "abcd")


def test_several_threads_remember_and_build() -> None:
    memory = ResponseMemory(background=False)

    def remember() -> None:
        for number in range(100):
            memory.remember("a", [number, number])

    threads = [threading.Thread(target=remember) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts_of(memory, "a")) == sorted([i, i] for i in range(100) for _ in range(4))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_goes_on_alone() -> None:
    memory = ResponseMemory()
    for number in range(50):
        memory.remember("a", np.full(200, number, np.int32))

    def child(queue: multiprocessing.queues.Queue[int]) -> None:  # type: ignore[name-defined]
        memory.remember("a", [7, 7])
        memory.flush()
        queue.put(sum(segment.num_tokens for segment in memory.segments("a")))

    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    assert queue.get(timeout=120) == 50 * 200 + 2
    process.join(30)
    assert process.exitcode == 0
    memory.flush()
    assert memory.token_counts["a"] == 50 * 200


def test_the_interpreter_ends_while_segments_are_built() -> None:
    script = (
        "import numpy as np\nfrom outpace.suffix.memory import ResponseMemory\n"
        "memory = ResponseMemory()\n"
        "for i in range(20): memory.remember('a', np.arange(20000) % (i + 3))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_saved_when_the_exit_has_begun_is_built_by_the_caller(tmp_path: Path) -> None:
    script = (
        "import atexit, sys\n"
        "def save():\n    memory.remember('b', [1, 2])\n    memory.save(sys.argv[1])\n"
        "atexit.register(save)\n"
        "from outpace.suffix.memory import ResponseMemory\n"
        "memory = ResponseMemory()\nmemory.remember('a', [1, 2, 3])\n"
    )
    arguments = [sys.executable, "-c", script, str(tmp_path / "kept")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    memory = ResponseMemory()
    memory.load(tmp_path / "kept")
    assert (texts_of(memory, "a"), texts_of(memory, "b")) == ([[1, 2, 3]], [[1, 2]])


# --- on disk ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    memory = ResponseMemory(background=False, fingerprint="f" * 64)
    for number in range(5):
        memory.remember("a", np.arange(300 * (5 - number), dtype=np.int32) + number)
    memory.remember("b", [1, 2, 3])
    memory.save(tmp_path / "kept")
    return tmp_path / "kept"


def test_saved_and_loaded(saved: Path) -> None:
    memory = ResponseMemory(background=False, fingerprint="f" * 64)
    memory.remember("a", [9, 9])
    memory.load(saved)
    assert [len(text) for text in texts_of(memory, "a")] == [1500, 1200, 900, 600, 300]
    assert memory.token_counts == {"a": 4500, "b": 3}
    memory.remember("b", [4])
    assert texts_of(memory, "b") == [[1, 2, 3], [4]]
    memory.save(saved)
    again = ResponseMemory(1000)
    again.load(saved, ["a"])
    again.flush()
    assert list(again.token_counts) == ["a"]
    assert [len(text) for text in texts_of(again, "a")] == [600, 300][-len(texts_of(again, "a")) :]
    assert texts_of(memory, "a")  # mapped files that were replaced or removed still serve


def test_saving_again_writes_only_what_is_new(saved: Path) -> None:
    memory = ResponseMemory(background=False)
    memory.load(saved)
    before = {path.name: path.stat().st_mtime_ns for path in saved.glob("*.frozen")}
    memory.remember("c", [5])
    memory.save(saved)
    after = {path.name: path.stat().st_mtime_ns for path in saved.glob("*.frozen")}
    assert before.items() < after.items()
    assert len(after) == len(before) + 1
    assert not list(saved.glob(".*"))


def test_damage_is_found(saved: Path) -> None:
    memory = ResponseMemory(background=False)
    memory.remember("z", [1])
    path = next(saved.glob("*.frozen"))
    content = path.read_bytes()
    manifest = (saved / "manifest.json").read_text()

    def expect(problem: str) -> None:
        with pytest.raises(CorpusError, match=problem):
            memory.load(saved)
        assert memory.token_counts == {"z": 1}

    path.write_bytes(content[:-4])
    expect("bytes, and the manifest says")
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    path.write_bytes(flipped)
    expect("is damaged: its SHA-256")
    path.unlink()
    expect("cannot be read: No such file")
    path.write_bytes(content)
    (saved / "manifest.json").write_text(manifest.replace('"b"', '"x"'))
    expect("its checksum does not fit")
    (saved / "manifest.json").write_text(manifest.replace('"version": 1', '"version": 2'))
    expect("format version 2, this program reads 1")
    (saved / "manifest.json").write_text(manifest[:-9])
    expect("invalid JSON")
    (saved / "manifest.json").write_text(json.dumps({"format": "outpace corpus"}))
    expect("is no memory")
    (saved / "manifest.json").unlink()
    expect("it has no manifest.json")


def test_what_does_not_fit_is_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="fingerprint ffffffffffff, and this one's is gggggggggggg"):
        ResponseMemory(fingerprint="g" * 64).load(saved)
    with pytest.raises(UnknownNameError, match=r"unknown namespace 'tenant'.*known: a, b"):
        ResponseMemory().load(saved, ["tenant"])
    with pytest.raises(CorpusError, match="there is no such folder"):
        ResponseMemory().load(tmp_path / "nowhere")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    memory = ResponseMemory(background=False)
    memory.remember("a", [1])
    with pytest.raises(InputError, match="is not empty, and holds no memory"):
        memory.save(tmp_path / "other")
    with pytest.raises(InputError, match="cannot save a memory"):
        memory.save(tmp_path / "other" / "thesis.txt" / "below")


def test_an_interrupted_save_leaves_what_was_there(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = ResponseMemory(background=False)
    memory.remember("new", [1, 2, 3, 4])

    def full(_automaton: FrozenAutomaton, _path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FrozenAutomaton, "save", full)
    with pytest.raises(InputError, match="No space left on device"):
        memory.save(saved)
    other = ResponseMemory(background=False)
    other.load(saved)
    assert set(other.token_counts) == {"a", "b"}


def test_a_first_save_that_failed_does_not_block_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = ResponseMemory(background=False)
    memory.remember("a", [1, 2, 3, 4])
    memory.remember("b", [5, 6])
    write, calls = FrozenAutomaton.save, []

    def full(automaton: FrozenAutomaton, path: Path) -> None:
        calls.append(path)
        if len(calls) == 2:
            path.with_name(f".{path.name}.77-abcd0123.part").write_bytes(b"half")
            raise OSError(28, "No space left on device")
        write(automaton, path)

    with monkeypatch.context() as patch:
        patch.setattr(FrozenAutomaton, "save", full)
        with pytest.raises(InputError, match="No space left on device"):
            memory.save(tmp_path)
    (tmp_path / ".manifest.json.78-abcd0123.part").write_text("half")
    assert len(list(tmp_path.iterdir())) == 3
    memory.remember("a", [9])
    memory.save(tmp_path)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".frozen", ".frozen", ".json"]
    again = ResponseMemory()
    again.load(tmp_path)
    assert texts_of(again, "a") == [[1, 2, 3, 4], [9]]


def test_a_folder_with_files_of_others_is_refused(tmp_path: Path) -> None:
    for name in ("mine.frozen", ".mine.part"):
        folder = tmp_path / name.strip(".")
        folder.mkdir()
        (folder / name).write_text("mine")
        with pytest.raises(InputError, match="is not empty, and holds no memory"):
            ResponseMemory().save(folder)
        assert (folder / name).read_text() == "mine"


def test_any_name_of_a_namespace_is_saved(tmp_path: Path) -> None:
    memory, again = ResponseMemory(background=False), ResponseMemory()
    names = ["", "\ud800", "\x1f\n", "größer \U0001f600"]
    for name in names:
        memory.remember(name, [1])
    memory.save(tmp_path)
    again.load(tmp_path)
    assert list(again.token_counts) == names


def test_all_files_have_the_mode_that_new_files_have(saved: Path) -> None:
    (saved / "plain").write_text("")
    assert len({path.stat().st_mode for path in saved.iterdir()}) == 1
