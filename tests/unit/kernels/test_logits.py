"""One pass over rows of logits, against torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.kernels.logits import topk_rows
from outpace.kernels.team import Team, team

DTYPES = [torch.float32, torch.bfloat16]


class ThreeThreads(Team):
    num_threads = 3

    def __init__(self) -> None:
        super().__init__(team()._region)


def stable(row: torch.Tensor, k: int) -> list[int]:
    """The k best, the lowest id first among equals."""
    return torch.sort(row.float(), descending=True, stable=True).indices[:k].tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_as_a_stable_sort_says(dtype: torch.dtype, data: st.DataObject) -> None:
    rows, width = data.draw(st.integers(0, 5)), data.draw(st.sampled_from([1, 7, 63, 64, 65, 130, 1000, 70_001]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    logits = torch.randn(rows, width, generator=generator)
    if data.draw(st.booleans()):
        logits = logits.round()  # many equals
    logits[torch.rand(rows, width, generator=generator) < data.draw(st.sampled_from([0.0, 0.5]))] = float("-inf")
    if width > 1:
        logits[:, width // 2] = 0.5
    logits = logits.to(dtype)
    k = data.draw(st.integers(1, min(width, 9)))
    threads = ThreeThreads()
    assert topk_rows(logits, k, threads).tolist() == [stable(row, k) for row in logits]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", [0, 63, 64, 200, 299])
def test_rows_without_a_best_token(dtype: torch.dtype, place: int) -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0, place] = float("nan")
    logits[1, place] = float("inf")
    logits[2] = float("-inf")
    logits[3, place] = 50.0
    found = topk_rows(logits, 2)
    assert found[:, 0].tolist() == [place, place, 0, place]
    assert found[0].tolist() == logits[0].float().topk(2).indices.tolist()


def test_other_layouts_and_dtypes() -> None:
    logits = torch.randn(6, 90, generator=torch.Generator().manual_seed(0))
    expected = logits.topk(3).indices.tolist()
    assert topk_rows(logits.double(), 3).tolist() == expected
    assert topk_rows(logits.t().contiguous().t(), 3).tolist() == expected
    assert topk_rows(torch.cat([logits, logits], 1)[:, :90], 3).tolist() == expected
    assert topk_rows(logits[::2], 3).tolist() == expected[::2]
    assert topk_rows(logits, 3, Team(None)).tolist() == expected
