"""One request's tokens and where their keys and values stand."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from outpace.tree import Int32Array


class Sequence:
    """The tokens of one sample of one request.

    **Pending tokens** are committed but have no keys and values yet: the whole prompt at first, then the last committed
    token, and everything again after `drop_cache`.

    Example: a prompt of 5 tokens that was prefilled and committed its first output token has ``num_tokens == 6``,
    ``num_cached == 5``, and one pending token.

    Attributes:
        key: The engine's number for the sequence, unique among active ones.
        num_prompt: Tokens of the prompt.
        num_cached: Leading tokens whose keys and values are in the arena.
        namespace: Whose text it is; what is learned from it stays there.
    """

    __slots__ = ("_buffer", "_length", "key", "namespace", "num_cached", "num_prompt")

    def __init__(self, key: int, prompt: Int32Array, namespace: str = "") -> None:
        self.key = key
        self.namespace = namespace
        self.num_prompt = len(prompt)
        self.num_cached = 0
        self._length = len(prompt)
        self._buffer = np.empty(len(prompt) + 256, np.int32)
        self._buffer[: len(prompt)] = prompt

    @property
    def num_tokens(self) -> int:
        """Prompt and output together."""
        return self._length

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return self._length - self.num_prompt

    @property
    def tokens(self) -> Int32Array:
        """``int32[num_tokens]``, a view that the next `append` may leave behind."""
        return self._buffer[: self._length]

    @property
    def prompt(self) -> Int32Array:
        """``int32[num_prompt]``, a view."""
        return self._buffer[: self.num_prompt]

    @property
    def output(self) -> Int32Array:
        """``int32[num_output]``, a view."""
        return self._buffer[self.num_prompt : self._length]

    @property
    def pending(self) -> Int32Array:
        """``int32[num_tokens - num_cached]``, a view."""
        return self._buffer[self.num_cached : self._length]

    def append(self, tokens: Int32Array | SequenceOf[int]) -> None:
        """Commit tokens."""
        end = self._length + len(tokens)
        if end > len(self._buffer):
            buffer = np.empty(2 * end, np.int32)
            buffer[: self._length] = self._buffer[: self._length]
            self._buffer = buffer
        self._buffer[self._length : end] = tokens
        self._length = end

    def drop_cache(self) -> None:
        """Make every token pending again."""
        self.num_cached = 0

    def fork(self, key: int) -> Sequence:
        """A copy under another key, cached as far as this one."""
        twin = Sequence(key, self.prompt, self.namespace)
        twin.append(self.output)
        twin.num_cached = self.num_cached
        return twin
