import contextlib
import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outpace.tree import DraftTrees
from outpace.verify.greedy import CHOICE_INFINITE, CHOICE_NAN, CHOICE_NOTHING, greedy_verdicts, greedy_walk
from verify_support import make_tree, random_tree

EXAMPLE = make_tree([7, 8, 9], [-1, 0, -1])
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize(
    ("choices", "path", "tokens"),
    [
        ([7, 8, 5, 1], [0, 1], [7, 8, 5]),
        ([7, 9, 5, 1], [0], [7, 9]),
        ([9, 8, 5, 1], [2], [9, 1]),
        ([3, 8, 5, 1], [], [3]),
    ],
)
def test_the_walk_follows_the_choices(choices, path, tokens):
    verdicts = greedy_verdicts(EXAMPLE, np.array(choices, np.int32))
    assert verdicts.path.tolist() == path
    assert verdicts.tokens.tolist() == tokens


def test_rows_of_later_trees_are_found_behind_their_roots():
    trees = DraftTrees.concatenate([EXAMPLE, DraftTrees.empty(1), EXAMPLE])
    verdicts = greedy_verdicts(trees, np.array([7, 8, 5, 1, 6, 9, 0, 0, 4], np.int32))
    assert [verdicts.tokens_of(b).tolist() for b in range(3)] == [[7, 8, 5], [6], [9, 4]]
    assert [verdicts.path_of(b).tolist() for b in range(3)] == [[0, 1], [], [2]]


def test_an_empty_batch():
    assert greedy_verdicts(DraftTrees.empty(0), np.empty(0, np.int32)).batch_size == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 2, 1023, 1024, 1025, 3000])
def test_choices_from_bits_are_the_first_arg_max(dtype, vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    # Rounded to quarters: many equals. Some rows are negative throughout.
    logits = torch.randn(40, vocab_size, generator=generator).mul(4).round().div(4)
    logits[::3] -= 100
    logits[1::3, ::2] = -math.inf
    logits = logits.to(dtype)
    if vocab_size == 1:
        logits[1::3] = 0
    verdicts, undecided = greedy_walk(DraftTrees.empty(40), logits, np.ones(40, np.bool_))
    assert not undecided.any()
    assert verdicts.tokens.tolist() == [row.tolist().index(max(row.tolist())) for row in logits]


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_and_minus_zero_are_equal(dtype):
    logits = torch.tensor([[-1.0, -0.0, 0.0], [-1.0, 0.0, -0.0]], dtype=dtype)
    verdicts, _ = greedy_walk(DraftTrees.empty(2), logits, np.ones(2, np.bool_))
    assert verdicts.tokens.tolist() == [1, 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_root_without_a_choice_says_why(dtype, sign):
    logits = torch.randn(5, 2000, dtype=dtype)
    logits[1, 1500] = math.copysign(math.nan, sign)
    logits[2, 3] = math.inf
    logits[3] = -math.inf
    logits[4, 7] = -math.inf
    verdicts, undecided = greedy_walk(DraftTrees.empty(5), logits, np.ones(5, np.bool_))
    assert undecided.tolist() == [0, CHOICE_NAN, CHOICE_INFINITE, CHOICE_NOTHING, 0]
    assert np.diff(verdicts.token_offsets).tolist() == [1, 0, 0, 0, 1]


def test_only_selected_trees_are_walked():
    trees = DraftTrees.concatenate([EXAMPLE, EXAMPLE])
    logits = torch.full((8, 10), math.nan)
    logits[4:] = torch.nn.functional.one_hot(torch.tensor([7, 8, 5, 1]), 10).float()
    verdicts, undecided = greedy_walk(trees, logits, np.array([False, True]))
    assert [verdicts.tokens_of(b).tolist() for b in range(2)] == [[], [7, 8, 5]]
    assert not undecided.any()


def test_the_way_of_other_devices_gives_the_same(monkeypatch):
    """Off the CPU one arg max over all selected rows is taken; here on the CPU, with the bits' way closed."""
    rng = np.random.default_rng(0)
    trees = DraftTrees.concatenate([random_tree(rng, 6, 12) for _ in range(30)])
    logits = torch.randn(trees.num_nodes + 30, 6, generator=torch.Generator().manual_seed(1))
    logits[trees.offsets[2] + 2] = math.nan
    logits[trees.offsets[3] + 3, 0] = math.inf
    logits[trees.offsets[4] + 4] = -math.inf
    logits[trees.offsets[5] + 5 + 1 :][:3] = math.nan
    for selected in (np.ones(30, np.bool_), np.arange(30) % 3 != 0, np.zeros(30, np.bool_)):
        expected, expected_undecided = greedy_walk(trees, logits, selected)
        with monkeypatch.context() as patch:
            patch.setattr("outpace.verify.greedy._BITS", {})
            found, undecided = greedy_walk(trees, logits, selected)
        for name in ("path_offsets", "path", "token_offsets", "tokens"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
        np.testing.assert_array_equal(undecided, expected_undecided)
        assert (len(expected.path) > 5) == bool(selected.any())


class WithoutFloat64(TorchDispatchMode):
    """A device such as MPS."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            raise TypeError(f"{operation}: no float64 on this device")
        return result


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_way_of_other_devices_in_every_dtype(dtype, monkeypatch):
    """Large numbers are not infinite, and no float64 is needed but for logits in float64."""
    logits = torch.zeros(5, 20, dtype=dtype)
    logits[0, -1], logits[1, 7] = 1, torch.finfo(dtype).max
    logits[2, 5], logits[3, 5] = math.nan, math.inf
    logits[4] = -math.inf
    monkeypatch.setattr("outpace.verify.greedy._BITS", {})
    with contextlib.nullcontext() if dtype == torch.float64 else WithoutFloat64():
        verdicts, undecided = greedy_walk(DraftTrees.empty(5), logits, np.ones(5, np.bool_))
    assert verdicts.tokens.tolist() == [19, 7]
    assert undecided.tolist() == [0, 0, CHOICE_NAN, CHOICE_INFINITE, CHOICE_NOTHING]


def test_the_way_of_other_devices_with_ids_that_float32_does_not_hold(monkeypatch):
    logits = torch.zeros(1, 2**24 + 2, dtype=torch.bfloat16)
    logits[0, -1] = 1
    monkeypatch.setattr("outpace.verify.greedy._BITS", {})
    verdicts, _ = greedy_walk(DraftTrees.empty(1), logits, np.ones(1, np.bool_))
    assert verdicts.tokens.tolist() == [2**24 + 1]


def test_rows_may_be_strided():
    logits = torch.zeros(2, 12)
    logits[:, 10:] = 5
    logits[0, 3] = logits[1, 4] = 1
    verdicts, _ = greedy_walk(DraftTrees.empty(2), logits[:, :10], np.ones(2, np.bool_))
    assert verdicts.tokens.tolist() == [3, 4]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_gives_the_same():
    rng = np.random.default_rng(0)
    trees = DraftTrees.concatenate([random_tree(rng, 6, 12) for _ in range(30)])
    logits = torch.randn(trees.num_nodes + 30, 6, generator=torch.Generator().manual_seed(1)).bfloat16()
    selected = np.ones(30, np.bool_)
    expected, _ = greedy_walk(trees, logits, selected)
    found, _ = greedy_walk(trees, logits.cuda(), selected)
    assert found.tokens.tolist() == expected.tokens.tolist()
