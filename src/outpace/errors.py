"""Every exception that Outpace raises on purpose, as one tree.

::

    OutpaceError
    ├── ConfigError (ValueError)          an option, a parameter or a combination that cannot work
    │   └── UnknownNameError              a name that does not exist; says what exists and what is close
    ├── InputError (ValueError)           the text, tokens or file that the user gave
    │   ├── PromptError                   empty, too long for the context, not decodable
    │   ├── TraceFormatError              a broken line in a trace or prompt file, as file:line
    │   └── CorpusError                   a corpus that cannot be opened: damaged, another version, another tokenizer
    ├── ModelError                        the checkpoint or the module behind it
    │   ├── CheckpointError               cannot be read: missing shard, no such folder or hub id
    │   ├── UnsupportedModelError         loads, but cannot be run packed; says which probe failed
    │   └── NonFiniteLogitsError          the model produced NaN or infinite logits for one request
    ├── ArenaFullError (MemoryError)      no room for keys and values; carries the numbers
    ├── DrafterError                      a drafter proposed something malformed, or raised something
    ├── ConstraintError                   a constraint or a processor allows no token at all, or raised something
    └── LifecycleError (RuntimeError)     misuse: a request that is not active, an engine that is closed

A message says what was expected, what was found and what to do about it. The command line turns each of them
into one line on standard error and exit status 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

_MOST_NAMES = 40  # that a message lists


class OutpaceError(Exception):
    """Root of every error that Outpace raises on purpose.

    Attributes:
        outputs: Where `Engine.generate` raised it: every output of the call, so that nothing else in the batch is lost.
    """

    outputs: list[Any] | None = None


class ConfigError(OutpaceError, ValueError):
    """An option, a parameter or a combination of them that cannot work."""


class UnknownNameError(ConfigError):
    """A name (drafter, model, option) that does not exist.

    Args:
        kind: What was looked up, for instance ``"drafter"``.
        name: The name that was not found.
        known: The names that exist.
        hint: A further sentence, for instance how to list them.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        close = difflib.get_close_matches(name.lower(), self.known, n=3, cutoff=0.5)
        message = f"unknown {kind} {name!r}"
        if close:
            message += f"; did you mean {' or '.join(repr(c) for c in close)}?"
        more = f" and {len(self.known) - _MOST_NAMES} more" if len(self.known) > _MOST_NAMES else ""
        message += f" (known: {', '.join(self.known[:_MOST_NAMES]) or 'none'}{more})"
        super().__init__(f"{message}. {hint}" if hint else message)


class InputError(OutpaceError, ValueError):
    """The text, tokens or file that the user gave cannot be used."""


class PromptError(InputError):
    """A prompt that is empty, too long for the context, or not decodable."""


class TraceFormatError(InputError):
    """A line of a trace or prompt file that cannot be read.

    Args:
        path: The file.
        line: Its line, counted from 1.
        problem: What was expected and what was found.
    """

    def __init__(self, path: str, line: int, problem: str) -> None:
        self.path, self.line = path, line
        super().__init__(f"{path}:{line}: {problem}")


class CorpusError(InputError):
    """A corpus, or a file of one, that cannot be opened: damaged, of another format version or of another tokenizer."""


class ModelError(OutpaceError):
    """The checkpoint, or the module behind it."""


class CheckpointError(ModelError):
    """A checkpoint that cannot be read."""


class UnsupportedModelError(ModelError):
    """A model that loads but cannot be run packed; the message names the probe that failed."""


class NonFiniteLogitsError(ModelError):
    """The model produced NaN or infinite logits for one request."""


class ArenaFullError(OutpaceError, MemoryError):
    """No room for keys and values.

    Args:
        needed: Rows (tokens) that one more operation needs.
        free: Rows that are free, in all gaps together.
        capacity: Rows of the arena.
        row_bytes: Bytes of keys and values that one row takes over all layers.
        advice: What to change.
    """

    def __init__(self, needed: int, free: int, capacity: int, row_bytes: int, advice: str) -> None:
        self.needed, self.free, self.capacity, self.row_bytes = needed, free, capacity, row_bytes
        super().__init__(
            f"no room for keys and values: {needed} rows ({_size(needed * row_bytes)}) needed, {free} of {capacity} free "
            f"({_size(capacity * row_bytes)} in all, {row_bytes} bytes a token). {advice}"
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.1f} KiB"


class DrafterError(OutpaceError):
    """A drafter proposed something malformed, or raised something."""


class ConstraintError(OutpaceError):
    """A constraint or a processor allows no token at all, or raised something."""


class LifecycleError(OutpaceError, RuntimeError):
    """A call at the wrong time: a request that is not active, an engine that is closed."""
