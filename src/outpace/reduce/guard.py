"""A first guard against drafts that do not pay.

It keeps an online estimate of how long a step takes by the number of packed tokens. From it and from the nodes' estimated
probabilities, which `Calibrator` has corrected before, it finds how many nodes, over the whole batch, maximise the expected
committed tokens per second; that may be none.

The estimates only ever decide how much is verified. What is committed does not depend on them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from outpace._compile import compiled
from outpace.tree import BoolArray, DraftTrees, Float32Array, Int32Array

_SAMPLES = 9  # step times kept for each size
_WARM_UP = 3  # plain steps before the first draft, so that there is something to compare with
_LONGEST_PATIENCE = 512  # drafted steps for which an estimate is trusted at the most
_EDGES = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024], np.int64)


class StepTimes:
    """Seconds of a step by packed tokens, for one class of batch sizes.

    Other work on the machine only ever makes a step slower, so a low quantile of the latest samples stands for a size. An
    estimate that may be wrong must not keep a size from being tried for ever: it is forgotten after a while, which doubles
    with every sample, and then the neighbours speak for it.
    """

    def __init__(self) -> None:
        self._samples: list[list[float]] = [[] for _ in _EDGES]
        self._seen = np.zeros(len(_EDGES), np.int64)
        self._records = np.zeros(len(_EDGES), np.int64)
        self._sizes = np.zeros(len(_EDGES))

    def record(self, num_tokens: int, seconds: float, now: int) -> None:
        """Take note of one step."""
        slot = _slot(num_tokens)
        samples = self._samples[slot]
        if not self._trusted(now)[slot]:
            samples.clear()  # what is measured anew must not be outvoted by what was forgotten
        samples.append(seconds)
        if len(samples) > _SAMPLES:
            samples.pop(0)
        self._sizes[slot] += (num_tokens - self._sizes[slot]) / min(self._records[slot] + 1, _SAMPLES)
        self._seen[slot] = now
        self._records[slot] += 1

    def needs_plain_step(self, num_tokens: int, now: int) -> bool:
        """Whether a step of this size, the plain one, has to be measured (again) before others are compared with it."""
        slot = _slot(num_tokens)
        return bool(self._records[slot] < _WARM_UP or not self._trusted(now)[slot])

    def curve(self, num_tokens: npt.NDArray[np.int64], now: int) -> npt.NDArray[np.float64]:
        """Seconds at each size: linear between known sizes, never falling, beyond the largest as steep as before.

        Args:
            num_tokens: ``int64[n]``, the first of them a size that was measured (the plain step).
            now: The number of the step.

        Returns:
            ``float64[n]``.
        """
        known = self._trusted(now)
        known[_slot(int(num_tokens[0]))] = True
        slots = np.flatnonzero(known)
        sizes = self._sizes[slots]
        seconds = np.maximum.accumulate([self._low(int(slot)) for slot in slots])
        result = np.interp(num_tokens, sizes, seconds)
        beyond = num_tokens > sizes[-1]
        if beyond.any():
            slope = (seconds[-1] - seconds[0]) / max(sizes[-1] - sizes[0], 1.0)
            result[beyond] += slope * (num_tokens[beyond] - sizes[-1])
        return np.asarray(result, np.float64)

    def _trusted(self, now: int) -> BoolArray:
        """``bool[classes]``: sizes whose estimate is not forgotten."""
        patience = np.minimum(_LONGEST_PATIENCE, 8 * 2 ** np.minimum(self._records, 16))
        trusted: BoolArray = (self._records > 0) & (now - self._seen < patience)
        return trusted

    def _low(self, slot: int) -> float:
        samples = sorted(self._samples[slot])
        return samples[(len(samples) - 1) // 4]


class Guard:
    """Caps the nodes of a batch where more would not pay; see the module."""

    def __init__(self) -> None:
        self._times: dict[int, StepTimes] = {}
        self._draft_seconds = 0.0
        self._now = 0

    def limit(self, trees: DraftTrees, num_decoding: int, *, beside_prefill: bool = False) -> int:
        """Most nodes that the batch should verify.

        The cost of a prompt that is computed in the same step is left out, which makes nodes look dearer than they are.

        Args:
            trees: What may be verified, with corrected ``log_probs``. Trees of sequences that do not decode are empty.
            num_decoding: Sequences that decode, each with one pending token: the packed tokens of the plain step.
            beside_prefill: Whether prompts are computed in the same step. Its time would say nothing about a plain step, so
                none is asked for; where no plain step was measured, everything is verified.
        """
        self._now += 1
        num_nodes = trees.num_nodes
        if num_nodes == 0:
            return 0
        num_decoding = max(num_decoding, 1)
        times = self._times_of(num_decoding)
        if times.needs_plain_step(num_decoding, self._now):
            return num_nodes if beside_prefill else 0
        sizes = num_decoding + np.arange(num_nodes + 1, dtype=np.int64)
        # Drafting is paid for already, also where everything is cut.
        seconds = times.curve(sizes, self._now) + self._draft_seconds
        gains = np.concatenate([[0.0], self.expected_gains(trees)])
        return int(np.argmax((num_decoding + gains) / seconds))

    @staticmethod
    def expected_gains(trees: DraftTrees) -> npt.NDArray[np.float64]:
        """``float64[n]``: expected accepted nodes if the best 1, 2, ... n nodes of the batch are verified."""
        return _summed_best(trees.offsets, trees.parents, trees.log_probs)

    def record_step(self, batch_size: int, num_tokens: int, seconds: float, draft_seconds: float) -> None:
        """Take note of how long a step without prefill took.

        Args:
            batch_size: Sequences in it.
            num_tokens: Packed tokens, nodes included.
            seconds: From packing to commit.
            draft_seconds: For drafting, besides.
        """
        self._times_of(batch_size).record(num_tokens, seconds, self._now)
        self._draft_seconds += 0.1 * (draft_seconds - self._draft_seconds)

    def _times_of(self, batch_size: int) -> StepTimes:
        return self._times.setdefault(_slot(batch_size), StepTimes())


def _slot(num_tokens: int) -> int:
    return min(int(np.searchsorted(_EDGES, num_tokens)), len(_EDGES) - 1)


@compiled
def _summed_best(offsets: Int32Array, parents: Int32Array, log_probs: Float32Array) -> npt.NDArray[np.float64]:
    """Sums of path probabilities, the largest first."""
    reach = np.empty(len(parents), np.float64)
    for b in range(len(offsets) - 1):
        begin = offsets[b]
        for node in range(begin, offsets[b + 1]):
            parent = parents[node]
            reach[node] = np.exp(log_probs[node]) * (1.0 if parent < 0 else reach[begin + parent])
    return np.cumsum(np.sort(reach)[::-1])
