"""The guard on made-up step times and verdicts: what it cuts, what it keeps, and when it looks again."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.reduce import Calibrator, Guard, select
from outpace.reduce.guard import StepTimes
from outpace.tree import DraftTrees, Origin, Verdicts
from outpace.verify import verdicts_of

Cost = Callable[[int], float]
NODES = 16


def flat(_num_tokens: int) -> float:
    return 0.010


def steep(num_tokens: int) -> float:
    return 0.010 * num_tokens


def chains(batch: int = 1, nodes: int = NODES, p: float = 0.8, origin: Origin = Origin.DYNAMIC) -> DraftTrees:
    """One chain of tokens 0, 1, 2, ... for each sequence."""
    return DraftTrees(
        (np.arange(batch + 1) * nodes).astype(np.int32),
        np.tile(np.arange(nodes), batch).astype(np.int32),
        np.tile(np.arange(nodes) - 1, batch).astype(np.int32),
        np.full(batch * nodes, math.log(p), np.float32),
        np.full(batch * nodes, int(origin), np.uint32),
    )


def accept(verified: DraftTrees, right: list[int]) -> Verdicts:
    """The model's text begins with `right[b]` tokens of chain `b`; as many as were verified are accepted."""
    paths = [list(range(min(n, int(size)))) for n, size in zip(right, verified.sizes, strict=True)]
    bonus = [len(path) if len(path) < n else 999 for n, path in zip(right, paths, strict=True)]
    return verdicts_of(paths, [[*path, token] for path, token in zip(paths, bonus, strict=True)])


def run(
    guard: Guard,
    trees: DraftTrees,
    cost: Cost,
    true_counts: Callable[[int], int],
    steps: int,
    draft_seconds: float = 0.0,
    calibrator: Calibrator | None = None,
) -> list[int]:
    """What the guard allows, step after step; `true_counts(step)` nodes of each chain are right."""
    batch = trees.batch_size
    calibrator = calibrator or Calibrator()
    allowed = []
    for step in range(steps):
        limit = guard.limit(calibrator.apply(trees), batch)
        assert 0 <= limit <= trees.num_nodes
        allowed.append(limit)
        verified = select(trees, NODES, total=limit)
        guard.record_step(batch, batch + limit, cost(batch + limit), draft_seconds)
        calibrator.record(trees, accept(verified, [true_counts(step)] * batch))
    return allowed


def share_of_plain_steps(allowed: list[int]) -> float:
    return sum(limit == 0 for limit in allowed) / len(allowed)


def test_the_first_steps_are_plain_so_that_there_is_something_to_compare_with() -> None:
    assert run(Guard(), chains(), flat, lambda _: NODES, 6) == [0, 0, 0, NODES, NODES, NODES]


@pytest.mark.parametrize("batch", [1, 5, 8])
def test_free_nodes_are_all_verified(batch: int) -> None:
    allowed = run(Guard(), chains(batch), flat, lambda _: NODES, 1000)
    assert set(allowed) == {0, batch * NODES}
    assert share_of_plain_steps(allowed) < 0.02


@pytest.mark.parametrize("batch", [1, 8])
def test_nodes_that_cost_as_much_as_a_step_are_cut_to_none(batch: int) -> None:
    # A node is accepted half of the time: 1.5 tokens for the time of two.
    allowed = run(Guard(), chains(batch, p=0.5), steep, lambda step: step % 2, 1000)
    assert share_of_plain_steps(allowed) > 0.95


def test_right_drafts_are_kept_where_nodes_cost_half_a_step() -> None:
    allowed = run(Guard(), chains(p=0.99), lambda n: 0.010 + 0.005 * (n - 1), lambda _: NODES, 500)
    # 13 nodes give 1.867 tokens for the time of one, all 16 give 1.889: estimates stay a little under 1.
    assert np.mean(allowed[-100:]) > 0.8 * NODES


def test_never_accepted_drafts_end_where_nodes_cost_anything() -> None:
    allowed = run(Guard(), chains(p=0.9), lambda n: 0.010 + 0.001 * (n - 1), lambda _: 0, 1000)
    assert share_of_plain_steps(allowed[100:]) > 0.95


def test_a_step_in_the_time_curve_is_found() -> None:
    # Up to 8 tokens cost as much as one, more cost four times as much.
    allowed = run(Guard(), chains(p=0.8), lambda n: 0.010 if n <= 8 else 0.040, lambda step: step % 5, 2000)
    assert 3 <= np.median(allowed[500:]) <= 7  # three nodes hold nine tenths of what seven would give


def test_drafts_come_back_when_the_machine_has_become_faster() -> None:
    guard, calibrator = Guard(), Calibrator()
    slow = run(guard, chains(p=0.5), steep, lambda step: step % 2, 1000, calibrator=calibrator)
    assert share_of_plain_steps(slow[-100:]) > 0.9
    fast = run(guard, chains(p=0.5), flat, lambda step: step % 2, 2500, calibrator=calibrator)
    assert share_of_plain_steps(fast[-500:]) < 0.05


def test_drafts_end_when_plain_steps_turn_out_faster_than_they_seemed() -> None:
    guard, calibrator = Guard(), Calibrator()
    # The first plain steps are slow (caches are cold), so everything behind them looks free.
    cold = run(guard, chains(p=0.5), lambda n: 0.100, lambda step: step % 2, 4, calibrator=calibrator)
    assert cold[-1] == NODES
    warm = run(guard, chains(p=0.5), steep, lambda step: step % 2, 1500, calibrator=calibrator)
    assert share_of_plain_steps(warm[-500:]) > 0.9


def test_one_slow_drafted_step_does_not_end_drafting() -> None:
    guard = Guard()
    run(guard, chains(), flat, lambda _: NODES, 3)
    first = run(guard, chains(), lambda n: 2.0 if n > 1 else 0.010, lambda _: NODES, 1)  # a compilation, say
    assert first == [NODES]
    after = run(guard, chains(), flat, lambda _: NODES, 200)
    assert share_of_plain_steps(after[40:]) < 0.05


def test_drafting_time_is_no_reason_to_verify_less() -> None:
    # It is spent before the guard is asked: plain steps would pay for it too.
    def cost(n: int) -> float:
        return 0.010 + 0.0001 * (n - 1)

    allowed = run(Guard(), chains(p=0.5), cost, lambda step: step % 2, 300, draft_seconds=0.050)
    assert share_of_plain_steps(allowed[3:]) < 0.1


def test_gains_count_the_nodes_that_select_keeps() -> None:
    # 7 (0.5) -> 8 (0.9) beside 9 (0.4): 0.5, then 0.45, then 0.4.
    trees = DraftTrees(
        np.array([0, 3], np.int32),
        np.array([7, 8, 9], np.int32),
        np.array([-1, 0, -1], np.int32),
        np.log([0.5, 0.9, 0.4]).astype(np.float32),
        np.full(3, int(Origin.DYNAMIC), np.uint32),
    )
    assert Guard().expected_gains(trees) == pytest.approx([0.5, 0.95, 1.35])


def test_one_good_sequence_beside_bad_ones() -> None:
    """The best nodes of the whole batch compete: the limit is about what the good sequence's chain holds."""
    guard, calibrator = Guard(), Calibrator()
    parts = [chains(1, 8, 0.99, Origin.LOOKUP), chains(1, 8, 0.05, Origin.DYNAMIC), chains(1, 8, 0.05, Origin.DYNAMIC)]
    trees = DraftTrees.concatenate(parts)
    allowed = []
    for _ in range(300):
        calibrated = calibrator.apply(trees)
        limit = guard.limit(calibrated, 3)
        allowed.append(limit)
        guard.record_step(3, 3 + limit, 0.010 + 0.002 * limit, 0.0)
        kept = select(calibrated, 8, total=limit)
        calibrator.record(trees, accept(kept, [8, 0, 0]))
    assert 6 <= np.median(allowed) <= 10
    assert select(trees, 8, total=8).sizes.tolist() == [8, 0, 0]


def test_nothing_drafted_needs_no_estimate() -> None:
    assert Guard().limit(DraftTrees.empty(3), 3) == 0


def test_prompts_in_the_pass_without_any_measurement() -> None:
    guard = Guard()
    run(guard, chains(2), flat, lambda _: NODES, 10)
    assert guard.limit(chains(2), 900) == 0


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    batch=st.integers(1, 40),
    nodes=st.integers(1, NODES),
    p=st.floats(0.0001, 1.0),
)
def test_whatever_was_measured_the_limit_stays_within_the_trees(seed: int, batch: int, nodes: int, p: float) -> None:
    rng = np.random.default_rng(seed)
    guard, calibrator, drafted = Guard(), Calibrator(), chains(batch, nodes, p)
    for _ in range(12):
        pending = batch if rng.random() < 0.8 else batch + int(rng.integers(1, 3000))
        trees = calibrator.apply(drafted)
        limit = guard.limit(trees, pending)
        assert 0 <= limit <= trees.num_nodes
        if pending == batch:
            guard.record_step(batch, batch + limit, float(rng.exponential(0.01)), float(rng.exponential(0.001)))
        calibrator.record(drafted, accept(drafted, rng.integers(0, nodes + 1, batch).tolist()))
        gains = guard.expected_gains(trees)
        assert np.isfinite(gains).all()
        assert np.all(np.diff(gains) >= -1e-12)
        assert gains[-1] <= trees.num_nodes + 1e-9


def test_a_size_that_was_forgotten_is_known_by_its_new_times_alone() -> None:
    times = StepTimes()
    sizes = np.array([1, 9], np.int64)
    for _ in range(9):
        times.record(1, 0.010, now=0)
        times.record(9, 0.100, now=0)
    assert times.curve(sizes, now=1) == pytest.approx([0.010, 0.100])
    times.record(1, 0.010, now=600)
    assert times.curve(sizes, now=600) == pytest.approx([0.010, 0.010])  # nobody knows what 9 cost now
    times.record(9, 0.020, now=600)
    assert times.curve(sizes, now=601) == pytest.approx([0.010, 0.020])
