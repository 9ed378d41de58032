"""A slow twin of `outpace.reduce.Calibrator`, one dictionary a term, and which nodes a step judges."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from outpace.tree import DraftTrees, Verdicts

FADING = {"curve": 0.995, "by_depth": 0.997, "now": 0.95, "now_by_depth": 0.98}
PRIOR = {"curve": 4.0, "by_depth": 4.0, "now": 4.0, "now_by_depth": 8.0}
Term = tuple[int, str, int]


def judged(trees: DraftTrees, verdicts: Verdicts, tree: int | None = None) -> list[tuple[int, int, bool]]:
    """Node (in the whole batch), depth and outcome of every node whose parent the committed tokens confirm."""
    found = []
    for b in range(trees.batch_size) if tree is None else [tree]:
        begin, committed = int(trees.offsets[b]), verdicts.tokens_of(b).tolist()
        texts: list[list[int]] = []
        for node in range(begin, int(trees.offsets[b + 1])):
            parent = int(trees.parents[node])
            texts.append([*(texts[parent] if parent >= 0 else []), int(trees.tokens[node])])
            above, depth = texts[-1][:-1], len(texts[-1])
            if depth <= len(committed) and committed[: depth - 1] == above:
                found.append((node, depth, committed[depth - 1] == texts[-1][-1]))
    return found


class SlowCalibrator:
    """The same sums and steps, without tables."""

    def __init__(self) -> None:
        self.terms: dict[Term, float] = defaultdict(float)
        self.curvatures: dict[Term, float] = defaultdict(float)
        self.kinds: set[int] = set()

    def apply(self, trees: DraftTrees) -> list[float]:
        """Corrected probabilities."""
        if not self.kinds:
            return np.exp(trees.log_probs).tolist()
        result: list[float] = []
        for b in range(trees.batch_size):
            tree, depths = trees.tree(b), list[int]()
            own = []
            for node, parent in enumerate(tree.parents.tolist()):
                depths.append(1 if parent < 0 else depths[parent] + 1)
                own.append(self.prob(float(tree.log_probs[node]), int(tree.origins[node]), depths[node]))
            sums: dict[int, float] = defaultdict(float)
            for parent, p in zip(tree.parents.tolist(), own, strict=True):
                sums[parent] += p
            result += [p / max(sums[parent], 1.0) for parent, p in zip(tree.parents.tolist(), own, strict=True)]
        return result

    def prob(self, log_prob: float, kind: int, depth: int) -> float:
        if kind not in self.kinds:
            return math.exp(log_prob)
        logit = self.logit(log_prob) + sum(w * self.terms[t] for t, w in self.shares(log_prob, kind, depth).items())
        return 1 / (1 + math.exp(-logit))

    def record(self, trees: DraftTrees, verdicts: Verdicts) -> None:
        slopes: dict[Term, float] = defaultdict(float)
        curvatures: dict[Term, float] = defaultdict(float)
        seen = set()
        for node, depth, right in judged(trees, verdicts):
            log_prob, kind = float(trees.log_probs[node]), int(trees.origins[node])
            seen.add(kind)
            known = self.kinds
            self.kinds = known | {kind}
            p = self.prob(log_prob, kind, depth)
            self.kinds = known
            for term, weight in self.shares(log_prob, kind, depth).items():
                slopes[term] += weight * (right - p)
                curvatures[term] += weight * max(p * (1 - p), 0.02)
        self.kinds |= seen
        for term in set(self.terms) | set(slopes):
            if term[0] in seen:
                name = term[1]
                faded = FADING[name] * self.curvatures[term]
                slope = slopes[term] - (1 - FADING[name]) * PRIOR[name] * self.terms[term]
                self.terms[term] += float(np.clip(slope / (faded + 4 * curvatures[term] + PRIOR[name]), -1, 1))
                self.curvatures[term] = faded + curvatures[term]

    @staticmethod
    def logit(log_prob: float) -> float:
        p = math.exp(log_prob)
        return 7.0 if p > 0.9990889 else log_prob - math.log1p(-p)

    def shares(self, log_prob: float, kind: int, depth: int) -> dict[Term, float]:
        """What every term counts for."""
        place = float(np.clip(self.logit(log_prob) / 0.5 + 11.5, 0, 23))
        knot = min(int(place), 22)
        row = min(4, math.ceil(math.log2(depth)))
        return {
            (kind, "curve", knot): 1 - (place - knot),
            (kind, "curve", knot + 1): place - knot,
            (kind, "by_depth", row): 1.0,
            (kind, "now", 0): 1.0,
            (kind, "now_by_depth", row): 1.0,
        }
