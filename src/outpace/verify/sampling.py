"""Gumbel noise: sampling that speculation cannot change.

``arg max over tokens of (logit + noise)`` follows ``softmax(logits)`` exactly if the noise of every token is an
independent standard Gumbel variable (the Gumbel-max trick). Here the noise is no stream but a function of (request
seed, position, token id), so the token drawn at a position depends on nothing but the text before it: not on the draft
tree, the batch or the order of the draws. ``position`` is the index, in prompt and output together, of the token to be
drawn.

To reproduce it elsewhere, for instance on a GPU (all integers are unsigned, 64 bits, wrapping)::

    mix(z):  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9        # the finaliser of SplitMix64
             z = (z ^ (z >> 27)) * 0x94D049BB133111EB
             z = z ^ (z >> 31)
    key   = mix(mix(seed + G) + (position + 1) * G)          # G = 0x9E3779B97F4A7C15
    bits  = mix(key + (token + 1) * G) >> 12                 # 52 bits
    u     = (bits + 0.5) * 2**-52                            # float64, exact, inside (0, 1)
    noise = -log(-log(u))                                    # float64, from -3.61 to 36.74
    score = float64(logit) + noise                           # the largest wins, then the lowest token id

52 bits and not 53, because ``2**53 - 0.5`` rounds up and would make the largest ``u`` 1 and its noise infinite. The
integers are the same everywhere. Logarithms differ between libraries by a unit in the last place: in float64 that
changes about one token in 10**14; in float32 about one in 10**6, so a GPU should take float64 for the tokens that are
not -inf. The logits are float32, after temperature: noise added before it would not be scaled with them.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from outpace._compile import compiled
from outpace.tree import Float32Array, UInt64Array

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_ONE = np.uint64(1)
_MASK_64 = 2**64 - 1


def gumbel_noise(seed: int, position: int, token_ids: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """The noise of single tokens; `gumbel_argmax` adds the same.

    Args:
        seed: The request's seed; taken modulo 2**64.
        position: Index of the token to be drawn, in prompt and output together.
        token_ids: Integers of any shape, at least 0.

    Returns:
        ``float64`` of the same shape, independent standard Gumbel variables.
    """
    ids = np.ascontiguousarray(token_ids, np.uint64)
    noise: npt.NDArray[np.float64] = _noise_of(_key(seed, position), ids.reshape(-1))
    return noise.reshape(ids.shape)


def gumbel_argmax(logits: Float32Array, seed: int, position: int) -> int:
    """Draw a token from ``softmax(logits)``.

    Args:
        logits: ``float32[V]``, processed, contiguous, without NaN or +inf. A token at -inf is never drawn.
        seed: The request's seed; taken modulo 2**64.
        position: Index of the token to be drawn, in prompt and output together.

    Returns:
        The token id; the lowest if several have the same score. -1 if all are at -inf.
    """
    return int(_argmax(logits, _key(seed, position)))


def _key(seed: int, position: int) -> np.uint64:
    return np.uint64(_mix_key(np.uint64(seed & _MASK_64), np.uint64(position)))


@numba.njit(nogil=True, inline="always")
def _mix(z: np.uint64) -> np.uint64:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


@compiled
def _mix_key(seed: np.uint64, position: np.uint64) -> np.uint64:
    return _mix(_mix(seed + _GOLDEN) + (position + _ONE) * _GOLDEN)


@numba.njit(nogil=True, inline="always")
def _uniform(key: np.uint64, token: np.uint64) -> float:
    bits = _mix(key + (token + _ONE) * _GOLDEN) >> np.uint64(12)
    return (np.float64(bits) + 0.5) * 2.0**-52


@compiled
def _noise_of(key: np.uint64, tokens: UInt64Array) -> npt.NDArray[np.float64]:
    noise = np.empty(len(tokens), np.float64)
    for i in range(len(tokens)):
        noise[i] = -math.log(-math.log(_uniform(key, tokens[i])))
    return noise


@compiled
def _argmax(logits: Float32Array, key: np.uint64) -> int:
    best_token, best = -1, -np.inf
    for token in range(len(logits)):
        logit = np.float64(logits[token])
        if logit == -np.inf:
            continue
        u = _uniform(key, np.uint64(token))
        # Two logarithms a token would be nearly all of the time. To win, noise must reach gap = best - logit; noise
        # <= -log(1 - u) since -log(u) >= 1 - u; so (1 - u) * exp(gap) <= 1 is needed, and exp(gap) is at least its
        # Taylor polynomial. What wins stays below 0.89 on the left, so rounding cannot matter.
        gap = best - logit
        if gap > 0.0:
            least = 1.0 + gap * (1.0 + gap * (0.5 + gap * (1.0 / 6.0 + gap * (1.0 / 24.0))))
            if (1.0 - u) * least > 1.0:
                continue
        score = logit - math.log(-math.log(u))
        if score > best:
            best_token, best = token, score
    return best_token
