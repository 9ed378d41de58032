"""The sequences that a drafter has open, and the checks of its options."""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np

from outpace.errors import ConfigError, LifecycleError
from outpace.tree import Int32Array

S = TypeVar("S")

_MIN_ROOM = 64


class OpenSequences(dict[int, S], Generic[S]):
    """State of each open sequence by its key; a plain dictionary, except that misuse raises.

    Raises:
        LifecycleError: From ``sequences[key]``, `add` and `remove`.
    """

    def __missing__(self, key: int) -> S:
        raise LifecycleError(f"sequence {key} is not open (open: {sorted(self) or 'none'})")

    def add(self, key: int, state: S) -> None:
        """Open a sequence."""
        if key in self:
            raise LifecycleError(f"sequence {key} is already open; close it first")
        self[key] = state

    def remove(self, key: int) -> None:
        """Close a sequence."""
        self[key]
        del self[key]


class TokenBuffer:
    """The text of one sequence, in an array that doubles.

    Attributes:
        array: ``int32[room]``, of which the first ``length`` tokens are the text.
        length: Tokens of the text.
    """

    __slots__ = ("array", "length")

    def __init__(self, tokens: Int32Array) -> None:
        self.length = len(tokens)
        self.array = np.empty(max(2 * self.length, _MIN_ROOM), np.int32)
        self.array[: self.length] = tokens

    def append(self, tokens: Int32Array) -> None:
        """Append ``int32[k]``."""
        length = self.length + len(tokens)
        if length > len(self.array):
            larger = np.empty(2 * length, np.int32)
            larger[: self.length] = self.array[: self.length]
            self.array = larger
        self.array[self.length : length] = tokens
        self.length = length

    def copy(self) -> TokenBuffer:
        """An independent copy."""
        return TokenBuffer(self.array[: self.length])


def check_count(drafter: str, option: str, value: object, low: int, high: int = 2**31 - 1) -> int:
    """An option that is an integer from ``low`` to ``high``.

    Raises:
        ConfigError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
        raise ConfigError(f"{drafter}: {option} must be an integer from {low} to {high}, found {value!r}")
    return int(value)


def check_share(drafter: str, option: str, value: object) -> float:
    """An option that is a number from 0 to 1.

    Raises:
        ConfigError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 0 <= float(value) <= 1:
        raise ConfigError(f"{drafter}: {option} must be a number from 0 to 1, found {value!r}")
    return float(value)


def check_switch(drafter: str, option: str, value: object) -> bool:
    """An option that is true or false.

    Raises:
        ConfigError: It is neither.
    """
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"{drafter}: {option} must be true or false, found {value!r}")
    return bool(value)
