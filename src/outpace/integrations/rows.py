"""One row of a batch of `generate`: its prompt without padding, and its scores as Transformers' processors see them.

A processor that `generate` calls with ``input_ids`` ``[B, L]`` and ``scores`` ``[B, V]`` is called here with one row of
both, ``[1, L]`` and ``[1, V]``, padding included, once at each position that becomes a token.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from outpace.tree import Int32Array


class Row:
    """One row, as a request of the engine.

    Attributes:
        prompt: ``int32[n]``, without padding.
        tokens: What was committed so far.
        logits: ``float32[V]`` a position, the model's own, if they are kept.
        scores: The same after the processors.

    Args:
        padded: ``int64[L]``, the row of ``input_ids``.
        num_padding: How much of it is padding, on the left.
        processors: The row's own, from `for_row`.
        keep_logits: Keep the model's logits at each position.
        keep_scores: Keep the processed ones.
    """

    def __init__(
        self,
        padded: torch.Tensor,
        num_padding: int,
        processors: LogitsProcessorList,
        *,
        keep_logits: bool,
        keep_scores: bool,
    ) -> None:
        self.prompt: Int32Array = padded[num_padding:].to("cpu", torch.int32).numpy()
        self.tokens: list[int] = []
        self.logits: list[torch.Tensor] = []
        self.scores: list[torch.Tensor] = []
        self._num_padding = num_padding
        self._processors = processors
        self._keep_logits, self._keep_scores = keep_logits, keep_scores
        self._text = torch.zeros(len(padded) + 256, dtype=torch.int64, device=padded.device)
        self._text[: len(padded)] = padded
        self._known = len(padded)

    def process(self, tokens: Int32Array, scores: torch.Tensor) -> torch.Tensor:
        """The scores of one position; see `SamplingParams.processor`."""
        row = scores.to(self._text.device)[None]  # [1, V]
        place = len(tokens) - len(self.prompt)
        if self._keep_logits:
            _put(self.logits, place, row[0].clone())
        if self._processors:
            row = self._processors(self._padded(tokens), row)  # type: ignore[arg-type]
        if self._keep_scores:
            _put(self.scores, place, row[0].clone())
        return row[0]

    def _padded(self, tokens: Int32Array) -> torch.Tensor:
        """``int64[1, L + generated]``: the row as `generate` would pass it."""
        length = self._num_padding + len(tokens)
        if length > len(self._text):
            self._text = torch.cat([self._text, torch.zeros_like(self._text)])
        fresh = min(self._known, length) - self._num_padding
        if fresh < len(tokens):
            new = torch.from_numpy(tokens[fresh:].astype(np.int64))
            self._text[self._num_padding + fresh : length] = new.to(self._text.device)
        self._known = length
        return self._text[None, :length]


def _put(kept: list[torch.Tensor], place: int, row: torch.Tensor) -> None:
    """A position is asked again where a step could not use the first answer."""
    del kept[place:]
    kept.append(row)


def for_row(processors: LogitsProcessorList, row: int, batch_size: int) -> LogitsProcessorList:
    """The processors as they treat one row of a batch; those that do not look at the row's place are shared.

    Args:
        processors: The batch's.
        row: 0 to ``batch_size - 1``.
        batch_size: Rows of the batch.
    """
    if batch_size == 1:
        return processors
    return LogitsProcessorList([_processor_for_row(processor, row, batch_size) for processor in processors])


def _processor_for_row(processor: Any, row: int, batch_size: int) -> Any:
    kind = type(processor)
    if kind is RepetitionPenaltyLogitsProcessor:  # older ones than 5.23 may count padding as text
        return _with(processor, prompt_ignore_length=_slice(getattr(processor, "prompt_ignore_length", None), row))
    if kind is PrefixConstrainedLogitsProcessor:
        return _with(processor, _prefix_allowed_tokens_fn=_at_place(processor._prefix_allowed_tokens_fn, row))
    if kind is EncoderRepetitionPenaltyLogitsProcessor:
        own = row * len(processor.encoder_input_ids) // batch_size  # with num_return_sequences there are fewer prompts
        return _with(processor, encoder_input_ids=processor.encoder_input_ids[own : own + 1])
    if kind is EncoderNoRepeatNGramLogitsProcessor:
        own = row * processor.batch_size // batch_size
        return _with(processor, batch_size=1, generated_ngrams=[processor.generated_ngrams[own]])
    return processor


def _at_place(allowed: Callable[[int, Any], list[int]], row: int) -> Callable[[int, Any], list[int]]:
    return lambda _, text: allowed(row, text)


def _slice(lengths: object, row: int) -> object:
    return lengths[row : row + 1] if isinstance(lengths, torch.Tensor) else lengths


def _with(processor: Any, **changes: object) -> Any:
    """A copy with other attributes; the caller's own object stays as it is."""
    twin = copy.copy(processor)
    twin.__dict__.update(changes)
    return twin
