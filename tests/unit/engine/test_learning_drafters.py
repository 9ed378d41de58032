"""Drafters that learn from the target's passes, in the engine: they change how fast it is, never what it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine_support import assert_idle, run_to_end
from outpace.config import SamplingParams
from outpace.draft import Drafter, Signals, build_drafter
from outpace.draft.merge import MergeDrafter
from outpace.draft.recycling import RecyclingDrafter

SPECS = [
    "recycling",
    "recycling(60)",
    "merge[suffix, recycling]",
    "merge[merge[lookup, recycling(60)], suffix, recycling]",
]
VARIANTS = [
    SamplingParams(max_tokens=40),
    SamplingParams(max_tokens=30, temperature=0.9, seed=5),
    SamplingParams(max_tokens=30, temperature=0.7, seed=6, top_p=0.8, frequency_penalty=0.4),
    SamplingParams(max_tokens=30, speculate=False),
    SamplingParams(max_tokens=25),
]


def recyclers(drafter: Drafter) -> list[RecyclingDrafter]:
    """All Token Recycling drafters inside."""
    if isinstance(drafter, RecyclingDrafter):
        return [drafter]
    return [found for part in getattr(drafter, "parts", ()) for found in recyclers(part)]


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_output_is_that_of_plain_decoding(tiny: Any, spec: str, guard: bool) -> None:
    engine = tiny.engine(build_drafter(spec), guard=guard, max_nodes=80, max_step_tokens=20)
    expected = [tiny.plain(p, v).token_ids for p, v in zip(tiny.prompts, VARIANTS, strict=True)]
    for _ in range(2):  # the second time with everything learned
        outputs = engine.generate(tiny.prompts, VARIANTS)
        assert [output.token_ids for output in outputs] == expected
    assert_idle(engine)
    assert not any(part._sequences for part in getattr(engine.drafter, "parts", ()))
    assert engine.figures().total.drafted_nodes > 100
    for recycler in recyclers(engine.drafter):
        assert not recycler.matrices._users


@pytest.mark.parametrize("spec", SPECS[1:3])
def test_little_memory_and_forks(tiny: Any, spec: str) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.8, seed=2, n=3)
    engine = tiny.engine(build_drafter(spec), kv_tokens=150, max_step_tokens=9)
    outputs = engine.generate(tiny.prompts[1], params)
    for index, output in enumerate(outputs):
        alone = SamplingParams(max_tokens=30, temperature=0.8, seed=2 + index)
        assert output.token_ids == tiny.plain(tiny.prompts[1], alone).token_ids
    for prompt in tiny.prompts:
        engine.submit(prompt, SamplingParams(max_tokens=40))
    found = sorted(output.token_ids for output in run_to_end(engine).values())
    assert found == sorted(tiny.plain(p, SamplingParams(max_tokens=40)).token_ids for p in tiny.prompts)
    assert_idle(engine)


def test_recycling_learns_from_the_prompt_and_from_all_nodes(tiny: Any) -> None:
    drafter = RecyclingDrafter()
    rows: list[Signals] = []
    observe = drafter.observe

    def noting(keys: Any, verdicts: Any, signals: Signals | None = None) -> None:
        assert signals is not None
        rows.append(signals)
        observe(keys, verdicts, signals)

    drafter.observe = noting  # type: ignore[method-assign]
    engine = tiny.engine(drafter)
    [output] = engine.generate(tiny.prompts[4], SamplingParams(max_tokens=40))
    assert rows[0].input_tokens.tolist() == tiny.prompts[4]
    last: dict[int, list[int]] = {}
    for signals in rows:
        assert signals.top_ids is not None
        assert signals.top_ids.shape[1] == 8
        last.update(zip(signals.input_tokens.tolist(), signals.top_ids.tolist(), strict=True))
    for token, candidates in last.items():
        assert drafter.matrices.rows[0, token].tolist() == candidates
    assert output.figures.verified_nodes > 100


def test_namespaces_draft_for_themselves_alone(tiny: Any) -> None:
    drafter = MergeDrafter([RecyclingDrafter()])
    engine = tiny.engine(drafter)
    [recycler] = recyclers(drafter)
    engine.generate(tiny.prompts[3], SamplingParams(max_tokens=30), namespace="alice")
    alice = recycler.matrices.rows[recycler.matrices._slots["alice"]].copy()
    [bob] = engine.generate(tiny.prompts[3], SamplingParams(max_tokens=30), namespace="bob")
    assert recycler.matrices.namespaces == ["alice", "bob"]
    assert np.array_equal(recycler.matrices.rows[recycler.matrices._slots["alice"]], alice)
    assert bob.token_ids == tiny.plain(tiny.prompts[3], SamplingParams(max_tokens=30)).token_ids
