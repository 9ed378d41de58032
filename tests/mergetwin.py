"""Slow twin of the union of trees: dictionaries of paths, and the formula of `outpace.draft.union` written out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outpace.tree import DraftTrees

Path = tuple[int, ...]


@dataclass
class Node:
    """One node by its path of tokens."""

    log_prob: float
    origins: int


def nodes_by_path(trees: DraftTrees, index: int = 0) -> dict[Path, Node]:
    """The nodes of one tree in order; no path comes twice."""
    tree = trees.tree(index)
    paths: list[Path] = []
    found: dict[Path, Node] = {}
    for token, parent, log_prob, origins in zip(
        tree.tokens.tolist(), tree.parents.tolist(), tree.log_probs.tolist(), tree.origins.tolist(), strict=True
    ):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
        assert paths[-1] not in found
        found[paths[-1]] = Node(log_prob, origins)
    return found


def united(parts: Sequence[dict[Path, Node]]) -> dict[Path, Node]:
    """Every path that any part has, with all origins and the mixed estimate."""
    paths = list(dict.fromkeys(path for part in parts for path in part))
    found = {}
    for path in paths:
        origins = 0
        for part in parts:
            origins |= part[path].origins if path in part else 0
        parent = path[:-1]
        estimates = [{p[-1]: math.exp(node.log_prob) for p, node in part.items() if p[:-1] == parent} for part in parts]
        found[path] = Node(math.log(mixed(estimates)[path[-1]]), origins)
    return found


def mixed(estimates: Sequence[dict[int, float]]) -> dict[int, float]:
    """Each part's chances of one node's children, mixed."""
    parts = []
    for chances in filter(None, estimates):
        mass = max(1.0, sum(chances.values()))
        parts.append({token: chance / mass for token, chance in chances.items()})
    tokens = {token for part in parts for token in part}
    odds = []
    for part in parts:
        best = min(max(part.values()), 0.98)
        odds.append(best / (1 - best))
    result = dict.fromkeys(tokens, 0.0)
    for k, part in enumerate(parts):
        rest = [(weight, other) for j, (weight, other) in enumerate(zip(odds, parts, strict=True)) if j != k]
        total = sum(weight for weight, _ in rest)
        others = {
            token: sum(weight * other.get(token, 0.0) for weight, other in rest) / total if rest else 0.0
            for token in tokens
        }
        doubt = 1 - sum(part.values())
        known = sum(others[token] for token in part)
        for token in tokens:
            own = part[token] if token in part else doubt * others[token] / max(1 - known, 1e-9)
            result[token] += odds[k] / sum(odds) * own
    return result


def trees_from(batch: Sequence[dict[Path, Node]]) -> DraftTrees:
    """One tree for each dictionary, whose paths must come after their parents'."""
    offsets, tokens, parents, log_probs, origins = [0], [], [], [], []
    for nodes in batch:
        places = {path: place for place, path in enumerate(nodes)}
        for path, node in nodes.items():
            tokens.append(path[-1])
            parents.append(places.get(path[:-1], -1))
            log_probs.append(node.log_prob)
            origins.append(node.origins)
        offsets.append(len(tokens))
    return DraftTrees(
        np.array(offsets, np.int32),
        np.array(tokens, np.int32),
        np.array(parents, np.int32),
        np.array(log_probs, np.float32),
        np.array(origins, np.uint32),
    )
