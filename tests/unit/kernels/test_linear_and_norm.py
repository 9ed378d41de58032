"""The kernels of linear layers and norms, against torch in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from outpace.kernels import linear
from outpace.kernels.team import Team, team
from outpace.model.cpu_modules import StandIns, _Linear, _Norm, _Packs

DTYPES = [torch.float32, torch.bfloat16]


class ThreeThreads(Team):
    num_threads = 3

    def __init__(self) -> None:
        super().__init__(team()._region)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_linear(dtype: torch.dtype, data: st.DataObject) -> None:
    width, outputs = (linear.UNIT * data.draw(st.integers(1, 6)) for _ in range(2))
    tokens, bias = data.draw(st.integers(1, 20)), data.draw(st.booleans())
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    module = nn.Linear(width, outputs, bias=bias).to(dtype)
    threads = data.draw(st.sampled_from([Team(None), team(), ThreeThreads()]))
    part = _Linear(module, _Packs(wanted=False), threads)
    part._most_tokens = 32  # whatever this processor would rather do
    assert part.is_current()
    rows = torch.randn(1, tokens, width).to(dtype)
    with torch.no_grad():
        found, expected = part.forward(rows), module.double()(rows.double())
    assert found.shape == expected.shape
    assert found.dtype is dtype
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


class LlamaLikeRMSNorm(nn.Module):
    """Rounds the normalised row before it meets the weights."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter((1 + torch.randn(width) / 4).to(dtype))
        self.variance_epsilon = 1e-6

    def normal(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * self.normal(x).to(x.dtype)


class ExactRMSNorm(LlamaLikeRMSNorm):
    """Rounds once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight.float() * self.normal(x)).to(x.dtype)


class OffsetRMSNorm(LlamaLikeRMSNorm):
    """Weights are around 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((1 + self.weight.float()) * self.normal(x)).to(x.dtype)


class CentredRMSNorm(LlamaLikeRMSNorm):
    """No such norm in spite of its name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [LlamaLikeRMSNorm, ExactRMSNorm, OffsetRMSNorm])
def test_norms_of_each_way_to_round(kind: type[LlamaLikeRMSNorm], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = kind(96, dtype)
    stand_ins = StandIns(module)
    assert [type(part) for part in stand_ins._parts] == [_Norm]
    rows = (torch.randn(1, 300, 96) * torch.logspace(-3, 2, 300)[:, None]).to(dtype)
    with torch.no_grad():
        expected = module(rows)
        with stand_ins.installed():
            found = module(rows)
        assert torch.equal(module(rows), expected)  # out of force again
    # In bfloat16 a sum in another order rounds a number in hundreds to its neighbour.
    torch.testing.assert_close(found, expected, rtol=1e-6 if dtype is torch.float32 else 2**-7, atol=0)
    assert dtype is torch.float32 or (found != expected).float().mean() < 0.01


def test_another_computation_of_that_name_is_left_alone() -> None:
    assert len(StandIns(CentredRMSNorm(96, torch.float32))) == 0


def test_a_norm_of_an_odd_width_is_left_alone() -> None:
    assert len(StandIns(LlamaLikeRMSNorm(90, torch.float32))) == 0
