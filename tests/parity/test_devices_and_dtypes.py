"""Half precision, and a GPU where there is one."""

from __future__ import annotations

import copy

import pytest
import torch

import families
from outpace import Engine, OracleDrafter, SamplingParams
from outpace.bench.check import check
from outpace.model import probe

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
    ),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_the_probe_passes_in_half_precision(family: str, dtype: torch.dtype) -> None:
    model = families.build(family).to(dtype)
    target = probe(model)
    assert {layer.dtype for layer in target.layers} == {dtype}
    assert len(target.layers) == model.config.num_hidden_layers


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss", "deepseek-v3"])
def test_whole_engine_on_a_device(family: str, device: str) -> None:
    """float32; trees deep enough that rows move, siblings are verified, and sequences have different lengths."""
    model, prompts, continuations = families.reference(family)
    if device != "cpu":
        model = copy.deepcopy(model).to(device)
    known = {tuple(p): c for p, c in zip(prompts, continuations, strict=True)}
    drafter = OracleDrafter(0.8, known, vocab_size=model.config.vocab_size)
    engine = Engine(model, drafter=drafter, guard=False, debug=True, kv_tokens=4096)
    outputs = engine.generate(prompts, SamplingParams(max_tokens=48))
    assert sum(output.figures.accepted_nodes for output in outputs) > 100
    for output, expected in zip(outputs, continuations, strict=True):
        assert output.token_ids == expected[:48]
    sampled = SamplingParams(max_tokens=16, temperature=1.0, seed=7)
    plain = Engine(model, drafter="none", kv_tokens=4096).generate(prompts, sampled)
    assert [o.token_ids for o in engine.generate(prompts, sampled)] == [o.token_ids for o in plain]


@pytest.mark.parametrize("device", DEVICES)
def test_half_precision_differs_by_ties_alone(device: str) -> None:
    model = families.build("qwen3").to(device=device, dtype=torch.bfloat16)
    prompts = families.prompts(model.config.vocab_size, seed=11, lengths=(6, 17, 30))
    result = check(Engine(model, drafter="suffix", guard=False), prompts, max_tokens=48)
    assert result.divergences == result.errors == 0
    assert result.noise_floor > 0
