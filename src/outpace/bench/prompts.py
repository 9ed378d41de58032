"""Prompt files, in the forms that are common in this field.

A ``.jsonl`` file has one JSON object a line; the prompt is the first of these fields that it has: ``prompt_ids`` (token
ids), ``messages`` (a conversation), ``turns`` (the first one), ``prompt``, ``question``, ``text``. In any other file each
line that is not empty is a prompt.
"""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

from outpace.engine import Prompt
from outpace.errors import InputError, TraceFormatError

_FIELDS = ("prompt_ids", "messages", "turns", "prompt", "question", "text")


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """Read the prompts of one file.

    Args:
        path: The file.
        limit: Only the first so many.

    Raises:
        InputError: The file cannot be read, or holds no prompt.
        TraceFormatError: A line is broken; file and line are named.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    is_json = path.suffix.lower() in (".jsonl", ".ndjson", ".json")
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, 1):
        if limit is not None and len(prompts) >= limit:
            break
        if not line.strip():
            continue
        try:
            text = line.decode("utf-8").rstrip("\r")
        except UnicodeDecodeError as error:
            raise TraceFormatError(
                str(path), number, f"expected UTF-8, found byte {line[error.start]:#04x} at column {error.start + 1}"
            ) from error
        prompts.append(_from_json(str(path), number, text) if is_json else text)
    if not prompts:
        raise InputError(f"{path} holds no prompt")
    return prompts


def _from_json(path: str, number: int, line: str) -> Prompt:
    try:
        record: Any = json.loads(line)
    except ValueError as error:
        raise TraceFormatError(path, number, f"expected a JSON object: {error}") from error
    if not isinstance(record, dict):
        raise TraceFormatError(path, number, f"expected a JSON object, found {type(record).__name__}")
    field = next((name for name in _FIELDS if name in record), None)
    if field is None:
        found = ", ".join(record) or "none"
        raise TraceFormatError(path, number, f"expected one of the fields {', '.join(_FIELDS)}, found {found}")
    value = record[field]
    if field == "turns":
        value = value[0] if isinstance(value, list) and value else None
    if field == "prompt_ids":
        well_formed = isinstance(value, list) and all(type(token) is int for token in value)
    elif field == "messages":
        well_formed = isinstance(value, list) and all(isinstance(message, dict) for message in value)
    else:
        well_formed = isinstance(value, str)
    if not well_formed or not value:
        kinds = {"prompt_ids": "a list of token ids", "messages": "a list of messages", "turns": "a list of texts"}
        raise TraceFormatError(path, number, f"expected {field} to be {kinds.get(field, 'a text')} that is not empty")
    return value  # type: ignore[no-any-return]
