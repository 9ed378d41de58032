"""Engines are kept between calls, follow the model's changes, and leave it as they found it."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
import transformers as hf

import families
import outpace
from hooked import assert_same, batch, oracle_of
from outpace.errors import DrafterError
from outpace.integrations import engines

NEW = 12


@pytest.fixture
def model() -> hf.PreTrainedModel:
    return families.build("mistral")


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One entry for each model that is probed."""
    found: list[object] = []
    original = engines.probe

    def counted(model: Any, **options: Any) -> Any:
        found.append(model)
        return original(model, **options)

    monkeypatch.setattr(engines, "probe", counted)
    return found


def _call(model: hf.PreTrainedModel, **arguments: Any) -> list[list[int]]:
    found = model.generate(
        **{**batch(), "max_new_tokens": NEW, "custom_generate": outpace.generate, "drafter": "lookup", **arguments}
    )
    return found.tolist()


def test_a_model_is_probed_once(model: hf.PreTrainedModel, probes: list[object]) -> None:
    expected = model.generate(**batch(), max_new_tokens=NEW).tolist()
    for drafter in ("none", "lookup", "lookup", "suffix"):
        assert _call(model, drafter=drafter) == expected
    assert len(probes) == 1
    kept = engines._kept[model]
    assert len(kept.engines) == 3
    for max_nodes in range(1, 8):
        _call(model, max_nodes=max_nodes)
    assert len(kept.engines) == engines._MOST_ENGINES
    outpace.integrations.release(model)
    assert model not in engines._kept
    assert _call(model) == expected
    assert len(probes) == 2
    outpace.integrations.release()
    assert not engines._kept


def test_models_are_not_kept_alive() -> None:
    model = families.build("llama")
    _call(model)
    _call(model, drafter="suffix", logits_processor=[lambda ids, scores: scores], do_sample=True)
    gone = weakref.ref(model)
    count = len(engines._kept)
    del model
    gc.collect()
    assert gone() is None
    assert len(engines._kept) == count - 1


def _new_weights(model: hf.PreTrainedModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)


def _new_data(model: hf.PreTrainedModel) -> None:
    for parameter in model.parameters():
        parameter.data *= 1.1


def _new_layer(model: hf.PreTrainedModel) -> None:
    other = families.build("llama").model.layers[0].mlp
    model.model.layers[1].mlp = other


CHANGES = {
    "weights": (_new_weights, 2),
    "weights behind autograd's back": (_new_data, 2),
    "a module": (_new_layer, 2),
    "attention": (lambda model: model.set_attn_implementation("eager"), 1),
    "dtype": (lambda model: model.to(torch.float64), 2),
    "window": (lambda model: setattr(model.config, "sliding_window", 7), 2),
    "vocabulary": (lambda model: model.resize_token_embeddings(530, mean_resizing=False), 2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_may_change_between_calls(model: hf.PreTrainedModel, probes: list[object], change: str) -> None:
    before = _call(model)
    assert before == model.generate(**batch(), max_new_tokens=NEW).tolist()
    apply, expected_probes = CHANGES[change]
    apply(model)
    after = model.generate(**batch(), max_new_tokens=NEW).tolist()
    assert _call(model) == after
    assert (after != before) == (change not in ("attention", "dtype", "vocabulary"))
    assert len(probes) == expected_probes
    if change == "attention":
        assert model.config._attn_implementation == "eager"


def _state(model: hf.PreTrainedModel) -> Any:
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    attributes = [sorted(vars(m)) for m in model.modules()]
    weights = {name: (value.data_ptr(), value.dtype) for name, value in model.state_dict().items()}
    configs = [model.config.to_dict(), model.generation_config.to_dict(), model.config._attn_implementation]
    return hooks, attributes, weights, configs, model.training


def test_the_model_is_left_as_it_was(model: hf.PreTrainedModel) -> None:
    model.generate(**batch(), max_new_tokens=NEW)
    before = _state(model)
    _call(model)
    _call(model, do_sample=True, repetition_penalty=1.2, eos_token_id=[5, 6], pad_token_id=0)
    assert _state(model) == before
    with pytest.raises(ValueError, match="num_beams"):
        _call(model, num_beams=3)
    assert _state(model) == before


@pytest.mark.parametrize("raised", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("passes", [0, 3])
def test_it_is_left_so_by_what_interrupts_a_pass(model: hf.PreTrainedModel, raised: type, passes: int) -> None:
    expected = _call(model)
    before = _state(model)
    left = [passes]

    def interrupt(*_: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise raised("now")

    handle = model.model.layers[1].register_forward_pre_hook(interrupt)
    try:
        with pytest.raises((raised, outpace.OutpaceError), match="now"):
            _call(model)
    finally:
        handle.remove()
    assert _state(model) == before
    assert _call(model) == expected
    assert model.generate(**batch(), max_new_tokens=NEW).tolist() == expected


class Faulty(type(oracle_of(batch(), batch()["input_ids"]))):  # type: ignore[misc]
    """A drafter of the caller's own that fails once."""

    fails = True

    def propose(self, *args: Any) -> Any:
        if self.fails:
            self.fails = False
            raise ValueError("no idea")
        return super().propose(*args)


def test_a_drafter_that_failed_can_be_used_again(model: hf.PreTrainedModel) -> None:
    plain = model.generate(**batch(), max_new_tokens=NEW)
    drafter = oracle_of(batch(), plain)
    drafter.__class__ = Faulty
    with pytest.raises(DrafterError, match="no idea"):
        _call(model, drafter=drafter)
    assert not drafter._sequences
    assert _call(model, drafter=drafter) == plain.tolist()


def test_inference_mode_and_autocast_may_come_and_go(model: hf.PreTrainedModel, probes: list[object]) -> None:
    expected = model.generate(**batch(), max_new_tokens=NEW).tolist()
    with torch.inference_mode():
        assert _call(model, max_new_tokens=3 * NEW, output_scores=True)
    assert _call(model) == expected
    with torch.autocast("cpu", torch.bfloat16):
        assert len(_call(model)[0]) == len(expected[0])
    assert _call(model) == expected
    assert len(probes) == 3


def test_calls_from_several_threads_wait_for_each_other(model: hf.PreTrainedModel) -> None:
    expected = model.generate(**batch(), max_new_tokens=NEW).tolist()
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(_call(model))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4


def test_an_adapter(model: hf.PreTrainedModel) -> None:
    peft = pytest.importorskip("peft")
    assert_same(model, batch(), max_new_tokens=NEW)
    plain = _call(model)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, lora).eval()
    found = _call(adapted)
    assert found == adapted.generate(**batch(), max_new_tokens=NEW).tolist() != plain
    with adapted.disable_adapter():
        assert _call(adapted) == plain
