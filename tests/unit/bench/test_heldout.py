from __future__ import annotations

import json
from pathlib import Path

import pytest

from outpace.bench.heldout import first_of_each_kind, read_held_out
from outpace.errors import TraceFormatError


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n\n" for record in records), "utf-8")
    return path


def test_fields_and_what_stands_in_for_them(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        {"id": "a", "kind": "completion", "prompt": "def f", "source": "x.py"},
        {"id": "a", "kind": "editing", "messages": [{"role": "user", "content": "Rename é"}]},
        {"prompt_ids": [5, 6]},
    )
    first, second, third = read_held_out(path)
    assert (first.id, first.kind, first.prompt, first.source, first.text) == (
        "a",
        "completion",
        "def f",
        "x.py",
        "def f",
    )
    assert (second.id, second.text, second.source) == ("a-1", "Rename é", "")
    assert (third.id, third.kind, third.text) == ("prompt-2", "other", "")


def test_plain_text_has_no_kinds(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one\n\ntwo\n")
    assert [(p.prompt, p.kind) for p in read_held_out(tmp_path / "p.txt")] == [("one", "other"), ("two", "other")]


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"kind": "editing"}\n')
    with pytest.raises(TraceFormatError, match=r"p\.jsonl:2: "):
        read_held_out(tmp_path / "p.jsonl")


def test_first_of_each_kind(tmp_path: Path) -> None:
    records = [{"id": f"{kind}-{i}", "kind": kind, "prompt": "x"} for i in range(3) for kind in ("b", "a")]
    found = first_of_each_kind(read_held_out(write(tmp_path / "p.jsonl", *records)), 2)
    assert [prompt.id for prompt in found] == ["b-0", "a-0", "b-1", "a-1"]
