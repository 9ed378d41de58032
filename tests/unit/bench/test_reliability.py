from __future__ import annotations

import math

import numpy as np
import pytest

from calibration_twin import judged as slowly_judged
from outpace.bench.reliability import curve, judged, name_of
from outpace.tree import DraftTrees, Origin
from outpace.verify import verdicts_of
from verify_support import random_tree


def test_buckets() -> None:
    found = curve([0.0, 0.005, 0.15, 0.19, 0.95, 1.0], [False, True, True, False, True, True])
    assert [(b.low, b.high, b.nodes) for b in found.buckets] == [(0.0, 0.01, 2), (0.1, 0.2, 2), (0.95, 1.0, 2)]
    assert [b.observed for b in found.buckets] == [0.5, 0.5, 1.0]
    assert [b.estimated for b in found.buckets] == pytest.approx([0.0025, 0.17, 0.975])
    assert found.calibration_error == pytest.approx((2 * 0.4975 + 2 * 0.33 + 2 * 0.025) / 6)
    assert found.nodes == 6


def test_scores() -> None:
    found = curve([0.8, 0.4], [True, False])
    assert found.brier == pytest.approx((0.04 + 0.16) / 2)
    assert found.log_loss == pytest.approx(-(math.log(0.8) + math.log(0.6)) / 2)
    nothing = curve([], [])
    assert (nothing.buckets, nothing.nodes, nothing.calibration_error, nothing.log_loss) == ((), 0, 0.0, 0.0)


def test_names_of_sets_of_origins() -> None:
    assert name_of(int(Origin.DYNAMIC)) == "dynamic"
    assert name_of(int(Origin.DYNAMIC | Origin.MEMORY)) == "dynamic+memory"
    assert name_of(2**20 | 1) == "lookup+0x100000"
    assert name_of(0) == "none"


@pytest.mark.parametrize("seed", range(40))
def test_judged_equals_the_slow_twin(seed: int) -> None:
    rng = np.random.default_rng(seed)
    trees = DraftTrees.concatenate([random_tree(rng, 3, 16) for _ in range(3)])
    committed = [rng.integers(0, 3, rng.integers(0, 7)).tolist() for _ in range(3)]
    verdicts = verdicts_of([[], [], []], committed)
    nodes, right = judged(trees.offsets, trees.tokens, trees.parents, verdicts.token_offsets, verdicts.tokens)
    expected = slowly_judged(trees, verdicts)
    assert nodes.tolist() == [node for node, _, _ in expected]
    assert right.tolist() == [hit for _, _, hit in expected]
