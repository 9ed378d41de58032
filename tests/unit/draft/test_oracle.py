from __future__ import annotations

import numpy as np
import pytest

from drafting import committed
from outpace.draft import OracleDrafter
from outpace.errors import ConfigError, LifecycleError
from outpace.tree import DraftTrees, node_depths

PROMPT = (5, 900, 17)
TRUTH = tuple(np.random.default_rng(0).integers(0, 1000, 500).tolist())
CAP = np.array([1000], np.int32)


def accepted_path(trees: DraftTrees, truth: tuple[int, ...]) -> list[int]:
    path: list[int] = []
    for token in truth:
        parent = path[-1] if path else -1
        children = [i for i in range(trees.num_nodes) if trees.parents[i] == parent and trees.tokens[i] == token]
        if not children:
            break
        path += children
    return path


def walk(oracle: OracleDrafter) -> list[tuple[DraftTrees, list[int]]]:
    """Trees and accepted paths over the whole continuation, one token a step so that every position is seen."""
    oracle.open(1, np.array(PROMPT, np.int32))
    steps = []
    for position in range(len(TRUTH) - 60):
        trees = oracle.propose([1], CAP).validate(1000)
        steps.append((trees, accepted_path(trees, TRUTH[position:])))
        oracle.observe([1], committed([TRUTH[position : position + 1]]))
    return steps


@pytest.mark.parametrize("accept", [0.0, 0.3, 0.8, 1.0])
def test_true_child_is_there_as_often_as_asked(accept: float) -> None:
    steps = walk(OracleDrafter(accept, {PROMPT: TRUTH}))
    first = np.mean([len(path) > 0 for _, path in steps])
    # 440 positions: four standard errors at most
    assert abs(first - accept) <= 4 * np.sqrt(accept * (1 - accept) / len(steps))
    # deeper in the tree as well, unless its room ran out
    again = [len(path) > 1 for _, path in steps if path]
    if again:
        assert abs(np.mean(again) - accept) <= 4 * np.sqrt(max(accept * (1 - accept), 1e-3) / len(again)) + 0.03


def test_trees_exercise_what_verification_must_handle() -> None:
    steps = walk(OracleDrafter(0.8, {PROMPT: TRUTH}))
    assert max(len(path) for _, path in steps) >= 6  # deep acceptance
    jumps = sum(any(b - a > 1 for a, b in zip([-1, *path], path, strict=False)) for _, path in steps)
    assert jumps > 0.5 * len(steps)  # rows that have to move
    for trees, path in steps[:50]:
        wrong_parents = set(trees.parents.tolist()) - {-1, *path}
        assert wrong_parents or trees.num_nodes < 32  # wrong siblings are grown further
        assert trees.num_nodes <= 32
        assert len(node_depths(trees.offsets, trees.parents)) == trees.num_nodes


def test_caps_hold_and_true_children_survive_small_ones() -> None:
    oracle = OracleDrafter(1.0, {PROMPT: TRUTH})
    oracle.open(1, np.array(PROMPT, np.int32))
    for cap in (0, 1, 2, 5):
        trees = oracle.propose([1], np.array([cap], np.int32)).validate()
        assert trees.num_nodes == cap
        assert bool(accepted_path(trees, TRUTH)) == (cap > 0)


def test_trees_do_not_depend_on_batch_or_history() -> None:
    def proposal(oracle: OracleDrafter, keys: list[int], at: int) -> list[int]:
        trees = oracle.propose(keys, np.full(len(keys), 40, np.int32))
        tree = trees.tree(at)
        return [*tree.tokens.tolist(), *tree.parents.tolist()]

    known = {PROMPT: TRUTH, (1, 2): (3, 4, 5, 6)}
    alone, batched, resumed = (OracleDrafter(0.5, known, seed=3) for _ in range(3))
    alone.open(1, np.array(PROMPT, np.int32))
    for token in TRUTH[:7]:
        alone.observe([1], committed([[token]]))
    batched.open(8, np.array([1, 2], np.int32))
    batched.open(9, np.array(PROMPT, np.int32))
    batched.observe([8, 9], committed([[3], TRUTH[:7]]))
    resumed.open(2, np.array([*PROMPT, *TRUTH[:7]], np.int32))
    expected = proposal(alone, [1], 0)
    assert proposal(batched, [8, 9], 1) == expected
    assert proposal(resumed, [2], 0) == expected
    other = OracleDrafter(0.5, known, seed=4)
    other.open(2, np.array([*PROMPT, *TRUTH[:7]], np.int32))
    assert proposal(other, [2], 0) != expected


def test_past_the_end_of_the_continuation_only_wrong_tokens() -> None:
    oracle = OracleDrafter(1.0, {(1, 2): (3,)})
    oracle.open(1, np.array([1, 2, 3], np.int32))
    trees = oracle.propose([1], CAP).validate(4)
    assert trees.num_nodes > 0


@pytest.mark.parametrize("vocab_size", [2, 3, 4])
def test_tiny_vocabularies(vocab_size: int) -> None:
    truth = np.random.default_rng(1).integers(0, vocab_size, 60).tolist()
    oracle = OracleDrafter(0.5, {(1,): truth}, vocab_size=vocab_size)
    oracle.open(1, np.array([1], np.int32))
    for token in truth:
        oracle.propose([1], CAP).validate(vocab_size)
        oracle.observe([1], committed([[token]]))


def test_unknown_prompt_fails_loudly_until_told() -> None:
    oracle = OracleDrafter(0.9, {PROMPT: TRUTH})
    oracle.open(1, np.array([4, 4], np.int32))
    with pytest.raises(LifecycleError, match="no continuation for sequence 1"):
        oracle.propose([1], CAP)
    oracle.set_continuation(1, [4, 4, 7, 8])
    oracle.fork(1, 2)
    oracle.propose([1, 2], np.array([5, 5], np.int32)).validate(9)
    with pytest.raises(LifecycleError, match="not open"):
        oracle.set_continuation(3, [1])


@pytest.mark.parametrize("accept", [-0.1, 1.5, True, "much", float("nan")])
def test_options_are_checked(accept: object) -> None:
    with pytest.raises(ConfigError, match="accept must be a number from 0 to 1"):
        OracleDrafter(accept)  # type: ignore[arg-type]
