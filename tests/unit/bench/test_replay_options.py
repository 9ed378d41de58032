"""Memory, corpora, budget and calibration in replays."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from datafiles import data_path
from outpace.bench import Trace, read_traces, replay_traces
from outpace.bench.replay import start_replay
from outpace.draft.none import NoneDrafter
from outpace.errors import ConfigError
from outpace.tree import DraftTrees, Int32Array


class Chains(NoneDrafter):
    """Proposes 0 1 2 ... down to the cap, each with the same estimate."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.caps = p, set()

    def propose(self, keys: Sequence[int], caps: Int32Array) -> DraftTrees:
        self.caps.add(int(caps[0]))
        size = min(8, int(caps[0]))
        return DraftTrees(
            np.array([0, size], np.int32),
            np.arange(size, dtype=np.int32),
            np.arange(-1, size - 1, dtype=np.int32),
            np.full(size, math.log(self.p), np.float32),
            np.ones(size, np.uint32),
        )


def trace(prompt: list[int], output: list[int], category: str = "a") -> Trace:
    return Trace(np.array(prompt, np.int32), np.array(output, np.int32), category)


def chance(count: int, seed: int, tokens: int = 120) -> list[Trace]:
    rng = np.random.default_rng(seed)
    return [trace([1, 2], rng.integers(0, 5, tokens).tolist()) for _ in range(count)]


def test_a_drafter_is_asked_for_no_more_than_may_be_verified() -> None:
    drafter = Chains(0.5)
    assert replay_traces(chance(1, 0), drafter, 3).nodes_per_step == 3.0
    assert drafter.caps == {3}
    assert replay_traces(chance(1, 0), drafter).max_nodes == 64
    assert drafter.caps == {3, 64}


@pytest.mark.parametrize("budget", [0.0, 0.7, 2.0, 5.5])
def test_the_mean_stays_within_the_budget_at_every_moment(budget: float) -> None:
    traces = chance(6, 1)
    run = start_replay("suffix", traces, budget=budget)
    for one in traces:
        run.add(one)
        assert run.result.nodes_per_step <= budget
    assert run.result.budget == budget
    assert run.result.nodes_per_step >= 0.7 * budget
    assert run.result.tokens == sum(len(one.output_ids) - 1 for one in traces)


def test_earlier_outputs_draft_for_later_traces_of_their_namespace() -> None:
    answer = list(range(10, 40))
    traces = [trace([1], answer), trace([2], answer), trace([3], list(range(50, 60)))]
    alone = replay_traces(traces, "suffix-tree")
    fed = replay_traces(traces, "suffix-tree", memory=True)
    assert alone.mean_accepted_tokens == 1.0
    assert (alone.memory, alone.memory_us_per_step) == (False, 0.0)
    assert fed.mean_accepted_tokens > 1.5
    assert fed.memory
    assert fed.memory_us_per_step > 0
    run = start_replay("suffix-tree", traces, memory=True)
    for index, one in enumerate(traces):  # each has a namespace of its own
        run.add(one, str(index))
    assert run.result.mean_accepted_tokens == 1.0


def test_a_replay_with_memory_is_the_same_every_time() -> None:
    traces = chance(8, 2)
    figures = [replay_traces(traces, "suffix-tree", 16, memory=True, budget=6.0) for _ in range(2)]
    assert figures[0].mean_accepted_tokens == figures[1].mean_accepted_tokens
    assert figures[0].nodes_per_step == figures[1].nodes_per_step


def test_a_drafter_that_is_built_cannot_be_fed() -> None:
    with pytest.raises(ConfigError, match="name it by a spec"):
        replay_traces([], NoneDrafter(), memory=True)
    with pytest.raises(ConfigError, match="a budget must be a number of nodes a step"):
        replay_traces([], "none", budget=-1.0)


def test_calibration_is_counted() -> None:
    output = [9, *([0, 1, 2, 9] * 300)]
    result = replay_traces([trace([9], output)], Chains(0.5), calibration=True)
    assert result.calibration is not None
    everything, own = result.calibration
    assert (everything.origins, own.origins) == ("all", "lookup")
    assert everything.raw == own.raw
    assert everything.raw.nodes == 300 * 4  # three that are right, and the one after them
    assert [(b.low, b.nodes, b.observed) for b in everything.raw.buckets] == [(0.5, 1200, 0.75)]
    assert everything.raw.calibration_error == pytest.approx(0.25, abs=1e-6)
    assert everything.corrected.nodes == 1200
    assert everything.corrected.calibration_error < 0.1
    assert everything.corrected.brier < everything.raw.brier
    assert everything.corrected.log_loss < everything.raw.log_loss
    assert replay_traces([trace([9], output)], "none", calibration=True).calibration == ()


@pytest.mark.data
@pytest.mark.parametrize("file", ["vicuna-7b.spec_bench.dev", "mistral-7b.mixed.dev"])
def test_calibration_helps_on_recorded_outputs(file: str) -> None:
    traces = list(read_traces(data_path("traces", f"{file}.jsonl")))[:80]
    for spec in ("suffix", "lookup"):
        found = replay_traces(traces, spec, calibration=True).calibration
        assert found is not None
        assert found[0].corrected.calibration_error < found[0].raw.calibration_error
        assert found[0].corrected.log_loss < found[0].raw.log_loss


@pytest.mark.data
def test_a_budget_beats_a_cap_of_as_many_nodes() -> None:
    traces = list(read_traces(data_path("traces", "vicuna-7b.spec_bench.dev.jsonl")))
    capped = replay_traces(traces, "suffix", 4)
    budgeted = replay_traces(traces, "suffix", budget=capped.nodes_per_step)
    assert budgeted.nodes_per_step <= capped.nodes_per_step
    assert budgeted.mean_accepted_tokens > capped.mean_accepted_tokens - 0.01
