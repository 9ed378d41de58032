from __future__ import annotations

import json
from pathlib import Path

import pytest

from outpace.bench.traces import read_traces
from outpace.errors import ConfigError, InputError, TraceFormatError

GOOD = {"prompt_ids": [1, 2], "output_ids": [3, 2], "category": "qa", "id": 7, "turn": 1, "model": "m"}


def letters(text: str) -> list[int]:
    return [ord(c) for c in text]


def test_reads_traces_and_skips_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + json.dumps({"prompt_ids": [4], "output_ids": [5]}) + "\r\n")
    first, second = read_traces(path)
    assert (first.prompt_ids.tolist(), first.output_ids.tolist()) == ([1, 2], [3, 2])
    assert (first.category, first.id, first.turn) == ("qa", "7", 1)
    assert (second.category, second.id) == ("uncategorised", "3")
    assert first.prompt_ids.dtype == first.output_ids.dtype == "int32"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{not json", "invalid JSON"),
        (b"[1, 2]", r"expected a JSON object, found \[1, 2\]"),
        (b'{"prompt_ids": [1]}', "expected field output_ids, found prompt_ids"),
        (b'{"prompt_ids": [], "output_ids": [1]}', r"prompt_ids must be a list of at least one token id, found \[\]"),
        (b'{"prompt_ids": "ab", "output_ids": [1]}', "prompt_ids must be a list"),
        (b'{"prompt_ids": [1], "output_ids": [1, -2]}', "output_ids must hold integers from 0, found -2"),
        (b'{"prompt_ids": [1.5], "output_ids": [1]}', "found 1.5"),
        (b'{"prompt_ids": [true], "output_ids": [1]}', "found true"),
        (b'{"prompt_ids": [1], "output_ids": [2147483648]}', "found 2147483648"),
        (b'{"prompt_ids": [1], "output_ids": [1], "category": 5}', "category must be a string, found 5"),
        (b'{"prompt_ids": [1], "output_ids": [1], "turn": "x"}', "turn must be an integer"),
        (b'{"prompt_ids": [1], "output_ids": [1], "model": "\xff"}', "expected UTF-8, found byte 0xff"),
    ],
)
def test_broken_lines_are_named(tmp_path: Path, line: bytes, problem: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + line + b"\n")
    with pytest.raises(TraceFormatError, match=rf"t\.jsonl:2: .*{problem}"):
        list(read_traces(path))


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*nope\.jsonl: No such file"):
        list(read_traces(tmp_path / "nope.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(TraceFormatError, match=r"empty\.jsonl:1: .*empty file"):
        list(read_traces(tmp_path / "empty.jsonl"))


def test_plain_text_is_one_document_with_one_token_of_prompt(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("abc\nabc")
    (trace,) = read_traces(path, letters)
    assert trace.prompt_ids.tolist() == [97]
    assert trace.output_ids.tolist() == letters("bc\nabc")


def test_plain_text_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes(b"one\ntwo\nthr\xffee")
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        list(read_traces(path))
    with pytest.raises(TraceFormatError, match=r"book\.txt:3: expected UTF-8, found byte 0xff"):
        list(read_traces(path, letters))
    path.write_text("x")
    with pytest.raises(TraceFormatError, match="at least 2 tokens, found 1"):
        list(read_traces(path, letters))
