"""A budget: the mean number of nodes a step, over a whole run.

Of all ways to spend a mean of N nodes a step, the one with the most accepted nodes verifies every node whose path
probability reaches one threshold, the same at every step: much where the drafts are sure, nothing where they are not. The
threshold that spends N is found online, from a faded histogram of the path probabilities that were offered so far, and
moves with the **bank**, the nodes that were allowed and not spent: what is in it is planned for the steps of a horizon,
which grows with the run, so that what poor text leaves over is still there when richer text comes.
The bank never goes below 0, so the mean stays within the budget at every moment, not only at the end.

Example: under a budget of 4, two steps of one node each leave 6 nodes in the bank; the third step may take up to 10, and
does if that many reach the threshold.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from outpace._compile import compiled
from outpace.errors import ConfigError
from outpace.tree import DraftTrees, Float32Array, Int32Array

_BINS = 160  # of the histogram, by minus the logarithm of the path probability
_WIDTH = 0.05  # of a bin: 5% of the probability; the last bin holds all below 0.0004
_FADING = 0.9998  # weight of a step one step later: about 5,000 steps are remembered
_HORIZON = 500  # steps over which the bank is to be spent; a longer one saves more for drafts that are surer; or
_HORIZON_SHARE = 0.1  # of the steps so far, whichever is more


class NodeBudget:
    """Keeps the mean number of verified nodes a step at or under a limit.

    Before each step `offer` says what `select` may keep; after it `spend` takes note of what it kept.

    Args:
        nodes_per_step: The limit; each tree of a batch counts as a step.

    Raises:
        ConfigError: The limit is negative or not finite.
    """

    def __init__(self, nodes_per_step: float) -> None:
        if not (math.isfinite(nodes_per_step) and nodes_per_step >= 0):
            raise ConfigError(f"a budget must be a number of nodes a step, at least 0, found {nodes_per_step}")
        self.nodes_per_step = nodes_per_step
        self._steps = 0
        self._spent = 0
        self._histogram = np.zeros(_BINS + 1)  # the last entry: steps

    @property
    def mean(self) -> float:
        """Nodes a step so far."""
        return self._spent / max(self._steps, 1)

    def offer(self, trees: DraftTrees, limit: int) -> tuple[float, int]:
        """What may be kept of a step's trees.

        Args:
            trees: As drafted, with corrected ``log_probs``; empty trees count as steps too.
            limit: Most nodes of each tree, as `select` takes it: nodes beyond it are no offer.

        Returns:
            ``min_path_prob`` and ``total``, as `select` takes them.
        """
        self._steps += trees.batch_size
        bank = math.floor(self.nodes_per_step * self._steps) - self._spent
        now = max(trees.batch_size, 1)
        # To be spent by the end of the horizon: the bank, which this step's share is in, and what comes in until then.
        horizon = max(_HORIZON, _HORIZON_SHARE * self._steps)
        target = self.nodes_per_step + (bank / now - self.nodes_per_step) / horizon
        return _threshold(trees.offsets, trees.parents, trees.log_probs, limit, max(target, 0.0), self._histogram), bank

    def spend(self, num_nodes: int) -> None:
        """Take note of the nodes that were kept of what `offer` saw last."""
        self._spent += num_nodes


@compiled
def _threshold(
    offsets: Int32Array,
    parents: Int32Array,
    log_probs: Float32Array,
    limit: int,
    target: float,
    histogram: npt.NDArray[np.float64],
) -> float:
    """Add a step to the histogram; the path probability that ``target`` nodes a step reach."""
    steps = len(offsets) - 1
    histogram *= _FADING**steps
    histogram[_BINS] += steps
    cost = np.empty(len(parents), np.float64)
    for b in range(steps):
        begin, end = offsets[b], offsets[b + 1]
        for node in range(begin, end):
            parent = parents[node]
            cost[node] = (0.0 if parent < 0 else cost[begin + parent]) - log_probs[node]
        offered = cost[begin:end]
        if end - begin > limit:
            offered = np.sort(offered)[:limit]
        for value in offered:
            histogram[int(min(value / _WIDTH, _BINS - 1.0))] += 1.0
    left = target * histogram[_BINS]
    for place in range(_BINS):
        count = histogram[place]
        if count > left:
            return math.exp(-_WIDTH * (place + left / count))
        left -= count
    return 0.0
