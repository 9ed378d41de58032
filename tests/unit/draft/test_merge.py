from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from drafting import committed, draft_one, texts
from mergetwin import nodes_by_path
from outpace.draft import Drafter, NoneDrafter, SignalNeeds, Signals, build_drafter
from outpace.draft.merge import MergeDrafter
from outpace.draft.union import unite
from outpace.errors import ConfigError, DrafterError, LifecycleError
from outpace.tree import DraftTrees, Int32Array, Origin, Verdicts

CAP = np.array([1000], np.int32)
PROMPT = np.array([1, 2, 3, 4, 1, 2], np.int32)


class Watching(NoneDrafter):
    """Notes what it is told; raises where it is told to."""

    name = "watching"

    def __init__(self, top_k: int = 0, layers: tuple[str, ...] = (), fails: str = "") -> None:
        super().__init__()
        self.needs = SignalNeeds(top_k, layers)
        self.fails = fails
        self.calls: list[tuple[Any, ...]] = []
        self.signals: list[Signals | None] = []

    def _note(self, call: str, *args: Any) -> None:
        self.calls.append((call, *args))
        if call == self.fails:
            raise ZeroDivisionError("oops")

    def open(self, key: int, tokens: Int32Array, namespace: str = "") -> None:
        self._note("open", key, namespace)
        super().open(key, tokens, namespace)

    def propose(self, keys: Sequence[int], caps: Int32Array) -> DraftTrees:
        self._note("propose", list(keys), caps.tolist())
        return super().propose(keys, caps)

    def observe(self, keys: Sequence[int], verdicts: Verdicts, signals: Signals | None = None) -> None:
        self.signals.append(signals)
        self._note("observe", list(keys), verdicts.tokens.tolist())

    def close(self, key: int) -> None:
        super().close(key)
        self._note("close", key)

    def recomputed(self, key: int) -> None:
        self._note("recomputed", key)

    def fork(self, key: int, new_key: int) -> None:
        self._note("fork", key, new_key)
        super().fork(key, new_key)


def test_shared_prefixes_are_there_once() -> None:
    parts = [draft_one(spec, PROMPT) for spec in ("suffix", "lookup(draft_size=2)")]
    assert [part.tokens.tolist() for part in parts] == [[3, 4, 1, 2], [3, 4]]
    trees = draft_one("merge[suffix, lookup(draft_size=2)]", PROMPT)
    assert trees.tokens.tolist() == [3, 4, 1, 2]
    both = int(Origin.DYNAMIC | Origin.LOOKUP)
    assert trees.origins.tolist() == [both, both, int(Origin.DYNAMIC), int(Origin.DYNAMIC)]
    for node, (a, b) in enumerate(zip(parts[0].log_probs[:2], parts[1].log_probs, strict=True)):
        assert min(a, b) <= trees.log_probs[node] <= max(a, b)
    np.testing.assert_allclose(trees.log_probs[2:], parts[0].log_probs[2:], rtol=1e-5)


def test_the_example_of_the_formula() -> None:
    def part(tokens: list[int], chances: list[float]) -> DraftTrees:
        size = len(tokens)
        return DraftTrees(
            np.array([0, size], np.int32),
            np.array(tokens, np.int32),
            np.full(size, -1, np.int32),
            np.log(chances).astype(np.float32),
            np.ones(size, np.uint32),
        )

    trees = unite([part([7], [0.9]), part([7, 8], [0.5, 0.3])])
    assert trees.tokens.tolist() == [7, 8]
    np.testing.assert_allclose(np.exp(trees.log_probs), [0.86, 0.084], rtol=1e-5)
    sure = unite([part([7], [1.0]), part([8], [1.0])])  # a contradiction, but no error
    assert np.isfinite(sure.log_probs).all()
    assert np.exp(sure.log_probs).sum() <= 1 + 1e-6


def test_agreement_is_learned() -> None:
    merge = build_drafter("merge[suffix, lookup]")
    text = np.tile(np.arange(1, 9, dtype=np.int32), 40)
    merge.open(0, text[:20])
    first = merge.propose([0], CAP)
    for at in range(20, 200):
        merge.observe([0], committed([text[at : at + 1]]))
        last = merge.propose([0], CAP)
    assert last.log_probs[0] > math.log(0.95) > first.log_probs[0]


def test_parts_see_what_they_asked_for() -> None:
    parts = [Watching(), Watching(8), Watching(3, ("a", "b")), Watching(0, ("b", "c"))]
    merge = MergeDrafter(parts)
    assert merge.needs == SignalNeeds(8, ("a", "b", "c"))
    merge.open(5, PROMPT, "tenant")
    merge.propose([5], np.array([9], np.int32))
    top = np.arange(16, dtype=np.int32).reshape(2, 8)
    hidden = {layer: torch.zeros(2, 4) for layer in "abc"}
    shown = Signals(np.array([0, 2], np.int32), np.zeros(1, np.int32), np.array([1, 2], np.int32), top, hidden)
    merge.observe([5], committed([[3, 4]]), shown)
    merge.recomputed(5)
    merge.fork(5, 6)
    merge.close(5)
    for part in parts:
        assert part.calls == [
            ("open", 5, "tenant"),
            ("propose", [5], [9]),
            ("observe", [5], [3, 4]),
            ("recomputed", 5),
            ("fork", 5, 6),
            ("close", 5),
        ]
    seen = [part.signals[0] for part in parts]
    assert seen[0] is None
    widths = [None if s is None or s.top_ids is None else s.top_ids.shape[1] for s in seen]
    assert widths == [None, 8, 3, None]
    assert [sorted(s.hidden) if s else [] for s in seen] == [[], [], ["a", "b"], ["b", "c"]]
    assert seen[2] is not None
    assert seen[2].top_ids is not None
    assert seen[2].top_ids.tolist() == [[0, 1, 2], [8, 9, 10]]
    assert not MergeDrafter([Watching()]).needs.top_k


@pytest.mark.parametrize("call", ["open", "propose", "observe", "fork", "recomputed", "close"])
def test_an_error_of_a_part_names_it_and_leaves_the_parts_in_step(call: str) -> None:
    parts = [Watching(), Watching(fails=call), Watching()]
    merge = MergeDrafter(parts)

    def run(name: str) -> None:
        if name == "open":
            merge.open(1, PROMPT)
        elif name == "propose":
            merge.propose([1], CAP)
        elif name == "observe":
            merge.observe([1], committed([[3]]))
        elif name == "fork":
            merge.fork(1, 2)
        else:
            getattr(merge, name)(1)

    if call != "open":
        run("open")
    with pytest.raises(
        DrafterError, match=f"merge: drafter 'watching': {call} raised ZeroDivisionError: oops"
    ) as caught:
        run(call)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    for part in parts:
        part.fails = ""
    keys = {"open": [], "close": []}.get(call, [1])
    assert [sorted(part._sequences) for part in parts] == [keys] * 3
    assert sorted(merge._sequences) == keys
    if call in ("observe", "close", "recomputed"):
        assert parts[2].calls[-1][0] == call


class Malformed(NoneDrafter):
    name = "malformed"
    trees: Any = None

    def propose(self, keys: Sequence[int], caps: Int32Array) -> DraftTrees:
        trees: DraftTrees = self.trees
        return trees


@pytest.mark.parametrize(
    "problem", ["found NoneType", "a sibling holds the same token", "for each of 1 sequences, found 2"]
)
def test_malformed_trees_of_a_part(problem: str) -> None:
    part = Malformed()
    merge = MergeDrafter([build_drafter("suffix"), part])
    merge.open(0, PROMPT)
    if "sibling" in problem:
        twice = np.array([4, 4], np.int32)
        part.trees = DraftTrees(
            np.array([0, 2], np.int32), twice, -np.ones(2, np.int32), -np.ones(2, np.float32), np.ones(2, np.uint32)
        )
    elif "found 2" in problem:
        part.trees = DraftTrees.empty(2)
    with pytest.raises(DrafterError, match=f"merge: .*malformed.*{problem}"):
        merge.propose([0], CAP)


def test_parts_are_checked() -> None:
    drafter = build_drafter("suffix")
    for parts, problem in (
        ([], "expected 1 to 8 drafters, found 0"),
        ([build_drafter("none") for _ in range(9)], "found 9"),
        ([drafter, drafter], "given twice"),
        (["suffix"], "expected drafters, found str"),
    ):
        with pytest.raises(ConfigError, match=problem):
            MergeDrafter(parts)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="1 to 8 others"):
        build_drafter(f"merge[{', '.join(['none'] * 9)}]")
    default = build_drafter("merge")
    assert isinstance(default, MergeDrafter)
    assert [part.name for part in default.parts] == ["suffix", "recycling"]


def test_misuse_raises_before_any_part_is_asked() -> None:
    part = Watching()
    merge: Drafter = MergeDrafter([part])
    merge.open(1, PROMPT)
    with pytest.raises(LifecycleError, match="already open"):
        merge.open(1, PROMPT)
    with pytest.raises(LifecycleError, match="already open"):
        merge.fork(1, 1)
    for call in (
        lambda: merge.close(2),
        lambda: merge.fork(2, 3),
        lambda: merge.propose([2], CAP),
        lambda: merge.observe([2], committed([[1]])),
    ):
        with pytest.raises(LifecycleError, match="sequence 2 is not open"):
            call()
    assert [call[0] for call in part.calls] == ["open"]


def test_sequences_that_were_not_drafted_for_are_told_apart() -> None:
    one, other = (build_drafter("merge[suffix, lookup]") for _ in range(2))
    prompts = texts(3, seed=2)
    for key, prompt in enumerate(prompts):
        one.open(key, prompt)
        other.open(key, prompt)
    for step in range(30):
        one.propose([2, 0], np.array([40, 40], np.int32))
        other.propose([2, 0], np.array([40, 40], np.int32))
        first, second, third = ([step % 3], [7, step % 2, 1], [2])
        one.observe([0, 1, 2], committed([first, second, third]))
        other.observe([2, 0], committed([third, first]))
        other.observe([1], committed([second]))
    caps = np.array([40, 40, 40], np.int32)
    expected, found = other.propose([0, 1, 2], caps), one.propose([0, 1, 2], caps)
    for index in range(3):
        assert nodes_by_path(found, index) == nodes_by_path(expected, index)


def test_a_part_that_is_nearly_impossible_stays_so() -> None:
    """Its odds vanish beside those of a sure part; what is left of them must not become a certainty, or no number."""
    sure = trees_of([7], [math.log(0.98)])
    for log_prob in (-35.0, -80.0, -800.0, -math.inf):
        united = unite([sure, trees_of([8], [log_prob])]).validate()
        assert united.tokens.tolist() == [7, 8]
        assert united.log_probs[1] < -10
        assert np.isfinite(united.log_probs).all()


def trees_of(tokens: list[int], log_probs: list[float]) -> DraftTrees:
    count = len(tokens)
    return DraftTrees(
        np.array([0, count], np.int32),
        np.array(tokens, np.int32),
        np.full(count, -1, np.int32),
        np.array(log_probs, np.float32),
        np.ones(count, np.uint32),
    )
