from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from datafiles import data_path
from outpace.bench import Trace, read_traces, replay_traces
from outpace.draft import Signals
from outpace.draft.none import NoneDrafter
from outpace.errors import ConfigError
from outpace.tree import DraftTrees, Int32Array, Verdicts


class Scripted(NoneDrafter):
    """Proposes the same tree at every step, and notes what it observes."""

    def __init__(self, tokens: list[int], parents: list[int], log_probs: list[float]) -> None:
        super().__init__()
        self.tree = DraftTrees(
            np.array([0, len(tokens)], np.int32),
            np.array(tokens, np.int32),
            np.array(parents, np.int32),
            np.array(log_probs, np.float32),
            np.ones(len(tokens), np.uint32),
        ).validate()
        self.seen: list[tuple[list[int], list[int]]] = []
        self.prompts: list[list[int]] = []

    def open(self, key: int, tokens: Int32Array, namespace: str = "") -> None:
        super().open(key, tokens, namespace)
        if namespace == "":
            self.prompts.append(tokens.tolist())
        else:
            self.warm_up = True

    def propose(self, keys: Sequence[int], caps: Int32Array) -> DraftTrees:
        return self.tree

    def observe(self, keys: Sequence[int], verdicts: Verdicts, signals: Signals | None = None) -> None:
        if self.prompts:
            self.seen.append((verdicts.path_of(0).tolist(), verdicts.tokens_of(0).tolist()))


def trace(prompt: list[int], output: list[int], category: str = "a") -> Trace:
    return Trace(np.array(prompt, np.int32), np.array(output, np.int32), category)


def test_worked_example() -> None:
    # under the root 7 or 9, after 7 comes 8, after 9 comes 9
    drafter = Scripted([7, 9, 8, 9], [-1, -1, 0, 1], [-1.0, -0.1, -0.1, -0.1])
    result = replay_traces([trace([1, 2], [5, 7, 8, 3, 9, 4, 4, 7, 8])], drafter)
    assert drafter.prompts == [[1, 2]]
    assert drafter.seen == [
        ([], [5]),  # as prefill gives it
        ([0, 2], [7, 8, 3]),
        ([1], [9, 4]),
        ([], [4]),
        ([0, 2], [7, 8]),  # the recorded end: nothing after it is accepted, and there is no bonus token
    ]
    assert (result.steps, result.tokens, result.traces) == (4, 8, 1)
    assert result.mean_accepted_tokens == 2.0
    assert result.nodes_per_step == 4.0


def test_tokens_past_the_recorded_end_do_not_count() -> None:
    drafter = Scripted([4, 4, 4, 4, 4], [-1, 0, 1, 2, 3], [-0.1] * 5)
    result = replay_traces([trace([1], [4, 4, 4, 4])], drafter)
    assert drafter.seen == [([], [4]), ([0, 1, 2], [4, 4, 4])]
    assert (result.steps, result.tokens) == (1, 3)


def test_max_nodes_keeps_the_most_probable() -> None:
    tree = ([7, 9, 8], [-1, -1, 0], [-1.0, -0.1, -0.1])
    output = [5, 9, 3, 7, 8]
    figures = replay_traces([trace([1], output)], Scripted(*tree), 1).to_json()
    assert figures | {"draft_us_per_step": 0, "reduce_us_per_step": 0} == {
        "drafter": "none",
        "mean_accepted_tokens": 4 / 3,  # 9 and its bonus token; 7; 8
        "by_category": {"a": 4 / 3},
        "nodes_per_step": 1.0,
        "draft_us_per_step": 0,
        "steps": 3,
        "tokens": 4,
        "traces": 1,
        "max_nodes": 1,
        "budget": None,
        "memory": False,
        "corpora": (),
        "reduce_us_per_step": 0,
        "memory_us_per_step": 0.0,
        "calibration": None,
    }
    unlimited = replay_traces([trace([1], output)], Scripted(*tree))
    assert (unlimited.steps, unlimited.nodes_per_step) == (2, 3.0)
    nothing = replay_traces([trace([1], output)], Scripted(*tree), 0)
    assert (nothing.mean_accepted_tokens, nothing.nodes_per_step) == (1.0, 0.0)
    with pytest.raises(ConfigError, match="max_nodes must be at least 0, found -1"):
        replay_traces([], "none", -1)


def test_categories_and_outputs_of_one_token() -> None:
    traces = [trace([1, 2, 3, 1], [2, 3, 1, 2, 3], "loop"), trace([1], [9], "short"), trace([1], [8, 7, 6], "new")]
    result = replay_traces(traces, "suffix")
    assert result.by_category == {"loop": 4.0, "new": 1.0, "short": 0.0}
    assert (result.steps, result.tokens) == (3, 6)
    assert replay_traces([], "suffix").mean_accepted_tokens == 0.0


def test_plain_decoding_is_one() -> None:
    rng = np.random.default_rng(0)
    traces = [trace([1, 2], rng.integers(0, 9, 50).tolist()) for _ in range(3)]
    result = replay_traces(traces, "none")
    assert (result.mean_accepted_tokens, result.nodes_per_step, result.steps) == (1.0, 0.0, 147)
    assert result.draft_us_per_step > 0


def test_oracle_learns_the_recorded_outputs() -> None:
    rng = np.random.default_rng(1)
    traces = [trace(rng.integers(0, 999, 5).tolist(), rng.integers(0, 999, 300).tolist()) for _ in range(6)]
    none, some, most = (replay_traces(traces, f"oracle({p})").mean_accepted_tokens for p in (0, 0.3, 0.8))
    assert none == 1.0
    assert some == pytest.approx(1 / 0.7, rel=0.1)  # 1 + p + p^2 + ...
    assert 3.5 < most < 5.0  # less than 5, for the tree's room ends
    assert replay_traces(traces, "oracle(.3)").mean_accepted_tokens == some


def test_any_drafter_commits_every_recorded_token() -> None:
    rng = np.random.default_rng(2)
    traces = [trace([1, 2], rng.integers(0, 3, int(n)).tolist()) for n in rng.integers(1, 80, 10)]
    expected = sum(len(t.output_ids) - 1 for t in traces)
    for spec in ("none", "lookup", "llma", "suffix", "suffix(full_draft=true)", "oracle(.5)"):
        for max_nodes in (64, 3):
            assert replay_traces(traces, spec, max_nodes).tokens == expected


@pytest.mark.data
@pytest.mark.parametrize(
    ("file", "lookup", "suffix", "full"),
    [("vicuna-7b.spec_bench.dev", 1.760, 1.819, 1.801), ("mistral-7b.mixed.dev", 1.774, 1.823, 1.807)],
)
def test_figures_on_recorded_outputs(file: str, lookup: float, suffix: float, full: float) -> None:
    traces = list(read_traces(data_path("traces", f"{file}.jsonl")))
    assert replay_traces(traces, "lookup").mean_accepted_tokens == pytest.approx(lookup, abs=0.005)
    longest = replay_traces(traces, "suffix").mean_accepted_tokens
    assert suffix <= longest <= suffix + 0.005
    assert replay_traces(traces, "suffix(full_draft=true)").mean_accepted_tokens == pytest.approx(full, abs=0.002)
