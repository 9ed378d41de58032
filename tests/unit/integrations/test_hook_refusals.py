"""What the Transformers hook does not do is refused with one message, before the model runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

import families
import outpace
from hooked import batch
from outpace.errors import ConfigError, ModelError, OutpaceError, PromptError, UnknownNameError, UnsupportedModelError


@pytest.fixture(scope="module")
def model() -> hf.PreTrainedModel:
    return families.build("llama")


def _full_cache(model: hf.PreTrainedModel) -> hf.DynamicCache:
    return model(batch([9])["input_ids"][:, :4], use_cache=True).past_key_values


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2}, r"beam search \(num_beams\)"),
    "beam sampling": ({"num_beams": 2, "do_sample": True}, "beam sampling"),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, r"contrastive search \(penalty_alpha\)"),
    "dola": ({"dola_layers": "high"}, "DoLa"),
    "forced words": ({"force_words_ids": [[5]], "num_beams": 2}, "constraints"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, "assisted generation"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    "hidden states": ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
    "static cache": ({"cache_implementation": "static"}, "cache_implementation='static'"),
    "offloaded cache": ({"cache_implementation": "offloaded"}, "cache_implementation='offloaded'"),
    "guidance": ({"guidance_scale": 1.5}, "guidance"),
    "SynthID": ({"watermarking_config": hf.SynthIDTextWatermarkingConfig(keys=[1, 2], ngram_len=3)}, "SynthID"),
    "synced": ({"synced_gpus": True}, "synced_gpus"),
    "positions": ({"position_ids": torch.arange(9)[None] + 1}, "position_ids"),
    "drafter": ({"drafter": "sufix"}, r"unknown drafter 'sufix'; did you mean 'suffix'.*known: .*lookup, merge, none"),
    "backend": ({"backend": "fast"}, "unknown attention backend 'fast'"),
    "max_nodes": ({"max_nodes": -1}, "max_nodes must be an integer at least 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments(model: hf.PreTrainedModel, case: str) -> None:
    arguments, message = REFUSED[case]
    passes: list[int] = []
    outpace.integrations.release(model)
    handle = model.register_forward_pre_hook(lambda *_: passes.append(1))
    try:
        with pytest.raises(ConfigError, match=message) as caught:
            model.generate(**batch([9]), max_new_tokens=4, custom_generate=outpace.generate, **arguments)
        assert isinstance(caught.value, OutpaceError)
        assert isinstance(caught.value, ValueError)
        with pytest.raises(ConfigError, match=message):
            outpace.generate(model, **batch([9]), max_new_tokens=4, **arguments)
    finally:
        handle.remove()
    assert not passes


def test_unknown_arguments_are_transformers_own_error(model: hf.PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="drafters"):
        model.generate(**batch([9]), max_new_tokens=4, custom_generate=outpace.generate, drafters="suffix")


def test_an_assistant(model: hf.PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="assistant_model"):
        model.generate(**batch([9]), custom_generate=outpace.generate, assistant_model=families.build("llama"))


def test_caches_of_the_callers_own(model: hf.PreTrainedModel) -> None:
    static = hf.StaticCache(config=model.config, max_cache_len=64)
    for cache in (hf.DynamicCache(), _full_cache(model), static):
        with pytest.raises(ConfigError, match=f"past_key_values, found a {type(cache).__name__}"):
            model.generate(**batch([9]), max_new_tokens=2, custom_generate=outpace.generate, past_key_values=cache)


def test_embeddings_and_other_inputs(model: hf.PreTrainedModel) -> None:
    embeddings = model.get_input_embeddings()(batch([9])["input_ids"])
    with pytest.raises(ConfigError, match="nothing else, found inputs_embeds"):
        model.generate(inputs_embeds=embeddings, max_new_tokens=2, custom_generate=outpace.generate)
    gpt2 = families.build("gpt2")
    types = torch.zeros((1, 9), dtype=torch.int64)
    with pytest.raises(ConfigError, match=r"found token_type_ids; take it out .*del inputs\['token_type_ids'\]"):
        gpt2.generate(**batch([9]), token_type_ids=types, max_new_tokens=2, custom_generate=outpace.generate)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1, 1, 1], [1, 1, 0]], "row 1 is not: load the tokenizer with padding_side='left'"),
        ([[1, 0, 1], [1, 1, 1]], "row 0 is not"),
        ([[1, 1, 1], [0, 0, 0]], "row 1 of attention_mask leaves no token"),
        ([[1, 1], [1, 1]], r"the shape of input_ids, \[2, 3\], found \[2, 2\]"),
    ],
)
def test_masks(model: hf.PreTrainedModel, mask: list[list[int]], message: str) -> None:
    ids = torch.tensor([[4, 5, 6], [7, 8, 9]])
    config = hf.GenerationConfig(max_new_tokens=2, pad_token_id=0)
    config._pad_token_tensor = config._eos_token_tensor = None  # as generate prepares it
    with pytest.raises(PromptError, match=message):
        outpace.generate(model, ids, generation_config=config, attention_mask=torch.tensor(mask))


def test_other_devices(model: hf.PreTrainedModel) -> None:
    config = hf.GenerationConfig(max_new_tokens=2)
    config._pad_token_tensor = None
    with pytest.raises(
        ConfigError, match=r"input_ids are on meta and the model is on cpu; move them: inputs.to\('cpu'\)"
    ):
        outpace.generate(model, torch.ones((1, 3), dtype=torch.int64, device="meta"), generation_config=config)


def test_models() -> None:
    inputs = {**batch([9]), "max_new_tokens": 2, "custom_generate": outpace.generate}
    compiled = families.build("llama")
    compiled.compile()
    with pytest.raises(UnsupportedModelError, match="was compiled in place"):
        compiled.generate(**inputs)
    compiled = families.build("llama")
    compiled.forward = torch.compile(compiled.forward)
    with pytest.raises(UnsupportedModelError, match="was compiled in place"):
        compiled.generate(**inputs)
    training = families.build("llama").train()
    with pytest.raises(ModelError, match=r"training mode.*model.eval\(\)"):
        training.generate(**inputs)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        families.REFUSED["t5"]().generate(**inputs)
    with pytest.raises(UnsupportedModelError, match="GPTJ"):
        families.REFUSED["gptj"]().generate(**inputs)
    with pytest.raises(UnknownNameError):
        families.build("llama").generate(**inputs, drafter="eagle9")


def test_prompts_that_fill_the_context(model: hf.PreTrainedModel) -> None:
    with pytest.raises(PromptError, match="the context of 512 tokens must also hold"):
        model.generate(**batch([families.MAX_POSITIONS]), max_new_tokens=2, custom_generate=outpace.generate)
