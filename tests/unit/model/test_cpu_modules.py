"""Stand-ins: in force only while installed, right after every change to the module."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from families import build
from outpace import Engine, SamplingParams
from outpace.model import cpu_modules
from outpace.model.cpu_modules import StandIns


@pytest.fixture
def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 96, bias=True)


def output_of(stand_ins: StandIns, module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), stand_ins.installed():
        return module(rows)


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_same_numbers_up_to_rounding(layer: nn.Linear, tokens: int, pack: bool) -> None:
    rows = torch.randn(1, tokens, 64)
    stand_ins = StandIns(layer, pack)
    with torch.no_grad():
        torch.testing.assert_close(output_of(stand_ins, layer, rows), layer(rows))
    assert "forward" not in layer.__dict__


@pytest.mark.parametrize("tokens", [1, 70])
def test_changed_weights_are_seen(layer: nn.Linear, tokens: int) -> None:
    rows, stand_ins = torch.randn(1, tokens, 64), StandIns(layer, True)
    output_of(stand_ins, layer, rows)
    with torch.no_grad():
        layer.weight.mul_(2)  # in place
        torch.testing.assert_close(output_of(stand_ins, layer, rows), layer(rows))
        layer.weight = nn.Parameter(torch.randn(96, 64))  # another tensor
        torch.testing.assert_close(output_of(stand_ins, layer, rows), layer(rows))
        layer.bias = None
        torch.testing.assert_close(output_of(stand_ins, layer, rows), layer(rows))
        layer.weight.data.add_(1)  # in place, and no version counts it
        torch.testing.assert_close(output_of(stand_ins, layer, rows), layer(rows))
        layer.weight.data = torch.randn(32, 64)  # another shape
        torch.testing.assert_close(output_of(stand_ins, layer, rows), layer(rows))
        layer.to(torch.float64)  # no longer ours
        torch.testing.assert_close(output_of(stand_ins, layer, rows.double()), layer(rows.double()))


def test_two_layers_share_one_copy() -> None:
    one, other = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    other.weight = one.weight
    stand_ins = StandIns(nn.ModuleList([one, other]), True)
    with torch.no_grad(), stand_ins.installed():
        one(torch.randn(1, 70, 64))
        other(torch.randn(1, 70, 64))
    (copies,) = {id(part._packs): part._packs for part in stand_ins._parts}.values()  # type: ignore[union-attr]
    assert len(copies._copies) == 1


def test_a_forward_of_somebody_else_stays(layer: nn.Linear) -> None:
    stand_ins = StandIns(layer)
    layer.forward = lambda rows: rows  # type: ignore[method-assign]
    rows = torch.randn(1, 1, 64)
    assert output_of(stand_ins, layer, rows) is rows
    assert layer(rows) is rows


def test_out_of_force_after_an_error(layer: nn.Linear) -> None:
    stand_ins = StandIns(layer)
    with pytest.raises(KeyboardInterrupt), stand_ins.installed():
        raise KeyboardInterrupt
    assert "forward" not in layer.__dict__


def test_inference_tensors() -> None:
    with torch.inference_mode():
        layer = nn.Linear(64, 64)
        rows = torch.randn(1, 2, 64)
        stand_ins = StandIns(layer)
        with stand_ins.installed():
            found = layer(rows)
        torch.testing.assert_close(found, layer(rows))


def test_without_packed_products(layer: nn.Linear, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_modules, "_has_packed_products", lambda: False)
    rows = torch.randn(1, 70, 64)
    with torch.no_grad():
        torch.testing.assert_close(output_of(StandIns(layer), layer, rows), layer(rows))


def test_copies_that_do_not_fit_are_not_made(layer: nn.Linear, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_modules, "free_memory", lambda _device: 1000)
    small = StandIns(layer)._parts[0]
    forced = StandIns(layer, True)._parts[0]
    for part, packs in ((small, False), (forced, True)):
        assert part.is_current()
        assert (part._packs.of(layer.weight) is not None) == packs  # type: ignore[union-attr]


def test_a_model_is_as_it_was() -> None:
    model = build("llama")
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    engine = Engine(model, drafter="none")
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=3))
    assert len(engine.target.stand_ins or ()) > 0
    after = {name: dict(module.__dict__) for name, module in model.named_modules()}
    assert before.keys() == after.keys()
    assert all(before[name].keys() == after[name].keys() for name in before)


def test_the_reference_backend_has_none() -> None:
    assert Engine(build("llama"), drafter="none", backend="torch").target.stand_ins is None


@pytest.mark.parametrize("tokens", [1, 70])
def test_tied_layers_that_move_and_part(tokens: int) -> None:
    one, other = nn.Linear(64, 64), nn.Linear(64, 64)
    other.weight = one.weight
    layers, rows = nn.Sequential(one, other), torch.randn(1, tokens, 64)
    stand_ins = StandIns(layers, True)
    output_of(stand_ins, layers, rows)
    with torch.no_grad():
        one.weight.data = torch.randn(64, 64)
        one.bias.data = torch.randn(64)
        torch.testing.assert_close(output_of(stand_ins, layers, rows), layers(rows), rtol=1e-4, atol=1e-4)
        other.weight = nn.Parameter(torch.randn(64, 64))
        torch.testing.assert_close(output_of(stand_ins, layers, rows), layers(rows), rtol=1e-4, atol=1e-4)


def test_a_model_that_changes_its_dtype_between_requests() -> None:
    model = build("llama")
    engine = Engine(model, drafter="none")
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=3))
    model.to(torch.bfloat16)
    stand_ins = engine.target.stand_ins
    assert stand_ins is not None
    with stand_ins.installed():
        assert not any("forward" in module.__dict__ for module in model.modules())


def test_another_default_device() -> None:
    model = build("llama")
    engine = Engine(model, drafter="none")
    with torch.device("meta"):
        found = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=3))[0].token_ids
    assert found == Engine(model, drafter="none").generate([[5, 6, 7]], SamplingParams(max_tokens=3))[0].token_ids


def test_another_processor_than_this_one() -> None:
    """Numba may be told to compile for another processor; no instruction may be used that it has not."""
    code = (
        "import torch\nfrom torch import nn\nfrom outpace.model.cpu_modules import StandIns\n"
        "layer = nn.Linear(64, 64).to(torch.bfloat16)\nrows = torch.randn(1, 1, 64).to(torch.bfloat16)\n"
        "with torch.no_grad(), StandIns(layer).installed():\n    print(torch.allclose(layer(rows), layer(rows)))\n"
    )
    environment = os.environ | {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr
