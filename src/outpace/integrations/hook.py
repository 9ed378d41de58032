"""``model.generate(**inputs, custom_generate=outpace.generate)``: Transformers prepares, the engine decodes."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from outpace.draft import Drafter
from outpace.errors import ConfigError
from outpace.integrations.caller import find_caller
from outpace.integrations.decode import Decoding
from outpace.integrations.engines import engine_for
from outpace.integrations.refuse import check_call, check_model

_LEAST_BATCH = 32


def generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    synced_gpus: bool | None = None,
    streamer: BaseStreamer | None = None,
    *,
    drafter: str | Drafter = "suffix",
    max_nodes: int | None = None,
    max_step_tokens: int | None = None,
    kv_tokens: int | None = None,
    guard: bool | None = None,
    backend: str | None = None,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Generate as the model's own ``generate`` does, sooner.

    Hand it to ``generate``, or call it with the same arguments::

        model.generate(**inputs, custom_generate=outpace.generate, drafter="suffix", max_new_tokens=128)
        outpace.generate(model, **inputs, drafter="suffix", max_new_tokens=128)

    Greedy decoding gives the same tokens in the same shape; sampling follows the same distribution and is reproduced by
    ``torch.manual_seed``. Only the second form can take ``stop_strings`` with a ``tokenizer``: Transformers does not hand
    the tokenizer on to a callable. The model is left as it was found; while a call runs, nobody else may use it. The engine
    is kept for the model's next call (`outpace.integrations.release` gives it up).

    Args:
        model: A causal model of Transformers, in evaluation mode.
        input_ids: ``int64[B, L]``, padded on the left.
        logits_processor: Called for one row at a time, with ``[1, length]`` ids (padding included) and ``[1, V]`` scores,
            once a token.
        stopping_criteria: Called once a token with the whole batch, as ``generate`` does.
        generation_config: As for ``generate``; other arguments of it may be given by name.
        synced_gpus: Not supported.
        streamer: Gets every token, as from ``generate``.
        drafter: Where drafts come from, see `outpace.available_drafters`.
        max_nodes: As in `EngineConfig`, like the following ones.
        max_step_tokens: Most prompt tokens of one step.
        kv_tokens: Most tokens whose keys and values are kept.
        guard: Cut drafts that do not pay by the clock.
        backend: Attention backend.
        model_kwargs: Inputs of the model, of which only ``attention_mask`` is used, and arguments of ``generate``.

    Returns:
        ``int64[B, L + new]``; or with ``return_dict_in_generate`` Transformers' ``GenerateDecoderOnlyOutput`` without
        ``past_key_values``. Of ``scores`` and ``logits``, rows that have finished are 0.

    Raises:
        ConfigError: An argument that is not supported (a `ValueError`), before any work.
        UnknownNameError: No such drafter or backend.
        UnsupportedModelError: The model cannot be run packed.
    """
    options: dict[str, Any] = {
        "max_nodes": max_nodes, "max_step_tokens": max_step_tokens, "kv_tokens": kv_tokens, "guard": guard,
        "backend": backend,
    }  # fmt: skip
    options = {name: value for name, value in options.items() if value is not None}
    prepared = generation_config is not None and hasattr(generation_config, "_pad_token_tensor")
    if not prepared:
        given = {
            "logits_processor": logits_processor, "generation_config": generation_config, "synced_gpus": synced_gpus,
            "streamer": streamer, **model_kwargs,
        }  # fmt: skip
        decode = functools.partial(generate, drafter=drafter, **options)
        return _through_transformers(model, decode, input_ids, stopping_criteria, given)
    assert generation_config is not None
    if input_ids is None:
        raise ConfigError("outpace.generate needs input_ids")
    caller = find_caller(model)
    if streamer is not None or synced_gpus:
        caller = dataclasses.replace(
            caller, streamer=streamer or caller.streamer, synced_gpus=synced_gpus or caller.synced_gpus
        )
    own = check_model(model)
    processors = logits_processor if logits_processor is not None else LogitsProcessorList()
    padding = check_call(own, input_ids, generation_config, processors, model_kwargs, caller)
    options["max_batch_size"] = max(_LEAST_BATCH, 1 << (len(input_ids) - 1).bit_length())
    criteria = stopping_criteria if stopping_criteria is not None else StoppingCriteriaList()
    # What a kept engine allocates must also do for a call without inference mode.
    with torch.inference_mode(False), torch.no_grad(), engine_for(own, drafter, options) as engine:
        decoding = Decoding(engine, input_ids, padding, processors, criteria, generation_config, caller.streamer)
        return decoding.run()


def _through_transformers(
    model: Any,
    decode: functools.partial[Any],
    input_ids: torch.Tensor | None,
    stopping_criteria: StoppingCriteriaList | None,
    given: dict[str, Any],
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Let the model's own `generate` prepare everything and come back here."""
    tokenizer: PreTrainedTokenizerBase | None = given.pop("tokenizer", None)
    strings = given.pop("stop_strings", None)
    config: GenerationConfig | None = given["generation_config"]
    if strings is None and config is not None and config.stop_strings is not None:
        given["generation_config"] = copy.deepcopy(config)
        strings, given["generation_config"].stop_strings = config.stop_strings, None
    criteria = StoppingCriteriaList(stopping_criteria or [])
    if strings is not None:
        if tokenizer is None:
            raise ConfigError("stop_strings need the model's tokenizer: pass tokenizer=...")
        criteria.append(StopStringCriteria(tokenizer, strings))
    if input_ids is not None:
        given["input_ids"] = input_ids
    found: GenerateDecoderOnlyOutput | torch.Tensor = getattr(model, "_orig_mod", model).generate(
        stopping_criteria=criteria, custom_generate=decode, **given
    )
    return found
