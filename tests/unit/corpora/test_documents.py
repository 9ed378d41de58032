from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest

from outpace.assets import BUILTIN_MODEL
from outpace.corpora import documents
from outpace.corpora.documents import DocumentReader, Part, Source
from outpace.corpora.records import RecordReader
from outpace.errors import ConfigError, InputError, UnknownNameError
from outpace.suffix.corpus import FORMAT, MANIFEST
from outpace.tokenizers import TextTokenizer


@pytest.fixture(scope="module")
def box() -> TextTokenizer:
    return TextTokenizer.load(BUILTIN_MODEL)


def read(reader: DocumentReader) -> list[str | list[int]]:
    """The documents, the parts of each put together; sources are checked against the files."""
    found: list[str | list[int]] = []
    parts: list[Part] = []
    for event in reader:
        if isinstance(event, Source):
            content = Path(event.path).read_bytes()
            assert (event.bytes, event.sha256) == (len(content), hashlib.sha256(content).hexdigest())
            assert not parts
            continue
        parts.append(event)
        if event.last:
            texts = [part.content for part in parts if isinstance(part.content, str)]
            ids = [token for part in parts if not isinstance(part.content, str) for token in part.content.tolist()]
            found.append(ids if ids or not texts else "".join(texts))
            parts = []
    assert not parts
    return found


def reader(
    box: TextTokenizer, *inputs: Path, form: str = "auto", skip: bool = False, **options: object
) -> DocumentReader:
    return DocumentReader(inputs, form, RecordReader(box, **options), skip)  # type: ignore[arg-type]


def write_lines(path: Path, *records: object) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), "utf-8")
    return path


def test_text_files_are_documents(box: TextTokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo \xc3\xa9")
    (tmp_path / "b").write_bytes(b"")
    own = reader(box, tmp_path / "a.txt", tmp_path / "b", tmp_path / "a.txt")
    assert read(own) == ["one\r\ntwo é", "", "one\r\ntwo é"]
    assert own.bytes_read == own.total_bytes == 28


@pytest.mark.parametrize("text", ["é\n" * 50, "é" * 50, "x" * 7, "日本語\n\n" * 9 + "z", "\n" * 20, "😀" * 30])
def test_long_texts_come_in_pieces(
    box: TextTokenizer, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_PIECE", 8)
    monkeypatch.setattr(documents, "_LONGEST_PIECE", 16)
    path = tmp_path / "long.txt"
    path.write_text(text, "utf-8")
    assert read(reader(box, path)) == [text]
    events = list(reader(box, path))
    assert all(isinstance(event, Source) or len(event.content) <= 24 for event in events)
    lines = write_lines(tmp_path / "long.jsonl", {"text": text}, {"text": "end"})
    assert read(reader(box, lines)) == [text, "end"]


def test_a_folder_is_read_in_order_and_what_is_no_text_counted(box: TextTokenizer, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / ".env").write_text("hidden")
    (tmp_path / "sub" / "c.py").write_text("c")
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "a.md").write_text("a")
    (tmp_path / "picture").write_bytes(b"\x89PNG\xff")
    (tmp_path / "zeros").write_bytes(b"text\0")
    (tmp_path / "half").write_bytes("é".encode()[:1])
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    write_lines(tmp_path / "d.jsonl", {"text": "d"})
    np.save(tmp_path / "e.npy", np.array([5, 6]))
    own = reader(box, tmp_path)
    assert read(own) == ["a", "b", "d", [5, 6], "c"]
    assert own.skipped.unreadable_files == 3
    assert own.skipped.first_unreadable_file == str(tmp_path / "half")
    assert own.bytes_read >= own.total_bytes - 200  # the array's header is not told
    lines = reader(box, tmp_path, form="jsonl")
    assert read(lines) == ["d"]
    assert lines.skipped.unreadable_files == 7


def test_files_in_a_folder_that_cannot_be_used_are_counted(
    box: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "in"
    (folder / "locked").mkdir(parents=True)
    (folder / "a.txt").write_text("a")
    arrays = {
        "b": np.array([0.5]), "c": np.array([[1]]), "d": np.array([box.vocab_size]), "e": np.array([-1]),
        "f": np.array([7])
    }  # fmt: skip
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    (folder / "g.npy").write_bytes(b"no array")
    for name in ("h.txt", "i.jsonl"):
        write_lines(folder / name, {"text": "x"})
    scandir, open_file = os.scandir, Path.open

    def listed(path: str) -> object:
        if Path(path) in locked:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    def opened(path: Path, *arguments: str, **options: str) -> object:
        if path.name in ("h.txt", "i.jsonl"):
            raise PermissionError(13, "Permission denied", str(path))
        return open_file(path, *arguments, **options)  # type: ignore[call-overload]

    locked = {folder / "locked"}
    monkeypatch.setattr(os, "scandir", listed)
    monkeypatch.setattr(Path, "open", opened)
    own = reader(box, folder)
    assert read(own) == ["a", [7]]
    assert own.skipped.unreadable_files == 8
    assert own.skipped.first_unreadable_file == str(folder / "locked")
    assert own.bytes_read >= own.total_bytes - 200
    with pytest.raises(InputError, match=r"cannot read .*h\.txt: Permission denied"):
        read(reader(box, folder / "h.txt"))
    with pytest.raises(InputError, match=r"b\.npy: expected integers in one dimension"):
        read(reader(box, folder / "b.npy"))
    locked.add(folder)
    with pytest.raises(InputError, match=r"cannot read .*in: Permission denied"):
        reader(box, folder)


def test_corpora_in_a_folder_are_left_out(box: TextTokenizer, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    (corpus / "sub").mkdir(parents=True)
    (corpus / "sub" / "notes").write_text("x")
    (corpus / MANIFEST).write_text(json.dumps({"format": FORMAT}))
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / MANIFEST).write_text("{}")
    own = reader(box, tmp_path)
    assert read(own) == ["{}"]
    assert (own.skipped.corpora, own.skipped.unreadable_files) == (1, 0)
    with pytest.raises(InputError, match="is a corpus, which holds no documents"):
        reader(box, corpus)


def test_lines_and_fields(box: TextTokenizer, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", {"text": "one", "q": "Q", "a": "A"}, "", {"text": "", "q": "R", "a": "B"})
    assert read(reader(box, path)) == ["one", ""]
    assert read(reader(box, path, fields=("q", "a"))) == ["Q\nA", "R\nB"]
    assert read(reader(box, path, form="text")) == [path.read_text()]


BAD = {
    '{"text": "x"': "expected a line of JSON",
    '{"other": "x", "b": 1}': "expected a field 'text', found b, other; --field names others",
    "{}": "found no fields",
    '{"text": 5}': "field 'text' must be a string, found 5",
    '["x"]': r"expected a JSON object with a field 'text', found \[\"x\"\]",
    '{"text": "\\ud83d"}': r"half a character \(\\ud83d\) at 0",
    "[" * 100_000: "expected a line of JSON",
}


@pytest.mark.parametrize(("line", "problem"), BAD.items(), ids=range(len(BAD)))
def test_bad_lines_are_named(box: TextTokenizer, tmp_path: Path, line: str, problem: str) -> None:
    path = write_lines(tmp_path / "x.jsonl", {"text": "one"}, "", line, {"text": "two"}, "{")
    with pytest.raises(InputError, match=rf"x\.jsonl:3: .*{problem}.*--skip-bad-lines"):
        read(reader(box, path))
    own = reader(box, path, skip=True)
    assert read(own) == ["one", "two"]
    assert own.skipped.bad_lines == 2
    assert own.skipped.first_bad_line.startswith(f"{path}:3: ")


def test_bytes_that_are_no_text(box: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "one"}\n{"text": "\xff"}\n')
    with pytest.raises(InputError, match=r"x\.jsonl:2: expected UTF-8, found byte 0xff"):
        read(reader(box, path))
    own = reader(box, path, skip=True)
    assert read(own) == ["one"]
    assert own.skipped.bad_lines == 1
    monkeypatch.setattr(documents, "_PIECE", 8)
    text = tmp_path / "x.txt"
    text.write_bytes(b"one\ntwo\nthree\nfour \xe9\nfive\n")
    with pytest.raises(InputError, match=r"x\.txt:4: expected text in UTF-8, found byte 0xe9"):
        read(reader(box, text))


def test_inputs_that_cannot_be_read(box: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"no such file or folder: '.*/nowhere'"):
        reader(box, tmp_path / "nowhere")
    with pytest.raises(UnknownNameError, match="unknown format 'xml'"):
        reader(box, tmp_path, form="xml")
    path = tmp_path / "x.txt"
    path.write_text("x")
    own = reader(box, path)
    path.unlink()
    with pytest.raises(InputError, match=r"cannot read .*x\.txt: No such file"):
        read(own)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_arrays_of_ids(box: TextTokenizer, tmp_path: Path, dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_IDS", 1000)
    path = tmp_path / "x.npy"
    ids = np.arange(4001) % 4096
    np.save(path, ids.astype(dtype))
    assert read(reader(box, path)) == [ids.tolist()]
    np.save(path, np.zeros(0, dtype))
    assert read(reader(box, path)) == [[]]


def test_arrays_that_hold_something_else(box: TextTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    for array, problem in (
        (np.zeros((2, 3), int), r"found shape \[2, 3\]"),
        (np.zeros(3), "dtype float64"),
        (np.array([1, 2, 4096]), r"ids of 'outpace-tiny' are from 0 to 4095, found 4096 at position 2"),
        (np.array([1, -1]), "found -1 at position 1"),
    ):
        np.save(path, array)
        with pytest.raises(InputError, match=rf"x\.npy: .*{problem}"):
            read(reader(box, path))
    path.write_bytes(b"no array")
    with pytest.raises(InputError, match=r"x\.npy is no array"):
        read(reader(box, path))
    np.save(path, np.array([{}]))
    with pytest.raises(InputError, match=r"x\.npy is no array"):
        read(reader(box, path))
    np.save(path, np.arange(1000))
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(InputError, match=r"x\.npy is no array"):
        read(reader(box, path))


def test_lines_of_ids(box: TextTokenizer, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [1, 2], {"ids": [3]}, [])
    assert read(reader(box, path, form="ids")) == [[1, 2], [3], []]
    own = write_lines(tmp_path / "y.jsonl", {"tokens": [4]})
    assert read(reader(box, own, form="ids", fields=("tokens",))) == [[4]]
    for line, problem in (
        ([4096], "from 0 to 4095, found 4096 at position 0"),
        ([1, -5], "found -5 at position 1"),
        ([2**80], "from 0 to 4095"),
        ([1.0], "expected a list of token ids"),
        ([True], "expected a list of token ids"),
        ({"ids": "1 2"}, "expected a list of token ids"),
        ({"text": "x"}, "expected a field 'ids', found text"),
    ):
        write_lines(own, line)
        with pytest.raises(InputError, match=rf"y\.jsonl:1: .*{problem}"):
            read(reader(box, own, form="ids"))


def test_conversations(box: TextTokenizer, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    path = write_lines(tmp_path / "x.jsonl", {"messages": chat, "answer": "Yes", "more": "no"})
    assert read(reader(box, path, chat=True)) == ["<|user|>Hi<|end|><|assistant|>Yes<|end|>"]
    assert read(reader(box, path, chat=True, fields=("answer",))) == ["<|assistant|>Yes<|end|>"]
    assert read(reader(box, path, chat=True, fields=("answer", "more"))) == ["<|assistant|>Yes\nno<|end|>"]
    (tmp_path / "x.txt").write_text("An answer\n")
    (tmp_path / "y.txt").write_text(" \n")
    assert read(reader(box, tmp_path / "x.txt", tmp_path / "y.txt", chat=True)) == ["<|assistant|>An answer<|end|>", ""]
    for value, problem in (
        ([{"role": "user"}], "message 0: expected role and content"),
        (["x"], "message 0: expected role and content"),
        (5, "must be a string or a list of messages, found 5"),
    ):
        bad = write_lines(tmp_path / "y.jsonl", {"messages": value})
        with pytest.raises(InputError, match=rf"y\.jsonl:1: .*{problem}"):
            read(reader(box, bad, chat=True))


def test_templates_that_do_not_fit(box: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lines(tmp_path / "x.jsonl", {"messages": "Yes"})
    with monkeypatch.context() as patch:
        patch.setattr(box._loaded, "chat_template", "{{ messages | length }}")
        with pytest.raises(InputError, match="cannot render an answer apart from its question"):
            read(reader(box, path, chat=True))
        patch.setattr(box._loaded, "chat_template", None)
        with pytest.raises(ConfigError, match="'outpace-tiny' has no chat template"):
            reader(box, path, chat=True)
