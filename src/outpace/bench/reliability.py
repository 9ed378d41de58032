"""Reliability: how often drafted nodes are accepted, beside how often their estimates say so.

Judged is every node whose parent the committed tokens confirm, as `outpace.reduce.Calibrator` judges them. Estimates are put
into buckets; in each, the mean estimate is compared with the share that was accepted. The **expected calibration error** is
the mean distance of the two, each bucket weighted by its nodes; 0 is perfect, and says nothing on how sharp the estimates
are. The **Brier score** (mean squared distance of estimate and outcome) and the **log loss** say both.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from outpace._compile import compiled
from outpace.tree import BoolArray, DraftTrees, Int32Array, Int64Array, Origin, UInt32Array, Verdicts

EDGES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
ALL = "all"
_Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Nodes with estimates from ``low`` up to ``high``.

    Attributes:
        low: Least estimate.
        high: The next bucket's least.
        nodes: How many were judged.
        estimated: Mean estimate.
        observed: Share that was accepted.
    """

    low: float
    high: float
    nodes: int
    estimated: float
    observed: float


@dataclass(frozen=True, slots=True)
class Curve:
    """Estimates of one kind against outcomes.

    Attributes:
        buckets: Those that hold nodes, from the lowest estimates up.
        nodes: Judged nodes.
        calibration_error: Expected calibration error.
        brier: Brier score.
        log_loss: In nats; estimates are taken as from 0.0001 to 0.9999.
    """

    buckets: tuple[Bucket, ...]
    nodes: int
    calibration_error: float
    brier: float
    log_loss: float


@dataclass(frozen=True, slots=True)
class Reliability:
    """Curves of the same nodes, as drafted and as corrected.

    Attributes:
        origins: Whose nodes: ``all``, or a set of origins such as ``dynamic+memory``.
        raw: As drafted.
        corrected: By `outpace.reduce.Calibrator`, at the time.
    """

    origins: str
    raw: Curve
    corrected: Curve


@dataclass(slots=True)
class ReliabilityLog:
    """Judged nodes of a run, one entry a step."""

    _raw: list[npt.NDArray[np.float32]] = field(default_factory=list)
    _corrected: list[npt.NDArray[np.float32]] = field(default_factory=list)
    _origins: list[UInt32Array] = field(default_factory=list)
    _right: list[BoolArray] = field(default_factory=list)

    def record(self, drafted: DraftTrees, corrected: DraftTrees, verdicts: Verdicts) -> None:
        """Take note of a step.

        Args:
            drafted: Before correction and cut.
            corrected: The same nodes with corrected estimates.
            verdicts: What was committed.
        """
        nodes, right = judged(drafted.offsets, drafted.tokens, drafted.parents, verdicts.token_offsets, verdicts.tokens)
        if len(nodes):
            self._raw.append(drafted.log_probs[nodes])
            self._corrected.append(corrected.log_probs[nodes])
            self._origins.append(drafted.origins[nodes])
            self._right.append(right)

    def curves(self) -> tuple[Reliability, ...]:
        """Of all nodes, then by set of origins, most nodes first; nothing where no node was judged."""
        if not self._raw:
            return ()
        raw, corrected = np.exp(np.concatenate(self._raw)), np.exp(np.concatenate(self._corrected))
        origins, right = np.concatenate(self._origins), np.concatenate(self._right)
        found = [Reliability(ALL, curve(raw, right), curve(corrected, right))]
        kinds, counts = np.unique(origins, return_counts=True)
        for kind in kinds[np.argsort(-counts, kind="stable")].tolist():
            own = origins == kind
            found.append(Reliability(name_of(kind), curve(raw[own], right[own]), curve(corrected[own], right[own])))
        return tuple(found)


def name_of(origins: int) -> str:
    """A set of origins by the names of its bits."""
    names = [member.name.lower() for member in Origin if member.name and origins & member]
    rest = origins & ~sum(Origin)
    return "+".join(names + ([f"{rest:#x}"] if rest else [])) or "none"


def curve(estimates: npt.ArrayLike, right: npt.ArrayLike, edges: SequenceOf[float] = EDGES) -> Curve:
    """Sort estimates into buckets.

    Args:
        estimates: ``float[n]``, probabilities.
        right: ``bool[n]``, outcomes.
        edges: Rising; a bucket holds its low edge, the last one its high edge too.
    """
    p, y = np.asarray(estimates, np.float64), np.asarray(right, np.float64)
    count = len(p)
    place = np.clip(np.searchsorted(edges, p, side="right") - 1, 0, len(edges) - 2)
    nodes = np.bincount(place, minlength=len(edges) - 1)
    sums, hits = (np.bincount(place, weights, len(edges) - 1) for weights in (p, y))
    buckets = tuple(
        Bucket(edges[i], edges[i + 1], int(nodes[i]), float(sums[i] / nodes[i]), float(hits[i] / nodes[i]))
        for i in range(len(edges) - 1)
        if nodes[i]
    )
    safe = np.clip(p, 1e-4, 1 - 1e-4)
    return Curve(
        buckets,
        count,
        float(np.abs(sums - hits).sum() / max(count, 1)),
        float(((p - y) ** 2).sum() / max(count, 1)),
        float(-np.log(np.where(y > 0, safe, 1 - safe)).sum() / max(count, 1)),
    )


@compiled
def judged(
    offsets: Int32Array, tokens: Int32Array, parents: Int32Array, token_offsets: Int32Array, committed: Int32Array
) -> tuple[Int64Array, BoolArray]:
    """Nodes whose parent the committed tokens confirm, and which of them they confirm too.

    Returns:
        ``int64[m]``, indices into the batch's arrays, rising, and ``bool[m]``.
    """
    nodes, right = np.empty(len(tokens), np.int64), np.empty(len(tokens), np.bool_)
    confirmed = np.zeros(len(tokens), np.int32)  # depth of a confirmed node, else 0
    count = 0
    for b in range(len(offsets) - 1):
        begin, first = offsets[b], token_offsets[b]
        for node in range(begin, offsets[b + 1]):
            parent = parents[node]
            above = 0 if parent < 0 else confirmed[begin + parent]
            if (parent >= 0 and above == 0) or above >= token_offsets[b + 1] - first:
                continue
            nodes[count] = node
            right[count] = tokens[node] == committed[first + above]
            if right[count]:
                confirmed[node] = above + 1
            count += 1
    return nodes[:count], right[:count]
