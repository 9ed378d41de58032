"""What is done to the model's logits before a token is chosen, one reached node at a time.

In this order, as in Transformers' ``GenerationMixin._get_logits_processor`` (5.23), whose classes are used where it has
one:

1. ``logit_bias`` (where ``sequence_bias`` is there),
2. repetition penalty, over prompt and output,
3. presence and frequency penalty, over the output (where a caller's own processors are there),
4. the caller's own processor,
5. the constraint's mask,
6. only when sampling: temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outpace.config import SamplingParams
from outpace.errors import ConfigError, ConstraintError
from outpace.tree import BoolArray, Int32Array, Int64Array

# Larger biases and penalties would overflow float32 to infinity, and infinities to NaN; at this size they have long
# decided the choice.
_EXTREME = 1e30
_NO_PREFIX = torch.zeros((1, 0), dtype=torch.int64)


class History:
    """Which tokens a sequence holds, and how often its output does; a token can be added and taken back.

    Memory and time follow the number of distinct tokens, so a long prompt costs nothing at a node.

    Args:
        prompt_tokens: ``int[prompt]``.
    """

    def __init__(self, prompt_tokens: npt.NDArray[Any]) -> None:
        distinct = np.unique(prompt_tokens).astype(np.int64)
        self._slots = {int(token): slot for slot, token in enumerate(distinct)}
        self._size = len(distinct)
        self._tokens = np.empty(max(64, 2 * self._size), np.int64)
        self._tokens[: self._size] = distinct
        self._counts = np.zeros(len(self._tokens), np.int64)

    @property
    def tokens(self) -> Int64Array:
        """``int64[distinct]``: the tokens of prompt and output, each once."""
        return self._tokens[: self._size]

    @property
    def output_counts(self) -> Int64Array:
        """``int64[distinct]``: how often the output holds each of them."""
        return self._counts[: self._size]

    def push(self, token: int) -> bool:
        """Add one token to the output; returns whether neither prompt nor output held it."""
        slot = self._slots.get(token)
        is_new = slot is None
        if slot is None:
            slot = self._slots[token] = self._size
            if slot == len(self._tokens):
                self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._tokens[slot] = token
            self._size += 1
        self._counts[slot] += 1
        return is_new

    def pop(self, token: int, was_new: bool) -> None:
        """Take back ``token``, the last one pushed; ``was_new`` is what `push` returned."""
        slot = self._slots[token]
        self._counts[slot] -= 1
        if was_new:
            del self._slots[token]
            self._size -= 1

    def copy(self) -> History:
        """An independent copy."""
        twin = object.__new__(History)
        twin._slots, twin._size = dict(self._slots), self._size
        twin._tokens, twin._counts = self._tokens.copy(), self._counts.copy()
        return twin


class Text:
    """The tokens of a sequence, in order; one can be added at the end and taken back.

    Args:
        tokens: ``int[n]``, the prompt.
    """

    def __init__(self, tokens: npt.NDArray[Any]) -> None:
        self._size = len(tokens)
        self._tokens = np.empty(self._size + 256, np.int32)
        self._tokens[: self._size] = tokens

    @property
    def tokens(self) -> Int32Array:
        """``int32[n]``, a view."""
        return self._tokens[: self._size]

    def push(self, token: int) -> None:
        """Add one token."""
        if self._size == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
        self._tokens[self._size] = token
        self._size += 1

    def pop(self, count: int) -> None:
        """Take back the last ``count`` tokens."""
        self._size -= count

    def copy(self) -> Text:
        """An independent copy."""
        return Text(self.tokens)


class LogitsPipeline:
    """The processing that one request's parameters ask for. Immutable, so that forks share it.

    Attributes:
        needs_history: Whether `process` looks at the text before the node.

    Args:
        params: The request's parameters.
        vocab_size: Width of the model's logits.

    Raises:
        ConfigError: ``logit_bias`` names a token that the model does not have.
    """

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        beyond = [token for token in params.logit_bias if token >= vocab_size]
        if beyond:
            raise ConfigError(
                f"logit_bias must name tokens below the vocabulary size {vocab_size}, found {min(beyond)}"
            )
        self._vocab_size = vocab_size
        self._bias_tokens = np.array(list(params.logit_bias), np.int64)
        bias = np.array(list(params.logit_bias.values()), np.float64)
        self._bias = np.where(np.isneginf(bias), bias, np.clip(bias, -_EXTREME, _EXTREME)).astype(np.float32)
        self._presence = min(max(params.presence_penalty, -_EXTREME), _EXTREME)
        self._frequency = min(max(params.frequency_penalty, -_EXTREME), _EXTREME)
        self._repetition = None
        if params.repetition_penalty != 1.0:
            penalty = min(max(float(params.repetition_penalty), 1 / _EXTREME), _EXTREME)
            self._repetition = RepetitionPenaltyLogitsProcessor(penalty)
        self._processor = params.processor
        self._greedy = params.greedy
        # A lower temperature could overflow; after shifting the best logit to 0 only losers can.
        self._shift = params.temperature < 1e-3
        self._warpers = LogitsProcessorList() if params.greedy else _warpers(params)
        self.needs_history = self._repetition is not None or self._presence != 0 or self._frequency != 0

    def process(
        self,
        logits: torch.Tensor,
        history: History | None = None,
        allowed: BoolArray | None = None,
        text: Text | None = None,
    ) -> torch.Tensor:
        """Process the logits of one reached node.

        Args:
            logits: ``float32[V]`` on the CPU, without NaN or +inf; may be overwritten.
            history: The text before the token to be chosen. Needed if `needs_history`.
            allowed: ``bool[V]``, the constraint's mask, or None.
            text: The same text in order. Needed if the parameters name a processor.

        Returns:
            ``float32[V]``; tokens that cannot be chosen are at -inf.

        Raises:
            ConstraintError: No token is left, the mask is not ``bool[V]``, or the caller's processor raised something or
                did not return ``[V]`` scores.
        """
        scores = logits[None]  # [1, V]
        if len(self._bias_tokens):
            scores[0].numpy()[self._bias_tokens] += self._bias
        if self._repetition is not None and history is not None:
            # Distinct tokens do: the penalty depends on whether a token occurred, not on how often.
            scores = self._repetition(torch.from_numpy(history.tokens)[None], scores)
        if (self._presence or self._frequency) and history is not None:
            self._penalise(scores, history)
        if self._processor is not None and text is not None:
            scores = self._processed(text, scores[0])[None]
        if allowed is not None:
            scores.masked_fill_(~torch.from_numpy(_checked_mask(allowed, self._vocab_size)), -torch.inf)
        if (allowed is not None or len(self._bias_tokens)) and bool(scores.amax() == -torch.inf):
            raise ConstraintError(
                "no token is left to choose: the constraint and logit_bias exclude all "
                f"{self._vocab_size} tokens of the vocabulary"
            )
        if self._greedy:
            return scores[0]
        if self._shift:
            scores = scores - scores.amax()
        return self._warpers(_NO_PREFIX, scores)[0]  # type: ignore[arg-type]

    def _processed(self, text: Text, scores: torch.Tensor) -> torch.Tensor:
        assert self._processor is not None
        try:
            returned: Any = self._processor(text.tokens, scores)
        except Exception as error:  # a user's code: whatever it raises ends this request alone
            raise ConstraintError(f"the processor raised {type(error).__name__}: {error}") from error
        if not isinstance(returned, torch.Tensor) or returned.shape != (self._vocab_size,):
            shape = list(returned.shape) if isinstance(returned, torch.Tensor) else type(returned).__name__
            raise ConstraintError(f"a processor must return scores of shape [{self._vocab_size}], found {shape}")
        found = returned.detach().to("cpu", torch.float32).contiguous()
        best = float(found.amax())
        if best == -math.inf:
            raise ConstraintError(f"the processor excludes all {self._vocab_size} tokens of the vocabulary")
        if math.isnan(best) or (best == math.inf and not self._greedy):
            raise ConstraintError(f"a processor must return finite scores or minus infinity, found {best}")
        return found

    def _penalise(self, scores: torch.Tensor, history: History) -> None:
        counts = history.output_counts
        used = np.flatnonzero(counts)
        tokens = history.tokens[used]
        penalty = self._frequency * counts[used] + self._presence  # float64[used]
        inside = tokens < self._vocab_size
        scores[0].numpy()[tokens[inside]] -= np.clip(penalty, -_EXTREME, _EXTREME)[inside].astype(np.float32)


def _warpers(params: SamplingParams) -> LogitsProcessorList:
    """Transformers' samplers that do something, in its order."""
    warpers = LogitsProcessorList()
    if params.temperature != 1.0:
        # torch rounds the divisor to float32, where a smaller one would be 0.
        warpers.append(TemperatureLogitsWarper(max(float(params.temperature), 1e-20)))
    if params.top_k:
        warpers.append(TopKLogitsWarper(int(params.top_k)))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(float(params.top_p)))
    if params.min_p > 0.0:
        warpers.append(MinPLogitsWarper(float(params.min_p)))
    return warpers


def _checked_mask(allowed: BoolArray, vocab_size: int) -> BoolArray:
    mask = np.ascontiguousarray(allowed)
    if mask.shape != (vocab_size,) or mask.dtype != np.bool_:
        raise ConstraintError(
            f"a constraint's allowed must be bool[{vocab_size}], the width of the model's logits; "
            f"found {mask.dtype}{list(mask.shape)}"
        )
    return mask
