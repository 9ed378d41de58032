"""How requests share steps: nobody starves, drafts beside prompts, bounds that hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from outpace import DraftTrees, Engine, SamplingParams, SignalNeeds
from outpace.draft import NoneDrafter
from outpace.errors import DrafterError
from outpace.tree import Int32Array

LONG = [int(token) for token in np.random.default_rng(5).integers(1, 300, 400)]


def test_whoever_decodes_takes_part_in_every_step(tiny: Any) -> None:
    engine = tiny.engine("none", max_step_tokens=8)
    engine.submit(LONG, SamplingParams(max_tokens=1), request_id="long")
    engine.submit(tiny.prompts[0], SamplingParams(max_tokens=20), request_id="short")
    while engine.has_work and not any(p.request_id == "short" for p in engine.step()):
        pass
    steps = [[p.request_id for p in engine.step()] for _ in range(10)]
    assert all("short" in step for step in steps)


def test_drafts_go_on_beside_a_prompt(tiny: Any) -> None:
    params = SamplingParams(max_tokens=40)
    engine = tiny.engine(tiny.oracle(), guard=True, max_step_tokens=8)
    engine.submit(tiny.prompts[0], params, request_id="decodes")
    while not engine.step():
        pass
    engine.submit(LONG, SamplingParams(max_tokens=1), request_id="prompt")
    output = None
    while output is None:
        output = next((p.output for p in engine.step() if p.request_id == "decodes" and p.output), None)
    assert any(request.request_id == "prompt" for request in engine._core.scheduler.running), "the prompt was done"
    assert output.figures.verified_nodes > 0
    assert output.figures.mean_accepted_tokens > 2
    assert output.token_ids == tiny.plain(tiny.prompts[0], params).token_ids


def test_forks_wait_where_the_batch_is_full(tiny: Any) -> None:
    engine = tiny.engine("none", max_batch_size=2)
    engine.submit(tiny.prompts[1], SamplingParams(max_tokens=12), request_id="first")
    for _ in range(3):
        engine.step()
    for index in range(4):
        engine.fork("first", new_request_id=f"fork-{index}")
    outputs = {}
    while engine.has_work:
        outputs |= {p.request_id: p.output for p in engine.step() if p.output}
        assert len(engine._core.scheduler.running) <= 2
    expected = tiny.plain(tiny.prompts[1], SamplingParams(max_tokens=12)).token_ids
    assert {name: output.token_ids for name, output in outputs.items()} == dict.fromkeys(
        ["first", *(f"fork-{index}" for index in range(4))], expected
    )
    assert engine.arena.num_used == 0


def test_waiting_forks_give_their_memory_up(tiny: Any) -> None:
    engine = tiny.engine("none", max_batch_size=1, kv_tokens=len(tiny.prompts[3]) + 30)
    engine.submit(tiny.prompts[3], SamplingParams(max_tokens=25), request_id="first")
    engine.submit(tiny.prompts[2], SamplingParams(max_tokens=25), request_id="second")
    for _ in range(4):
        engine.step()
    engine.fork("first", new_request_id="fork")
    outputs = {}
    while engine.has_work:
        outputs |= {p.request_id: p.output for p in engine.step() if p.output}
    expected = tiny.plain(tiny.prompts[3], SamplingParams(max_tokens=25)).token_ids
    assert outputs["first"].token_ids == outputs["fork"].token_ids == expected
    assert outputs["second"].error is None


@pytest.mark.parametrize(
    ("parents", "tokens", "message"),
    [
        ([-1, 4_000_000], [1, 2], "parent must come before"),
        ([-1, -1], [1, 999_999], "token id"),
        ([-1], [-4], "token id"),
    ],
)
def test_malformed_drafts_from_outside_are_refused_without_debug(
    tiny: Any, parents: list[int], tokens: list[int], message: str
) -> None:
    class Malformed(NoneDrafter):
        def propose(self, keys: Any, caps: Int32Array) -> DraftTrees:
            count = len(tokens)
            return DraftTrees(
                np.array([0, count], np.int32), np.array(tokens, np.int32), np.array(parents, np.int32),
                np.zeros(count, np.float32), np.ones(count, np.uint32),
            )  # fmt: skip

    engine = tiny.engine(Malformed(), debug=False)
    with pytest.raises(DrafterError, match=message):
        engine.generate(tiny.prompts[0], SamplingParams(max_tokens=4))


def test_a_stop_string_that_is_a_special_token(tiny: Any) -> None:
    special = tiny.tokenizer.all_special_tokens[-1]
    token = tiny.tokenizer.convert_tokens_to_ids(special)
    params = SamplingParams(max_tokens=6, logit_bias={token: 1000.0}, ignore_eos=True)
    engine: Engine = tiny.engine("none")
    assert len(engine.generate(tiny.prompts[0], params)[0].token_ids) == 6
    stopping = SamplingParams(max_tokens=6, logit_bias={token: 1000.0}, ignore_eos=True, stop=(special,))
    [output] = engine.generate(tiny.prompts[0], stopping)
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([token], "stop", special)


def test_signals_say_where_rows_stand_also_when_they_come_again(tiny: Any) -> None:
    class Listening(NoneDrafter):
        needs = SignalNeeds(hidden_layers=("model.norm",))

        def __init__(self) -> None:
            super().__init__()
            self.texts: dict[int, dict[int, int]] = {}
            self.dropped: list[int] = []

        def observe(self, keys: Any, verdicts: Any, signals: Any = None) -> None:
            assert signals.top_ids is None
            assert len(signals.hidden["model.norm"]) == len(signals.input_tokens)
            for b, key in enumerate(keys):
                rows = signals.input_tokens[signals.row_offsets[b] : signals.row_offsets[b + 1]]
                first = int(signals.first_positions[b])
                self.texts.setdefault(key, {}).update(enumerate(rows.tolist(), first))

        def recomputed(self, key: int) -> None:
            self.dropped.append(key)

    drafter = Listening()
    engine = tiny.engine(drafter, kv_tokens=160, max_step_tokens=16)
    outputs = engine.generate(tiny.prompts[1:4], SamplingParams(max_tokens=96))
    assert sum(output.figures.preemptions for output in outputs) == len(drafter.dropped) > 0
    heard = sorted([text[i] for i in range(len(text))] for text in drafter.texts.values())
    assert heard == sorted([*output.prompt_token_ids, *output.token_ids[:-1]] for output in outputs)


def test_a_head_wider_than_the_vocabulary(tiny: Any) -> None:
    import copy

    import torch

    model = copy.deepcopy(tiny.model)
    vocab = model.config.vocab_size
    head = torch.nn.Linear(model.config.hidden_size, vocab + 64, bias=False)
    with torch.no_grad():
        head.weight.zero_()
        head.weight[:vocab] = model.lm_head.weight
    model.lm_head = head
    engine = Engine(model, drafter="suffix")
    assert engine.target.vocab_size == vocab + 64
    [output] = engine.generate(tiny.prompts[1], SamplingParams(max_tokens=20))
    assert output.token_ids == tiny.plain(tiny.prompts[1], SamplingParams(max_tokens=20)).token_ids
