"""Trees from all contexts against a search through plain lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contextstwin import Twin
from drafting import committed
from outpace.draft import build_drafter
from outpace.draft.escape import CORPUS, MEMORY
from outpace.draft.sources import Sources
from outpace.draft.suffix_tree import SuffixTreeDrafter
from outpace.suffix.frozen import FrozenAutomaton
from outpace.suffix.memory import ResponseMemory
from outpace.tree import DraftTrees

LEAST = 1e-3


class _Corpus:
    """Documents that stand for an opened corpus."""

    def __init__(self, documents: list[list[int]]) -> None:
        offsets = np.cumsum([0, *map(len, documents)])
        self.shards = (FrozenAutomaton.build(np.concatenate(documents).astype(np.int32), offsets),)


def _drafter(memory: list[list[list[int]]], corpus: list[list[int]]) -> SuffixTreeDrafter:
    """A drafter with one segment of the memory for each list of responses."""
    sources = Sources(ResponseMemory(), (_Corpus(corpus),) if corpus else ())  # type: ignore[arg-type]
    segments = tuple(_Corpus(documents).shards[0] for documents in memory)
    sources.memory.segments = lambda namespace: segments  # type: ignore[method-assign, union-attr]
    return SuffixTreeDrafter(min_prob=LEAST, sources=sources)


def _nodes(trees: DraftTrees) -> list[tuple[float, tuple[int, ...], float]]:
    paths: list[tuple[float, tuple[int, ...]]] = []
    found = []
    for token, parent, log_prob in zip(trees.tokens.tolist(), trees.parents.tolist(), trees.log_probs, strict=True):
        reach, path = (1.0, ()) if parent < 0 else paths[parent]
        paths.append((reach * float(np.exp(log_prob)), (*path, token)))
        found.append((*paths[-1], float(np.exp(log_prob))))
    return found


tokens_of = st.integers(1, 4).flatmap(lambda most: st.lists(st.integers(0, most), min_size=1, max_size=14))
documents_of = st.lists(tokens_of, min_size=1, max_size=3)


@settings(max_examples=150, deadline=None)
@given(
    tokens_of,
    st.lists(tokens_of, max_size=4),
    st.lists(documents_of, max_size=3),
    st.one_of(st.just([]), documents_of),
    st.integers(0, 12),
)
def test_trees_and_what_is_learned(
    prompt: list[int], steps: list[list[int]], memory: list[list[list[int]]], corpus: list[list[int]], cap: int
) -> None:
    drafter = _drafter(memory, corpus)
    drafter.open(5, np.array(prompt, np.int32))
    sources = [*([(CORPUS, corpus)] if corpus else []), *((MEMORY, documents) for documents in memory)]
    twin = Twin(prompt, sources, drafter._trials.tolist())
    for step in [[], *steps]:
        drafter.observe([5], committed([step]))
        for token in step:
            twin.learn(token)
        np.testing.assert_allclose(drafter._trials, twin.table)
        nodes = _nodes(drafter.propose([5], np.array([cap], np.int32)).validate())
        wanted = twin.tree(cap, LEAST)
        # Which of two paths with equal reach is taken is open, so what is reached is compared, and each estimate.
        assert [reach for reach, _, _ in nodes] == pytest.approx([reach for reach, _, _ in wanted], rel=1e-5)
        for _, path, prob in nodes:
            assert prob == pytest.approx(twin.posterior(path[:-1])[path[-1]], rel=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(tokens_of, tokens_of, st.integers(0, 9)), min_size=1, max_size=5))
def test_a_batch_gives_what_each_alone_gives(requests: list[tuple[list[int], list[int], int]]) -> None:
    together = _drafter([[[1, 2, 3, 1, 2, 4]]], [[3, 2, 1]])
    keys = list(range(len(requests)))
    for key, (prompt, _, _) in enumerate(requests):
        together.open(key, np.array(prompt, np.int32))
    caps = np.array([cap for _, _, cap in requests], np.int32)
    trees = together.propose(keys, caps).validate()
    for key, (prompt, _, cap) in enumerate(requests):
        alone = _drafter([[[1, 2, 3, 1, 2, 4]]], [[3, 2, 1]])
        alone.open(0, np.array(prompt, np.int32))
        own = alone.propose([0], np.array([cap], np.int32))
        assert trees.tree(key).tokens.tolist() == own.tokens.tolist()
        assert trees.tree(key).parents.tolist() == own.parents.tolist()
        assert trees.tree(key).log_probs.tolist() == own.log_probs.tolist()


@pytest.mark.parametrize("text", [[7] * 600, [0, 1] * 300, list(range(200)) * 3])
def test_text_that_repeats_itself(text: list[int]) -> None:
    """Counts are cut short there, and automata outgrow their blocks: trees stay well-formed and follow the loop."""
    drafter = SuffixTreeDrafter()
    drafter.open(0, np.array(text[:3], np.int32))
    for at in range(3, len(text), 5):
        drafter.observe([0], committed([text[at : at + 5]]))
    tree = drafter.propose([0], np.array([20], np.int32)).validate()
    period = len(set(text))
    path, node = [], -1
    for i, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        if parent == node and token == text[(len(text) + len(path)) % period]:
            path.append(token)
            node = i
    assert len(path) >= 15


@pytest.mark.parametrize("spec", ["suffix-tree", "sam"])
def test_an_empty_batch_is_left_alone(spec: str) -> None:
    drafter = build_drafter(spec)
    assert drafter.propose([], np.zeros(0, np.int32)).batch_size == 0
    for key in range(4):
        drafter.open(key, np.array([1, 2, 1, 2, 1], np.int32))
    drafter.propose([0, 1, 2, 3], np.full(4, 9, np.int32))
    drafter.close(3)
    trees = drafter.propose([], np.zeros(0, np.int32))
    assert (trees.batch_size, trees.num_nodes) == (0, 0)
    drafter.observe([], committed([]))
    assert drafter.propose([0], np.array([9], np.int32)).tokens.tolist()[0] == 2


@pytest.mark.parametrize(("run", "reached"), [(20, True), (200, False)])
def test_a_bounded_number_of_contexts_is_asked(run: int, reached: bool) -> None:
    """All contexts of a run of zeros propose 0 and nothing else, but for the shortest, which 7 followed too."""
    drafter = SuffixTreeDrafter(min_prob=1e-8)
    drafter.open(0, np.array([0, 7, 5, *[0] * run], np.int32))
    tree = drafter.propose([0], np.array([60], np.int32))
    under_root = [t for t, p in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True) if p < 0]
    assert under_root[0] == 0
    assert (7 in under_root) == reached
