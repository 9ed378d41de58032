"""Token Recycling against a slow twin: dictionaries and paths."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from drafting import committed
from outpace.draft import Signals
from outpace.draft.recycling import ESTIMATES, RecyclingDrafter
from outpace.draft.shapes import find_shape
from outpace.tree import DraftTrees

Path = tuple[int, ...]


class Twin:
    """Candidates as lists in dictionaries; a tree is a list of paths of ranks."""

    def __init__(self, size: int) -> None:
        self.paths = find_shape(size).paths()
        self.candidates: dict[tuple[str, int], list[int]] = {}
        self.repeats: dict[tuple[str, int], int] = {}

    def learn(self, namespace: str, token: int, top: list[int]) -> None:
        known = (namespace, token)
        repeated = known in self.candidates and self.candidates[known][0] == top[0]
        self.repeats[known] = min(self.repeats[known] + 1, 8) if repeated else 0
        self.candidates[known] = [t if t not in top[:rank] else -1 for rank, t in enumerate(top)]

    def tree(self, namespace: str, root: int, cap: int) -> list[tuple[Path, float]]:
        """Token paths and their own log-probabilities, breadth-first."""
        found: dict[Path, Path] = {(): (root,)}
        log_probs: dict[Path, float] = {}
        for path in self.paths:
            if path[:-1] in found:
                row = self.candidates.get((namespace, found[path[:-1]][-1]), [])
                if path[-1] < len(row) and row[path[-1]] >= 0:
                    found[path] = (*found[path[:-1]], row[path[-1]])
                    log_probs[path] = float(ESTIMATES[self.repeats[namespace, found[path[:-1]][-1]], path[-1]])
        kept = [path for path in self.paths if path in found]
        cost = {path: -sum(log_probs[path[:depth]] for depth in range(1, len(path) + 1)) for path in kept}
        chosen = sorted(kept, key=lambda path: (round(cost[path], 9), kept.index(path)))[:cap]
        return [(found[path][1:], log_probs[path]) for path in kept if path in chosen]


def nodes_of(trees: DraftTrees, index: int) -> list[tuple[Path, float]]:
    tree = trees.tree(index)
    paths: list[Path] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return list(zip(paths, tree.log_probs.tolist(), strict=True))


TOKENS = st.integers(0, 9) | st.sampled_from([1023, 1024, 5000])
ROWS = st.lists(st.tuples(TOKENS, st.lists(TOKENS, min_size=8, max_size=8)), max_size=12)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data(), size=st.sampled_from([60, 80]), width=st.sampled_from([3, 8, 11]))
def test_trees_equal_the_twins(data: Any, size: int, width: int) -> None:
    drafter, twin = RecyclingDrafter(size), Twin(size)
    roots: dict[int, int] = {}
    names = {0: "a", 1: "b", 2: "a"}
    for key, name in names.items():
        roots[key] = data.draw(TOKENS)
        drafter.open(key, np.array([3, roots[key]], np.int32), name)
    for _ in range(data.draw(st.integers(1, 5))):
        keys = data.draw(st.permutations(sorted(names)))[: data.draw(st.integers(1, 3))]
        rows = [data.draw(ROWS) for _ in keys]
        tokens = [data.draw(st.lists(TOKENS, max_size=2)) for _ in keys]
        flat = [(token, [*top, 9999, 8888, 7777][:width]) for part in rows for token, top in part]
        offsets = np.cumsum([0, *map(len, rows)]).astype(np.int32)
        top_ids = np.array([top for _, top in flat], np.int32).reshape(-1, width)
        inputs = np.array([token for token, _ in flat], np.int32)
        shown = Signals(offsets, np.zeros(len(keys), np.int32), inputs, top_ids, {})
        drafter.observe(keys, committed(tokens), shown)
        for key, part, new in zip(keys, rows, tokens, strict=True):
            roots[key] = new[-1] if new else roots[key]
            for token, top in part:
                twin.learn(names[key], token, [*top, 9999, 8888, 7777][: min(width, 8)])
        caps = np.array([data.draw(st.integers(0, 90)) for _ in keys], np.int32)
        trees = drafter.propose(keys, caps).validate()
        for b, key in enumerate(keys):
            assert nodes_of(trees, b) == twin.tree(names[key], roots[key], int(caps[b]))
