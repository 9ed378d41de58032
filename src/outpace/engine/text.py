"""Token ids to text, piece by piece: whole characters only, and stop strings wherever they fall."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

from transformers import PreTrainedTokenizerBase

_BROKEN = "\ufffd"  # what a tokenizer decodes an unfinished character to
_UNFINISHED = 3  # tokens that an unfinished character can take at the most: one for each of its bytes
_LONGEST_WAIT = 8  # tokens; a longer run without a whole character is no character at all


class TextStream:
    """The text of one output as it grows.

    A piece is released when its last character is complete and no stop string can begin in it. Decoding happens only when
    somebody asks (`take`, `finish`) or stop strings must be looked for, so that a request that wants ids alone pays nothing.

    Example: the tokens of "é" may be two bytes; after the first, `take` gives ``""``, after the second ``"é"``.

    Args:
        tokenizer: None gives empty text throughout; then there must be no stop strings.
        stop: Strings that end the text.
        include_stop: Keep the stop string.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, stop: SequenceOf[str] = (), include_stop: bool = False
    ) -> None:
        self._tokenizer: Any = tokenizer
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._ids: list[int] = []
        self._prefix = 0  # ids before this are context no more
        self._read = 0  # ids before this are decoded
        self._held = ""  # decoded, not released: may begin a stop string
        self._fresh = ""  # released, not taken
        self._taken = ""
        self.stopped_by: str | None = None

    @property
    def text(self) -> str:
        """All released text."""
        return self._taken + self._fresh

    def push(self, tokens: SequenceOf[int]) -> int:
        """Add committed tokens.

        Returns:
            How many of them belong to the output: all, or those up to the one that completes a stop string.
        """
        if not self._stop:
            self._ids.extend(tokens)
            return len(tokens)
        for count, token in enumerate(tokens, 1):
            self._ids.append(token)
            self._decode()
            if self.stopped_by is not None:
                return count
        return len(tokens)

    def take(self) -> str:
        """What was released since the last time."""
        self._decode()
        fresh, self._fresh = self._fresh, ""
        self._taken += fresh
        return fresh

    def finish(self) -> str:
        """The rest, even if it ends in the middle of a character; no more can follow."""
        if self.stopped_by is None:
            self._decode(final=True)
            self._fresh += self._held
            self._held = ""
        return self.take() if self.stopped_by is None else self._take_released()

    def fork(self) -> TextStream:
        """An independent copy."""
        twin = object.__new__(TextStream)
        twin.__dict__.update(self.__dict__)
        twin._ids = list(self._ids)
        return twin

    def _take_released(self) -> str:
        fresh, self._fresh = self._fresh, ""
        self._taken += fresh
        return fresh

    def _decode(self, final: bool = False) -> None:
        if self._tokenizer is None or self.stopped_by is not None or self._read == len(self._ids):
            return
        # A token's text may depend on the token before it (spaces), so decode from a little earlier and take the difference.
        before = self._to_text(self._ids[self._prefix : self._read])
        after = self._to_text(self._ids[self._prefix :])
        read = len(self._ids)
        if after.endswith(_BROKEN) and not final:
            settled = self._settled(before, after)
            if settled is None:
                return
            after, read = settled
        self._release(after[len(before) :])
        self._prefix, self._read = self._read, read

    def _settled(self, before: str, after: str) -> tuple[str, int] | None:
        """Text and end of the longest run of unread tokens whose text cannot change any more, or None."""
        for end in range(len(self._ids) - 1, self._read, -1):
            text = self._to_text(self._ids[self._prefix : end])
            if not text.endswith(_BROKEN) and len(text) > len(before):
                return text, end
        # No whole character at all: bytes that are none, but for the last ones, which may begin one.
        end = len(self._ids) - _UNFINISHED
        text = self._to_text(self._ids[self._prefix : end])
        return (text, end) if end - self._read >= _LONGEST_WAIT - _UNFINISHED and after.startswith(text) else None

    def _to_text(self, ids: list[int]) -> str:
        if not ids:
            return ""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _release(self, piece: str) -> None:
        self._held += piece
        found = [(at, text) for text in self._stop if (at := self._held.find(text)) >= 0]
        if found:
            at, self.stopped_by = min(found, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            self._fresh += self._held[: at + (len(self.stopped_by) if self._include_stop else 0)]
            self._held = ""
            return
        keep = max((_overlap(self._held, text) for text in self._stop), default=0)
        cut = len(self._held) - keep
        self._fresh += self._held[:cut]
        self._held = self._held[cut:]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``, the whole of it excepted."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
