"""Recorded outputs, as a replay reads them.

A trace file has one JSON object a line. Needed are ``prompt_ids`` and ``output_ids``, lists of token ids with at least
one each; ``category``, ``source``, ``model``, ``id``, ``turn``, ``prompt`` and ``output`` may stand beside them.

Any other file is plain text in UTF-8 and needs a tokenizer. It is one document: its first token is the prompt, and the
rest is the output.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outpace.errors import ConfigError, InputError, TraceFormatError
from outpace.tokenizers import Encode
from outpace.tree import Int32Array

_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_LARGEST_TOKEN = 2**31 - 1


@dataclass(frozen=True, eq=False, slots=True)
class Trace:
    """One recorded output.

    Attributes:
        prompt_ids: ``int32[p]``, at least one token.
        output_ids: ``int32[q]``, at least one token; the first is what prefill gave.
        category: What kind of task it was.
        id: Its name in the file, or its line.
        turn: Turn of the conversation, from 0.
    """

    prompt_ids: Int32Array
    output_ids: Int32Array
    category: str = "uncategorised"
    id: str = ""
    turn: int = 0


def read_traces(path: str | Path, encode: Encode | None = None) -> Iterator[Trace]:
    """Read one file.

    Args:
        path: A trace file (.jsonl, .ndjson, .json), or plain text.
        encode: The tokenizer, for plain text.

    Raises:
        InputError: The file cannot be read.
        TraceFormatError: A line is broken; file and line are named.
        ConfigError: The file is plain text, and there is no tokenizer.
    """
    path = Path(path)
    try:
        content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    if path.suffix.lower() not in _JSON_SUFFIXES:
        yield _read_text(path, content, encode)
        return
    found = False
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            found = True
            yield _read_line(str(path), number, line)
    if not found:
        raise TraceFormatError(str(path), 1, "expected traces, one JSON object a line, found an empty file")


def _read_text(path: Path, content: bytes, encode: Encode | None) -> Trace:
    if encode is None:
        raise ConfigError(
            f"{path} is plain text and needs a tokenizer (traces end in {', '.join(_JSON_SUFFIXES)}): --tokenizer"
        )
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TraceFormatError(str(path), content.count(b"\n", 0, error.start) + 1, _not_utf8(error)) from error
    ids = encode(text)
    if len(ids) < 2:
        raise TraceFormatError(str(path), 1, f"expected a text of at least 2 tokens, found {len(ids)}")
    array = np.array(ids, np.int32)
    return Trace(array[:1], array[1:], "text", path.name)


def _read_line(path: str, number: int, line: bytes) -> Trace:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise TraceFormatError(path, number, _not_utf8(error)) from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise TraceFormatError(path, number, f"expected a JSON object, found invalid JSON ({error})") from error
    if not isinstance(record, dict):
        raise TraceFormatError(path, number, f"expected a JSON object, found {_short(record)}")
    category = record.get("category", Trace.__dataclass_fields__["category"].default)
    if not isinstance(category, str):
        raise TraceFormatError(path, number, f"category must be a string, found {_short(category)}")
    turn = record.get("turn", 0)
    if isinstance(turn, bool) or not isinstance(turn, int):
        raise TraceFormatError(path, number, f"turn must be an integer, found {_short(turn)}")
    return Trace(
        _token_ids(path, number, record, "prompt_ids"),
        _token_ids(path, number, record, "output_ids"),
        category,
        str(record.get("id", number)),
        turn,
    )


def _token_ids(path: str, number: int, record: dict[str, Any], field: str) -> Int32Array:
    if field not in record:
        found = ", ".join(sorted(record)) or "no fields"
        raise TraceFormatError(path, number, f"expected field {field}, found {found}")
    ids = record[field]
    if not isinstance(ids, list) or not ids:
        raise TraceFormatError(path, number, f"{field} must be a list of at least one token id, found {_short(ids)}")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= _LARGEST_TOKEN:
            raise TraceFormatError(path, number, f"{field} must hold integers from 0, found {_short(token)}")
    return np.array(ids, np.int32)


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"expected UTF-8, found byte 0x{error.object[error.start]:02x}"


def _short(value: object) -> str:
    shown = json.dumps(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
