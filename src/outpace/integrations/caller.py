"""What the call of `generate` says that Transformers does not hand on to a callable `custom_generate`.

Transformers (5.16 to 5.23) picks from its own arguments only those that the callable names and that are none of its own:
``streamer``, ``synced_gpus`` and ``assistant_model`` never arrive. Left alone, a streamer would get the prompt and nothing
more, and a thread that waits for its end would wait for ever; an assistant model would be ignored silently. So they are
read, and only read, where they still stand: in the frame of the running `generate`.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

from transformers import GenerationMixin


@dataclass(frozen=True, slots=True)
class Caller:
    """Arguments of the running `generate`; the defaults where there is none.

    Attributes:
        streamer: Gets the tokens, and has got the prompt.
        assistant_model: For assisted generation.
        synced_gpus: As given; None leaves it to Transformers.
        past_key_values: A cache of the caller's own.
        negative_prompt: Whether there is one.
    """

    streamer: Any = None
    assistant_model: Any = None
    synced_gpus: bool | None = None
    past_key_values: Any = None
    negative_prompt: bool = False


def find_caller(model: object) -> Caller:
    """The arguments of the innermost `generate` that runs for this model."""
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (frame.f_code is code and frame.f_locals.get("self") is model):
        frame = frame.f_back
    if frame is None:
        return Caller()
    given = frame.f_locals
    return Caller(
        streamer=given.get("streamer"),
        assistant_model=given.get("assistant_model"),
        synced_gpus=given.get("synced_gpus"),
        past_key_values=given.get("kwargs", {}).get("past_key_values"),
        negative_prompt=given.get("negative_prompt_ids") is not None,
    )
