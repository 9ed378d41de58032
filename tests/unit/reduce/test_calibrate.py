"""Calibration on made-up outcomes, against a slow twin, and on recorded outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration_twin import SlowCalibrator, judged
from datafiles import data_path
from outpace.bench import read_traces
from outpace.draft import build_drafter
from outpace.reduce import Calibrator
from outpace.tree import DraftTrees, Origin, Verdicts
from outpace.verify import verdicts_of
from verify_support import random_tree


def chain(p: float, nodes: int = 1, origin: int = Origin.DYNAMIC, batch: int = 1) -> DraftTrees:
    """One chain of tokens 0, 1, 2, ... for each sequence."""
    return DraftTrees(
        (np.arange(batch + 1) * nodes).astype(np.int32),
        np.tile(np.arange(nodes), batch).astype(np.int32),
        np.tile(np.arange(nodes) - 1, batch).astype(np.int32),
        np.full(batch * nodes, math.log(p), np.float32),
        np.full(batch * nodes, int(origin), np.uint32),
    )


def right(count: int, batch: int = 1) -> Verdicts:
    """The first `count` nodes of each chain are right, and then something else comes."""
    return verdicts_of([list(range(count))] * batch, [[*range(count), 999]] * batch)


def probs(calibrator: Calibrator, trees: DraftTrees) -> list[float]:
    return [float(value) for value in np.exp(calibrator.apply(trees).log_probs)]


def test_without_evidence_nothing_changes() -> None:
    trees = chain(0.5, 3)
    assert Calibrator().apply(trees) is trees
    calibrator = Calibrator()
    calibrator.record(DraftTrees.empty(2), verdicts_of([[], []], [[1], [2]]))
    assert calibrator.apply(trees) is trees
    calibrator.record(chain(0.5, origin=Origin.LOOKUP), right(1))
    assert calibrator.apply(trees).log_probs.tolist() == trees.log_probs.tolist()  # of another origin


def test_everything_but_the_estimates_stays() -> None:
    trees = chain(0.5, 3)
    before = trees.log_probs.copy()
    calibrator = Calibrator()
    calibrator.record(trees, right(1))
    corrected = calibrator.apply(trees).validate()
    for name in ("offsets", "tokens", "parents", "origins"):
        assert getattr(corrected, name) is getattr(trees, name)
    assert corrected.log_probs.dtype == np.float32
    assert trees.log_probs.tolist() == before.tolist()
    assert corrected.log_probs.tolist() != before.tolist()


def test_estimates_move_to_what_is_observed() -> None:
    rng = np.random.default_rng(0)
    calibrator, trees = Calibrator(), chain(0.5)
    found = []
    for step in range(1500):
        calibrator.record(trees, right(int(rng.random() < 0.75)))
        if step >= 500:
            found.append(probs(calibrator, trees)[0])
    assert np.mean(found) == pytest.approx(0.75, abs=0.04)
    assert np.std(found) < 0.12
    assert probs(calibrator, chain(0.9))[0] > 0.9  # what the levels have in common


def test_levels_are_told_apart() -> None:
    """Estimates of 0.9 that hold, and of 0.4 that stand for 0.05: no single factor is right for both."""
    rng = np.random.default_rng(1)
    calibrator = Calibrator()
    means = {0.9: [], 0.4: []}
    for step in range(3000):
        for p, true in ((0.9, 0.9), (0.4, 0.05)):
            if step > 1000:
                means[p].append(probs(calibrator, chain(p))[0])
            calibrator.record(chain(p), right(int(rng.random() < true)))
    assert np.mean(means[0.9]) == pytest.approx(0.9, abs=0.04)
    assert np.mean(means[0.4]) < 0.13


def test_by_set_of_origins() -> None:
    calibrator = Calibrator()
    both = Origin.LOOKUP | Origin.LLMA
    for _ in range(200):
        calibrator.record(chain(0.5, origin=Origin.LOOKUP), right(1))
        calibrator.record(chain(0.5, origin=Origin.LLMA), right(0))
    assert probs(calibrator, chain(0.5, origin=Origin.LOOKUP))[0] > 0.95
    assert probs(calibrator, chain(0.5, origin=Origin.LLMA))[0] < 0.05
    assert probs(calibrator, chain(0.5, origin=both))[0] == pytest.approx(0.5)
    for _ in range(200):
        calibrator.record(chain(0.5, origin=both), right(0))
    assert probs(calibrator, chain(0.5, origin=both))[0] < 0.05
    assert probs(calibrator, chain(0.5, origin=Origin.LOOKUP))[0] > 0.95


def test_by_depth() -> None:
    calibrator, trees = Calibrator(), chain(0.5, 4)
    for _ in range(300):
        calibrator.record(trees, right(2))
    one, two, three, four = probs(calibrator, trees)
    assert min(one, two) > 0.9
    assert max(three, four) < 0.1
    assert three == pytest.approx(four)


def test_the_latest_text_counts_most() -> None:
    calibrator, trees = Calibrator(), chain(0.5)
    for _ in range(3000):
        calibrator.record(trees, right(1))
    for _ in range(300):
        calibrator.record(trees, right(0))
    assert probs(calibrator, trees)[0] < 0.2


def test_what_was_not_reached_is_not_judged() -> None:
    calibrator, trees = Calibrator(), chain(0.5, 3)
    for _ in range(100):  # only the first node's token is committed: nothing was verified
        calibrator.record(trees, verdicts_of([[]], [[0]]))
    first, second, _ = probs(calibrator, trees)
    assert first > 0.9
    assert second < first  # shares what is known of the origin, and no more
    calibrator = Calibrator()
    for _ in range(200):  # 1 and 2 come after 7, not after 0
        calibrator.record(trees, verdicts_of([[]], [[7, 1, 2]]))
    first, second, third = probs(calibrator, trees)
    assert first < 0.05
    assert first < second == pytest.approx(third)


def test_a_large_batch_does_not_overshoot() -> None:
    calibrator, trees = Calibrator(), chain(0.5, 40, batch=64)
    for _ in range(60):
        calibrator.record(trees, verdicts_of([list(range(40))] * 48 + [[]] * 16, [[*range(40), 9]] * 48 + [[99]] * 16))
        found = probs(calibrator, trees)
        assert found[0] == pytest.approx(0.75, abs=0.2)
    assert found[0] == pytest.approx(0.75, abs=0.04)
    assert found[39] > 0.95


def test_siblings_never_exceed_one_together() -> None:
    calibrator = Calibrator()
    trees = DraftTrees(
        np.array([0, 3], np.int32),
        np.array([1, 2, 3], np.int32),
        np.array([-1, -1, 0], np.int32),
        np.log([0.5, 0.4, 0.4]).astype(np.float32),
        np.array([1, 2, 2], np.uint32),
    )
    for step in range(200):  # each origin is right whenever it is judged
        calibrator.record(trees, verdicts_of([[step % 2]], [[1 + step % 2, 9]]))
        calibrator.record(chain(0.5, origin=1), right(1))
        calibrator.record(chain(0.5, origin=2), right(1))
    first, second, below = probs(calibrator, trees)
    assert first + second == pytest.approx(1.0, abs=1e-6)
    assert below < 0.2  # never right, and no sibling of theirs


def test_impossible_and_certain_estimates() -> None:
    calibrator = Calibrator()
    trees = chain(0.5, 3)
    trees.log_probs[:] = [0.0, -math.inf, -1e-7]
    for count in (0, 1, 2, 3, 3, 0):
        calibrator.record(trees, verdicts_of([list(range(count))], [[*range(count), 999]]))
        corrected = calibrator.apply(trees).validate().log_probs
        assert corrected[1] == -math.inf
        assert np.isfinite(corrected[[0, 2]]).all()
    for _ in range(400):
        calibrator.record(trees, right(0))
    assert probs(calibrator, trees)[0] < 0.2


def test_more_sets_of_origins_than_there_is_room_for() -> None:
    calibrator = Calibrator()
    for origins in range(1, 100):
        for _ in range(20):
            calibrator.record(chain(0.5, origin=origins), right(int(origins < 50)))
    assert probs(calibrator, chain(0.5, origin=1))[0] > 0.7
    assert probs(calibrator, chain(0.5, origin=99))[0] < 0.3
    assert probs(calibrator, chain(0.5, origin=98)) == probs(calibrator, chain(0.5, origin=2**31))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**9), steps=st.integers(1, 12), batch=st.integers(1, 4))
def test_equal_to_the_slow_twin(seed: int, steps: int, batch: int) -> None:
    rng = np.random.default_rng(seed)
    calibrator, twin = Calibrator(), SlowCalibrator()
    for _ in range(steps):
        trees = DraftTrees.concatenate([random_tree(rng, 4, 20) for _ in range(batch)])
        trees.origins[:] = rng.integers(1, 4, trees.num_nodes)
        corrected = calibrator.apply(trees).validate()
        np.testing.assert_allclose(np.exp(corrected.log_probs), twin.apply(trees), atol=1e-5)
        committed = [rng.integers(0, 4, rng.integers(0, 8)).tolist() for _ in range(batch)]
        verdicts = verdicts_of([[] for _ in committed], committed)
        calibrator.record(trees, verdicts)
        twin.record(trees, verdicts)


class RatioByDepth:
    """What the guard did before: observed over expected acceptance by depth, fading, drawn to the mean and to 1."""

    def __init__(self) -> None:
        self.expected, self.accepted = np.zeros(5), np.zeros(5)

    @staticmethod
    def row(depth: int) -> int:
        return min(4, math.ceil(math.log2(depth)))

    def prob(self, p: float, depth: int) -> float:
        pooled = (self.accepted.sum() + 4) / (self.expected.sum() + 4)
        row = self.row(depth)
        return float(min(1.0, p * (self.accepted[row] + 4 * pooled) / (self.expected[row] + 4)))

    def record(self, trials: list[tuple[float, int, bool]]) -> None:
        self.expected *= 0.995
        self.accepted *= 0.995
        for p, depth, right in trials:
            self.expected[self.row(depth)] += p
            self.accepted[self.row(depth)] += right


def scores(estimates: list[float], outcomes: list[bool]) -> np.ndarray:
    """Log loss and Brier score."""
    p, y = np.clip(estimates, 1e-4, 1 - 1e-4), np.array(outcomes)
    return np.array([-np.log(np.where(y, p, 1 - p)).mean(), ((p - y) ** 2).mean()])


def steps_of(file: str, spec: str, limit: int) -> Iterator[tuple[DraftTrees, Verdicts]]:
    drafter = build_drafter(spec)
    for trace in list(read_traces(data_path("traces", f"{file}.jsonl")))[:limit]:
        recorded = trace.output_ids.tolist()
        drafter.open(0, trace.prompt_ids)
        at, path = 1, []
        drafter.observe([0], verdicts_of([[]], [recorded[:1]]))
        while at < len(recorded):
            trees = drafter.propose([0], np.array([40], np.int32))
            path, node = [], -1
            for child in range(trees.num_nodes):
                if trees.parents[child] == node and recorded[at + len(path) :][:1] == [trees.tokens[child]]:
                    path.append(child)
                    node = child
            verdicts = verdicts_of([path], [recorded[at : at + len(path) + 1]])
            yield trees, verdicts
            drafter.observe([0], verdicts)
            at += len(path) + 1
        drafter.close(0)


@pytest.mark.data
@pytest.mark.parametrize("file", ["vicuna-7b.spec_bench.dev", "mistral-7b.mixed.dev"])
@pytest.mark.parametrize("spec", ["suffix", "lookup"])
def test_better_than_the_estimates_and_than_one_factor_a_depth(file: str, spec: str) -> None:
    calibrator, ratio = Calibrator(), RatioByDepth()
    raw, corrected, scaled, outcomes = [], [], [], []
    for trees, verdicts in steps_of(file, spec, 60):
        better = np.exp(calibrator.apply(trees).log_probs)
        trials = [(float(np.exp(trees.log_probs[n])), depth, hit) for n, depth, hit in judged(trees, verdicts)]
        for (n, depth, hit), (p, _, _) in zip(judged(trees, verdicts), trials, strict=True):
            raw.append(p)
            corrected.append(float(better[n]))
            scaled.append(ratio.prob(p, depth))
            outcomes.append(hit)
        calibrator.record(trees, verdicts)
        ratio.record(trials)
    ours = scores(corrected, outcomes)
    assert np.all(ours < 0.99 * scores(raw, outcomes))
    assert np.all(ours < 0.995 * scores(scaled, outcomes))
