"""Calibration: what drafters' estimates are worth, learned from what was committed.

A drafter's ``log_prob`` says how likely a node is accepted once its parent is. That estimate may be wrong by origin, by
depth, by level (an estimate of 0.9 may stand for 0.7) and for the text at hand. The correction is a sum on the logit scale::

    logit(corrected) = logit(estimate) + curve(logit(estimate)) + by_depth[depth class] + now + now_by_depth[depth class]

for each set of `Origin` bits apart: a node that several drafters proposed is of a kind of its own. ``curve`` is linear
between `_BUCKETS` knots and forgets slowly, and so does ``by_depth``; the last two terms forget within some dozens of steps
and follow the request of the moment. Every term is drawn towards 0, and all towards what they have in common; so without
evidence the estimate stays as it is, and a depth that was hardly seen shares what is known of its origin.

Terms are learned online by a step of Newton's method on the log loss, one for each term and step, with curvatures that fade
as the evidence does: the diagonal of a recursive logistic regression with forgetting. What a batch shows is one step,
whatever its size.

Example: estimates of 0.5 of which three in four are accepted end near 0.75, and those of 0.9 of the same origin, of which
nothing was seen, a little higher than before.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from outpace._compile import compiled, inner
from outpace.tree import DraftTrees, Float32Array, Int32Array, Int64Array, UInt32Array, Verdicts

_Float64Array = npt.NDArray[np.float64]

_MOST_KINDS = 64  # sets of origins with terms of their own; further sets share the last
_BUCKETS = 24  # knots of the curve
_WIDTH = 0.5  # between two knots, in logits: they reach from 0.003 to 0.997
_SUREST = 7.0  # logit at which an estimate is as good as 1 (0.9991)
_DEPTHS = 5  # classes: 1, 2, 3-4, 5-8, 9 and deeper
_TERMS = 4  # that add up in one correction
_LEAST_CURVATURE = 0.02  # of one trial, where p (1 - p) is smaller
_LONGEST_MOVE = 1.0  # of a term in a step, in logits: no leap after one surprise

# Columns of a kind: the knots, the depth classes, now, now by depth class.
_BY_DEPTH = _BUCKETS
_NOW = _BY_DEPTH + _DEPTHS
_NOW_BY_DEPTH = _NOW + 1
_COLUMNS = _NOW_BY_DEPTH + _DEPTHS
# Rows of the state: the terms, their curvature, and the sums of the step under way.
_TERM, _CURVATURE, _SLOPE_SUM, _CURVATURE_SUM = 0, 1, 2, 3


def _columns(curve: float, by_depth: float, now: float, now_by_depth: float) -> _Float64Array:
    return np.repeat([curve, by_depth, now, now_by_depth], [_BUCKETS, _DEPTHS, 1, _DEPTHS])


# Found on the recorded outputs of two models with two drafters; the log loss is flat around them.
_FADING = _columns(0.995, 0.997, 0.95, 0.98)  # weight of a trial one step later
_PRIOR = _columns(4.0, 4.0, 4.0, 8.0)  # curvature of the pull towards 0; an even chance has 0.25 a trial


class Calibrator:
    """Corrects the estimates of drafted nodes, online; see the module.

    A step is what one call of `record` tells of. Kinds that it shows nothing of keep what they have learned.
    """

    def __init__(self) -> None:
        self._kinds = np.zeros(_MOST_KINDS + 1, np.int64)  # the first entry counts them
        self._state = np.zeros((_MOST_KINDS, 4, _COLUMNS))

    def apply(self, trees: DraftTrees) -> DraftTrees:
        """The same trees with corrected ``log_probs``.

        Estimates for siblings that together exceed 1 are scaled down to it: at most one of them is accepted.

        Args:
            trees: As drafted. Unchanged.

        Returns:
            Trees that share every array with ``trees`` but ``log_probs``; ``trees`` itself before anything was learned.
        """
        if self._kinds[0] == 0 or trees.num_nodes == 0:
            return trees
        log_probs = _corrected(trees.offsets, trees.parents, trees.log_probs, trees.origins, self._kinds, self._state)
        return DraftTrees(trees.offsets, trees.tokens, trees.parents, log_probs, trees.origins)

    def record(self, trees: DraftTrees, verdicts: Verdicts) -> None:
        """Learn from a step which nodes the committed tokens confirm.

        A node is judged if the committed tokens confirm its parent and reach as deep as the node, whether it was verified
        or not.

        Args:
            trees: As drafted, before any correction and any cut.
            verdicts: What was committed.
        """
        if trees.num_nodes:
            _learn(
                trees.offsets,
                trees.tokens,
                trees.parents,
                trees.log_probs,
                trees.origins,
                verdicts.token_offsets,
                verdicts.tokens,
                self._kinds,
                self._state,
            )


@inner
def _depth_class(depth: int) -> int:
    if depth <= 2:
        return depth - 1
    if depth <= 4:
        return 2
    return 3 if depth <= 8 else 4


@inner
def _kind_of(origins: np.int64, kinds: Int64Array, guess: int) -> int:
    """Index of the set of origins, -1 if it has none yet; ``guess`` is looked at first."""
    count = kinds[0]
    if 0 <= guess < count and kinds[guess + 1] == origins:
        return guess
    for kind in range(count):
        if kinds[kind + 1] == origins:
            return kind
    return -1 if count < _MOST_KINDS else _MOST_KINDS - 1


@inner
def _logit(log_prob: float) -> float:
    if log_prob > -0.00092:
        return _SUREST
    return min(log_prob - math.log1p(-math.exp(log_prob)), _SUREST)


@inner
def _log_sigmoid(logit: float) -> float:
    return logit if logit < -30.0 else -math.log1p(math.exp(-logit))


@inner
def _knot(logit: float) -> tuple[int, float]:
    """The knot before a logit, and the weight of the one after it."""
    place = min(max(logit / _WIDTH + (_BUCKETS - 1) / 2, 0.0), _BUCKETS - 1.0)
    knot = min(int(place), _BUCKETS - 2)
    return knot, place - knot


@inner
def _correction(state: _Float64Array, kind: int, knot: int, weight: float, row: int) -> float:
    """What is added to the logit."""
    terms = state[kind, _TERM]
    on_curve = (1.0 - weight) * terms[knot] + weight * terms[knot + 1]
    return float(on_curve + terms[_BY_DEPTH + row] + terms[_NOW] + terms[_NOW_BY_DEPTH + row])


@compiled
def _corrected(
    offsets: Int32Array,
    parents: Int32Array,
    log_probs: Float32Array,
    origins: UInt32Array,
    kinds: Int64Array,
    state: _Float64Array,
) -> Float32Array:
    count = len(parents)
    result = np.empty(count, np.float32)
    depths = np.empty(count, np.int32)
    of_children = np.zeros(count + 1)  # sums of probabilities under each node; the last entry is the root's
    kind = -1
    for b in range(len(offsets) - 1):
        begin, end = offsets[b], offsets[b + 1]
        of_children[count] = 0.0
        for node in range(begin, end):
            parent = parents[node]
            depths[node] = 1 if parent < 0 else depths[begin + parent] + 1
            kind = _kind_of(np.int64(origins[node]), kinds, kind)
            corrected = float(log_probs[node])
            if kind >= 0:
                logit = _logit(corrected)
                knot, weight = _knot(logit)
                added = _correction(state, kind, knot, weight, _depth_class(depths[node]))
                corrected = _log_sigmoid(logit + added)
            result[node] = corrected
            of_children[count if parent < 0 else begin + parent] += math.exp(corrected)
        for node in range(begin, end):
            parent = parents[node]
            total = of_children[count if parent < 0 else begin + parent]
            if total > 1.0:
                result[node] = min(result[node] - math.log(total), 0.0)
    return result


@compiled
def _learn(
    offsets: Int32Array,
    tokens: Int32Array,
    parents: Int32Array,
    log_probs: Float32Array,
    origins: UInt32Array,
    token_offsets: Int32Array,
    committed: Int32Array,
    kinds: Int64Array,
    state: _Float64Array,
) -> None:
    confirmed = np.zeros(len(parents), np.int32)  # depth of a node that is confirmed, else 0
    kind = -1
    for b in range(len(offsets) - 1):
        begin, first = offsets[b], token_offsets[b]
        reach = token_offsets[b + 1] - first
        for node in range(begin, offsets[b + 1]):
            parent = parents[node]
            if parent >= 0 and confirmed[begin + parent] == 0:
                continue
            depth = 1 if parent < 0 else confirmed[begin + parent] + 1
            if depth > reach:
                continue
            right = tokens[node] == committed[first + depth - 1]
            if right:
                confirmed[node] = depth
            kind = _kind_of(np.int64(origins[node]), kinds, kind)
            if kind < 0:
                kind = kinds[0]
                kinds[0] += 1
                kinds[kind + 1] = np.int64(origins[node])
            _add_trial(state, kind, _logit(float(log_probs[node])), _depth_class(depth), right)
    for index in range(kinds[0]):
        if state[index, _CURVATURE_SUM, _NOW] > 0.0:
            _move(state, index)


@inner
def _add_trial(state: _Float64Array, kind: int, logit: float, row: int, right: bool) -> None:
    knot, weight = _knot(logit)
    logit += _correction(state, kind, knot, weight, row)
    prob = 0.0 if logit < -30.0 else 1.0 / (1.0 + math.exp(-logit))
    slope = (1.0 if right else 0.0) - prob
    curvature = max(prob * (1.0 - prob), _LEAST_CURVATURE)
    for total, value in ((_SLOPE_SUM, slope), (_CURVATURE_SUM, curvature)):
        sums = state[kind, total]
        sums[knot] += (1.0 - weight) * value
        sums[knot + 1] += weight * value
        sums[_BY_DEPTH + row] += value
        sums[_NOW] += value
        sums[_NOW_BY_DEPTH + row] += value


@inner
def _move(state: _Float64Array, kind: int) -> None:
    """One step of every term of a kind along the step's slopes."""
    for column in range(_COLUMNS):
        fading, prior = _FADING[column], _PRIOR[column]
        term = state[kind, _TERM, column]
        faded, added = fading * state[kind, _CURVATURE, column], state[kind, _CURVATURE_SUM, column]
        slope = state[kind, _SLOPE_SUM, column] - (1.0 - fading) * prior * term
        # All terms answer the same trials, so each goes a part of the way: else a large batch would overshoot.
        move = slope / (faded + _TERMS * added + prior)
        state[kind, _TERM, column] = term + min(max(move, -_LONGEST_MOVE), _LONGEST_MOVE)
        state[kind, _CURVATURE, column] = faded + added
        state[kind, _SLOPE_SUM, column] = 0.0
        state[kind, _CURVATURE_SUM, column] = 0.0
