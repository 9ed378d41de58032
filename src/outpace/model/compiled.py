"""The unmodified model through ``torch.compile``, as an option that gives way by itself.

Our attention is no graph that torch could compile; the model is compiled in pieces around it. Where compiling fails
(no C++ compiler, a model that torch cannot trace), passes go on uncompiled, with one warning.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from outpace.errors import OutpaceError
from outpace.model.attention import ATTENTION_NAME

_LOG = logging.getLogger(__name__)


class CompiledModel:
    """A model that is compiled at its first pass.

    Attributes:
        error: Why it is not compiled after all, or None.

    Args:
        model: The model; it is left as it is.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        interface: Any = AttentionInterface()  # type: ignore[no-untyped-call]
        attention = interface[ATTENTION_NAME]
        if not hasattr(attention, "_torchdynamo_disable"):
            disabled: Any = torch.compiler.disable(attention)  # type: ignore[no-untyped-call]
            AttentionInterface.register(ATTENTION_NAME, disabled)
        self._call: Any = torch.compile(model, dynamic=True)
        self.error: Exception | None = None

    @property
    def works(self) -> bool:
        """Whether passes are still to go this way."""
        return self.error is None

    def __call__(self, **inputs: Any) -> Any:
        """The model's output.

        Raises:
            CompilationFailed: It could not be compiled, or a compiled pass failed; `works` is False from here on.
        """
        try:
            return self._call(**inputs)
        except (OutpaceError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            self.give_up(error)
            raise CompilationFailed from error

    def give_up(self, error: Exception) -> None:
        """Go on uncompiled."""
        self.error = error
        first_line = (str(error).strip().splitlines() or [""])[0]
        _LOG.warning("torch.compile is off: %s: %s; passes go on uncompiled", type(error).__name__, first_line)


class CompilationFailed(Exception):  # noqa: N818 - never leaves the model layer
    """A compiled pass failed; the same pass may be run uncompiled."""
