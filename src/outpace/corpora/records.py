"""What a line of a JSON file means: a text, a conversation or token ids."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from outpace.errors import ConfigError, InputError
from outpace.tokenizers import TextTokenizer
from outpace.tree import Int32Array

Content: TypeAlias = str | Int32Array
_QUESTION = [{"role": "user", "content": "?"}]


@dataclass(eq=False)
class RecordReader:
    """Takes a document out of a parsed line.

    Args:
        tokenizer: Whose ids are wanted; renders conversations.
        fields: Names of the fields that hold the text, several joined by a line's end. By default ``text``;
            ``messages`` with ``chat``; ``ids`` for token ids.
        chat: Fields hold conversations (lists of role and content), or plain text as an assistant's answer.

    Raises:
        ConfigError: The tokenizer has no chat template.
    """

    tokenizer: TextTokenizer
    fields: tuple[str, ...] = ()
    chat: bool = False

    def __post_init__(self) -> None:
        """See that conversations can be rendered."""
        if self.chat and not self.tokenizer.has_chat_template:
            raise ConfigError(f"tokenizer {self.tokenizer.name!r} has no chat template; leave out --chat")
        self._vocab_size = self.tokenizer.vocab_size

    def text(self, record: object) -> str:
        """The text of one JSON object.

        Raises:
            InputError: It is no object, lacks a field, or a field holds something else.
        """
        fields = self.fields or ("messages" if self.chat else "text",)
        values = [_field(record, name) for name in fields]
        if self.chat and len(values) == 1 and isinstance(values[0], list):
            return _encodable(self.tokenizer.render(_messages(fields[0], values[0])))
        for name, value in zip(fields, values, strict=True):
            if not isinstance(value, str):
                wanted = "a string or a list of messages" if self.chat else "a string"
                raise InputError(f"field {name!r} must be {wanted}, found {_short(value)}")
        text = _encodable("\n".join(values))
        return self.answer(text) if self.chat else text

    def ids(self, record: object) -> Int32Array:
        """The token ids of a list, or of an object's field.

        Raises:
            InputError: It is something else, or an id is outside the vocabulary.
        """
        if len(self.fields) > 1:
            raise InputError(f"token ids come from one field, not from {', '.join(self.fields)}")
        listed = record if isinstance(record, list) else _field(record, (self.fields or ("ids",))[0])
        if not isinstance(listed, list) or not all(type(token) is int for token in listed):
            raise InputError(f"expected a list of token ids, found {_short(listed)}")
        try:
            array = np.array(listed, np.int64)
        except OverflowError as error:
            raise InputError(f"token ids must be from 0 to {self._vocab_size - 1}: {error}") from error
        return self.checked(array)

    def checked(self, ids: npt.NDArray[Any], begin: int = 0) -> Int32Array:
        """Ids as int32, once they are known to be in the vocabulary.

        Args:
            ids: Integers, any width.
            begin: Position of the first, for the error.

        Raises:
            InputError: One is not; the first of them is named.
        """
        bad = np.flatnonzero((ids < 0) | (ids >= self._vocab_size))
        if len(bad):
            raise InputError(
                f"token ids of {self.tokenizer.name!r} are from 0 to {self._vocab_size - 1}, found {ids[bad[0]]} at position "
                f"{begin + int(bad[0])}"
            )
        return ids.astype(np.int32)

    def answer(self, text: str) -> str:
        """A text as the chat template writes an assistant's answer: with its marks, without a question before it.

        Raises:
            InputError: The template refuses it, or writes the question differently when it is answered.
        """
        if not text.strip():
            return ""
        rendered = self.tokenizer.render([*_QUESTION, {"role": "assistant", "content": text}])
        if not rendered.startswith(self._question):
            raise InputError(
                "the chat template cannot render an answer apart from its question; give lists of messages"
            )
        return rendered[len(self._question) :]

    @cached_property
    def _question(self) -> str:
        return self.tokenizer.render(_QUESTION)


def parse_line(line: bytes) -> object:
    """One line of JSON.

    Raises:
        InputError: It is none, or not in UTF-8.
    """
    try:
        record: object = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"expected UTF-8, found byte 0x{line[error.start]:02x}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"expected a line of JSON, found {_cut(line.decode('utf-8').strip())} ({error})") from error
    return record


def _field(record: object, name: str) -> Any:
    if not isinstance(record, dict):
        raise InputError(f"expected a JSON object with a field {name!r}, found {_short(record)}")
    if name not in record:
        raise InputError(
            f"expected a field {name!r}, found {', '.join(sorted(record)) or 'no fields'}; --field names others"
        )
    return record[name]


def _messages(name: str, value: list[Any]) -> list[dict[str, Any]]:
    for place, message in enumerate(value):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise InputError(f"field {name!r}, message {place}: expected role and content, found {_short(message)}")
    return value


def _encodable(text: str) -> str:
    """``text``, if it is text: JSON can hold halves of characters, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text holds half a character (\\u{ord(text[error.start]):04x}) at {error.start}"
        ) from error
    return text


def _short(value: object) -> str:
    return _cut(json.dumps(value))


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
