from __future__ import annotations

import numpy as np
import pytest

from outpace.model import StepPlan, pack
from outpace.tree import DraftTrees
from verify_support import make_tree

A, B, C, D = 1, 2, 3, 4


def example(**changes: object) -> StepPlan:
    """The module's docstring, between a chunk of a prompt without cache and a plain step on a forked cache."""
    arguments = {
        "pending": [np.array([7, 8, 9], np.int32), np.array([A], np.int32), np.array([5, 6], np.int32)],
        "first_positions": [0, 10, 12],
        "trees": DraftTrees.concatenate([make_tree([], []), make_tree([B, C, D], [-1, 0, -1]), make_tree([], [])]),
        "segments": [[], [(40, 10)], [(0, 4), (20, 8)]],
        "write_starts": [60, 50, 28],
        "wants_logits": [False, True, True],
    }
    return pack(**{**arguments, **changes})


def test_tokens_and_positions() -> None:
    plan = example()
    assert plan.batch_size == 3
    assert plan.num_tokens == 9
    assert plan.cu_seqlens_q.tolist() == [0, 3, 7, 9]
    assert plan.num_pending.tolist() == [3, 1, 2]
    own = slice(3, 7)
    assert plan.input_ids[own].tolist() == [A, B, C, D]
    assert plan.position_ids[own].tolist() == [10, 11, 12, 11]
    assert plan.input_ids.tolist() == [7, 8, 9, A, B, C, D, 5, 6]
    assert plan.position_ids.tolist() == [0, 1, 2, 10, 11, 12, 11, 12, 13]


def test_rows_of_the_arena() -> None:
    plan = example()
    assert plan.segment_offsets.tolist() == [0, 0, 1, 3]
    assert plan.segment_starts.tolist() == [40, 0, 20]
    assert plan.segment_lengths.tolist() == [10, 4, 8]
    assert plan.cached_lengths().tolist() == [0, 10, 12]
    assert plan.write_rows().tolist() == [60, 61, 62, 50, 51, 52, 53, 28, 29]


def test_ancestors() -> None:
    plan = example()
    assert plan.node_offsets.tolist() == [0, 0, 3, 3]
    assert plan.ancestors.tolist() == [[0b001], [0b011], [0b100]]


def test_logits_of_roots_and_nodes() -> None:
    plan = example()
    assert plan.logit_rows.tolist() == [3, 4, 5, 6, 8]
    assert plan.verify_rows.tolist() == [0, 1, 2, 3, 4]
    assert plan.logit_offsets.tolist() == [0, 0, 4, 5]


def test_every_row() -> None:
    plan = example(every_row=True)
    assert plan.logit_rows.tolist() == list(range(9))
    assert plan.verify_rows.tolist() == [3, 4, 5, 6, 8]
    assert plan.logit_offsets.tolist() == [0, 0, 4, 5]
    assert plan.logit_rows[plan.verify_rows].tolist() == example().logit_rows.tolist()


def test_nobody_verifies() -> None:
    plan = example(trees=DraftTrees.empty(3), wants_logits=[False] * 3)
    assert plan.logit_rows.tolist() == plan.verify_rows.tolist() == []
    assert plan.logit_offsets.tolist() == [0, 0, 0, 0]
    assert plan.num_tokens == 6


def test_an_empty_batch() -> None:
    plan = pack([], [], DraftTrees.empty(0), [], [], [])
    assert (plan.batch_size, plan.num_tokens) == (0, 0)
    assert plan.cached_lengths().tolist() == plan.write_rows().tolist() == plan.logit_rows.tolist() == []


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("input_ids", np.int64),
        ("position_ids", np.int64),
        ("cu_seqlens_q", np.int32),
        ("num_pending", np.int32),
        ("segment_offsets", np.int32),
        ("segment_starts", np.int32),
        ("segment_lengths", np.int32),
        ("write_starts", np.int32),
        ("node_offsets", np.int32),
        ("ancestors", np.uint64),
        ("logit_rows", np.int64),
        ("verify_rows", np.int64),
        ("logit_offsets", np.int32),
    ],
)
def test_types_are_as_documented(name: str, dtype: type) -> None:
    for plan in (example(), example(every_row=True), pack([], [], DraftTrees.empty(0), [], [], [])):
        assert getattr(plan, name).dtype == dtype
