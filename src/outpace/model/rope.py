"""Rotary embeddings that change with the length of the sequence.

Most models rotate a position the same way whatever else is in the pass. ``longrope`` (Phi-3 and relatives) uses one set
of frequencies while the longest position *in the pass* is below a switch, and another beyond it, so a short sequence
packed beside a long one would be computed wrongly. The engine therefore never mixes both sides in a step, lets no draft
reach across the switch, and recomputes a sequence's keys when it crosses, as `generate` does for these models.

``dynamic`` NTK scaling changes at ``max_position_embeddings``, where our context ends anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True, slots=True)
class RopeSwitch:
    """Where the frequencies change.

    Attributes:
        length: Sequences of up to this many tokens are on the short side.
        recompute: Whether keys are computed anew when a sequence crosses.
    """

    length: int
    recompute: bool

    def is_long(self, num_tokens: int) -> bool:
        """Whether a sequence of ``num_tokens`` is on the long side."""
        return num_tokens > self.length


def find_switch(model: PreTrainedModel, config: PreTrainedConfig) -> RopeSwitch | None:
    """The model's switch, or None where rotation does not depend on the sequence's length."""
    parameters: Any = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(parameters, dict):
        return None
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    lengths = []
    for entry in [parameters, *nested]:
        if entry.get("rope_type", entry.get("type")) == "longrope":
            original = entry.get("original_max_position_embeddings")
            lengths.append(original or getattr(config, "original_max_position_embeddings", None))
    known = [int(length) for length in lengths if length]
    if not known:
        return None
    prepare: Any = getattr(type(model), "prepare_inputs_for_generation", None)
    own = prepare is not None and prepare is not GenerationMixin.prepare_inputs_for_generation
    return RopeSwitch(min(known), recompute=own)
