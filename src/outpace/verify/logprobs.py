"""Log-probabilities of committed tokens, of the model's own distribution."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from outpace.tree import Float32Array, Int32Array


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely one committed token was, before temperature, penalties, constraint or any other processing.

    Attributes:
        token: The committed token.
        logprob: Its natural log-probability, at most 0; -inf where the model itself excludes it.
        top: The most likely tokens with theirs, best first, the lowest id first among equals. It holds as many as were
            asked for (0 for none) and the committed token only if that is one of them.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


def token_logprobs(logits: torch.Tensor, tokens: SequenceOf[int] | Int32Array, num_top: int) -> list[TokenLogprobs]:
    """Log-probabilities of tokens under the logits that they were chosen from.

    Args:
        logits: ``[m, V]``, the model's own, any float dtype and device.
        tokens: ``m`` tokens, one for each row.
        num_top: How many of the most likely tokens to add; all, if the vocabulary has fewer.
    """
    log_probs = torch.log_softmax(logits.detach().float(), dim=-1)
    num_top = min(num_top, log_probs.shape[1])
    best = torch.topk(log_probs, num_top, dim=-1).values.cpu().numpy() if num_top else None
    host: Float32Array = log_probs.cpu().numpy()
    found = []
    for i, token in enumerate(tokens):
        top = [] if best is None else _top(host[i], num_top, float(best[i, -1]))
        found.append(TokenLogprobs(int(token), float(host[i, int(token)]), top))
    return found


def _top(log_probs: Float32Array, num_top: int, last: float) -> list[tuple[int, float]]:
    """The best ``num_top``, of which ``last`` is the lowest; topk alone leaves open which equals it takes."""
    better = np.flatnonzero(log_probs > last)
    equal = np.flatnonzero(log_probs == last)[: num_top - len(better)]
    better = better[np.argsort(-log_probs[better], kind="stable")]
    return [(int(token), float(log_probs[token])) for token in (*better, *equal)]
