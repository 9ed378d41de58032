from __future__ import annotations

import pytest
import torch
from transformers import GenerationMixin

from families import FAMILIES, LONGROPE_SWITCH, build
from outpace.model import probe
from outpace.model.rope import RopeSwitch, find_switch


def test_the_switch_is_where_the_original_context_ends() -> None:
    switch = RopeSwitch(64, recompute=True)
    assert not switch.is_long(64)
    assert switch.is_long(65)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "phi3-longrope"])
def test_other_families_have_none(family: str) -> None:
    assert find_switch(_Model(), FAMILIES[family].config()) is None  # type: ignore[arg-type]


class _Model(GenerationMixin):
    """Generates as any other model does."""


class _Recomputing(GenerationMixin):
    def prepare_inputs_for_generation(self, *args: object, **options: object) -> dict[str, object]:
        return {}


def test_longrope_switches_and_phi3_recomputes() -> None:
    model = build("phi3-longrope")
    assert find_switch(model, model.config) == RopeSwitch(LONGROPE_SWITCH, recompute=True)
    assert probe(model).rope_switch == RopeSwitch(LONGROPE_SWITCH, recompute=True)


@pytest.mark.parametrize(("model", "recompute"), [(_Model(), False), (_Recomputing(), True)])
def test_only_a_model_with_generation_of_its_own_recomputes(model: GenerationMixin, recompute: bool) -> None:
    config = FAMILIES["phi3-longrope"].config()
    assert find_switch(model, config) == RopeSwitch(LONGROPE_SWITCH, recompute)  # type: ignore[arg-type]


def test_one_switch_of_several_layer_types_is_enough() -> None:
    config = FAMILIES["phi3"].config()
    config.rope_parameters = {
        "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 48},
        "sliding_attention": {"rope_type": "default"},
    }
    assert find_switch(_Model(), config) == RopeSwitch(48, recompute=False)  # type: ignore[arg-type]


@torch.no_grad()
def test_the_model_really_changes_there() -> None:
    """The reason for all this: the same text has other logits when the pass holds a position beyond the switch."""
    model = build("phi3-longrope")
    text = torch.arange(1, 11)[None]
    plain = model(text).logits

    def last_position(position: int) -> torch.Tensor:
        row = torch.cat([text, text[:, :1]], dim=1)  # one more token, which the others do not see
        return model(row, position_ids=torch.tensor([[*range(10), position]])).logits[:, :10]

    torch.testing.assert_close(last_position(LONGROPE_SWITCH - 1), plain, atol=1e-4, rtol=0)
    assert (last_position(LONGROPE_SWITCH) - plain).abs().max() > 0.1
