"""Greedy output with speculation is the unmodified model's own `generate`, for every family, drafter and batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import families
from engine_support import Tally, assert_idle, oracle_for, steps
from families import FAMILIES, NEW_TOKENS, Reference
from outpace.bench.check import check
from outpace.config import SamplingParams
from outpace.draft import Drafter
from outpace.engine import Engine

DRAFTERS = ("none", "lookup", "suffix", "oracle(.3)", "oracle(.8)")
ORACLE_MAT = {"oracle(.3)": 1.25, "oracle(.8)": 3.0}  # at least: the trees must be accepted deeply
GREEDY = SamplingParams(max_tokens=NEW_TOKENS)


def _drafter(spec: str, reference: Reference) -> str | Drafter:
    return oracle_for(reference, float(spec[7:-1])) if spec.startswith("oracle") else spec


@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_as_generate(reference: Callable[[str], Reference], family: str) -> None:
    own = reference(family)
    tally = Tally()
    for spec in DRAFTERS:
        engine = Engine(own.model, drafter=_drafter(spec, own), guard=False, debug=True, kv_tokens=2048)
        [alone] = engine.generate(own.prompts[0], GREEDY)
        batch = engine.generate(own.prompts, GREEDY)
        assert len(batch) == len(own.prompts) == 7
        for output, prompt, expected in zip(
            [alone, *batch], [own.prompts[0], *own.prompts], [own.continuations[0], *own.continuations], strict=True
        ):
            assert len(expected) == NEW_TOKENS
            tally.compare(own.model, prompt, output.token_ids, expected)
        mean = sum(o.figures.tokens for o in batch) / sum(o.figures.steps for o in batch)
        assert mean >= ORACLE_MAT.get(spec, 1.0), f"{spec} accepts {mean:.2f} tokens a step"
        assert_idle(engine)
    tally.check()


@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_on_the_reference_backend(reference: Callable[[str], Reference], family: str) -> None:
    own = reference(family)
    engine = Engine(own.model, drafter=oracle_for(own, 0.6), guard=False, debug=True, kv_tokens=2048, backend="torch")
    tally = Tally()
    for output, prompt, expected in zip(
        engine.generate(own.prompts, GREEDY), own.prompts, own.continuations, strict=True
    ):
        tally.compare(own.model, prompt, output.token_ids, expected)
    tally.check()


@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_in_a_tiny_arena(reference: Callable[[str], Reference], family: str) -> None:
    """Prompts in chunks, requests that enter between steps, rows that move, and requests that give way."""
    own = reference(family)
    longest = len(own.prompts[-1]) + NEW_TOKENS
    engine = Engine(
        own.model,
        drafter=oracle_for(own, 0.6, max_nodes=12),
        guard=False,
        debug=True,
        kv_tokens=longest + 90,
        max_batch_size=3,
        max_step_tokens=16,
    )
    order = [6, 0, 4, 1, 5, 2, 3]
    ids = {engine.submit(own.prompts[i], GREEDY): i for i in order[:2]}
    outputs = {}
    most_running = 0
    for count, progress in enumerate(steps(engine), 1):
        most_running = max(most_running, len(engine._core.scheduler.running))
        outputs.update({ids[p.request_id]: p.output for p in progress if p.output is not None})
        if count % 4 == 0 and len(ids) < len(order):
            i = order[len(ids)]
            ids[engine.submit(own.prompts[i], GREEDY)] = i
    assert sorted(outputs) == list(range(7))
    tally = Tally()
    for i, output in outputs.items():
        tally.compare(own.model, own.prompts[i], output.token_ids, own.continuations[i])
    tally.check()
    assert most_running >= 2
    assert sum(output.figures.preemptions for output in outputs.values()) > 0
    assert engine.arena.num_relocations > 0
    assert engine.arena.num_compactions > 0
    assert_idle(engine)


def test_bfloat16_differs_by_ties_alone() -> None:
    model = families.build("llama").to(torch.bfloat16)
    prompts = families.prompts(families.VOCAB, seed=0, lengths=families.PROMPT_LENGTHS)
    engine = Engine(model, drafter="suffix", guard=False, debug=True, kv_tokens=2048)
    result = check(engine, prompts, max_tokens=NEW_TOKENS)
    assert result.divergences == result.errors == 0, result.details
    assert result.identical + result.ties == result.prompts == 7
    assert result.identical >= 1
    assert 1e-4 < result.noise_floor < 0.5  # bfloat16 keeps 8 bits of logits that are a few units large
    for detail in result.details:
        if detail.result == "tie":
            assert detail.gap is not None
            assert detail.gap <= 2 * result.noise_floor
