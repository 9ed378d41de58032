"""Prompt files: every form, and what is wrong with a broken line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outpace.bench.prompts import read_prompts
from outpace.errors import InputError, TraceFormatError


def test_every_field(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {"prompt": "p", "text": "not this"},
        {"prompt_ids": [1, 2], "prompt": "not this"},
        {"messages": [{"role": "user", "content": "m"}]},
        {"turns": ["first", "second"], "category": "x"},
        {"question": "q"},
        {"text": "naïve – text"},
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps(record, ensure_ascii=False) for record in records) + "\n\n", encoding="utf-8")
    expected = ["p", [1, 2], [{"role": "user", "content": "m"}], "first", "q", "naïve – text"]
    assert read_prompts(path) == expected
    assert read_prompts(str(path), 2) == expected[:2]


def test_plain_text_has_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes("one\r\n\n  \n two \u2028 still two\nthree".encode())
    assert read_prompts(path) == ["one", " two \u2028 still two", "three"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "expected a JSON object"),
        ("[1, 2]", "expected a JSON object, found list"),
        ("{}", "expected one of the fields prompt_ids, .*, found none"),
        ('{"a": 1, "b": 2}', "found a, b"),
        ('{"prompt": 3}', "expected prompt to be a text"),
        ('{"prompt": ""}', "not empty"),
        ('{"prompt_ids": []}', "a list of token ids that is not empty"),
        ('{"prompt_ids": [1, 2.5]}', "a list of token ids"),
        ('{"prompt_ids": [true]}', "a list of token ids"),
        ('{"prompt_ids": "12"}', "a list of token ids"),
        ('{"messages": ["hi"]}', "a list of messages"),
        ('{"turns": []}', "a list of texts"),
        ('{"turns": "hi"}', "a list of texts"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n\n{line}\n')
    with pytest.raises(TraceFormatError, match=message) as caught:
        read_prompts(path)
    assert (caught.value.line, caught.value.path) == (3, str(path))
    assert str(caught.value).startswith(f"{path}:3: ")
    assert read_prompts(path, 1) == ["fine"]


def test_files_that_hold_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(InputError, match="holds no prompt"):
        read_prompts(tmp_path / "empty.txt")
    with pytest.raises(InputError, match="cannot read"):
        read_prompts(tmp_path / "none.txt")
    with pytest.raises(InputError, match="cannot read"):
        read_prompts(tmp_path)
