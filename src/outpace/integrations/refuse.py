"""What the hook does not do, said before any work is done."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import (
    AlternatingCodebooksLogitsProcessor,
    ClassifierFreeGuidanceLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from outpace.errors import ConfigError, PromptError, UnsupportedModelError
from outpace.integrations.caller import Caller

_INSTEAD = "; leave custom_generate out for that"
_MODES = {
    "BEAM_SEARCH": "beam search (num_beams)",
    "BEAM_SAMPLE": "beam sampling (num_beams)",
    "GROUP_BEAM_SEARCH": "beam search in groups (num_beam_groups)",
    "CONSTRAINED_BEAM_SEARCH": "constraints (constraints, force_words_ids)",
    "CONTRASTIVE_SEARCH": "contrastive search (penalty_alpha)",
    "DOLA_GENERATION": "DoLa (dola_layers)",
    "ASSISTED_GENERATION": "assisted generation (prompt_lookup_num_tokens, assistant_early_exit, use_mtp)",
}
_PROCESSORS = {
    UnbatchedClassifierFreeGuidanceLogitsProcessor: "classifier-free guidance (guidance_scale), which runs the model itself",
    ClassifierFreeGuidanceLogitsProcessor: "classifier-free guidance, which needs two rows for each text",
    SynthIDTextWatermarkLogitsProcessor: "SynthID watermarks, whose state counts the calls of a whole batch",
    AlternatingCodebooksLogitsProcessor: "codebooks of audio models",
}
# What `generate` itself adds to a decoder's inputs, and what changes no token.
_KNOWN_INPUTS = frozenset(
    (
        "attention_mask",
        "position_ids",
        "cache_position",
        "past_key_values",
        "use_cache",
        "logits_to_keep",
        "return_dict",
    )
)


def check_model(model: object) -> PreTrainedModel:
    """The model itself, if the hook can run it.

    Raises:
        UnsupportedModelError: It is compiled, an encoder-decoder, or no model of Transformers.
    """
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(f"expected a Transformers model (PreTrainedModel), found {name}")
    compiled = getattr(model, "_compiled_call_impl", None) is not None
    if compiled or hasattr(model.forward, "_torchdynamo_orig_callable"):
        raise UnsupportedModelError(
            f"{name} was compiled in place (model.compile() or model.forward = torch.compile(...)), and packed passes, whose "
            "shapes change with every step, would compile again and again; use the model as it was loaded "
            "(torch.compile(model) leaves it so)"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder; Outpace runs decoder-only causal models")
    return model


def check_call(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    processors: LogitsProcessorList,
    model_kwargs: dict[str, Any],
    caller: Caller,
) -> torch.Tensor:
    """See that the call asks for nothing that the engine cannot do.

    Returns:
        ``int64[B]``: how much of each row of ``input_ids`` is padding, on the left.

    Raises:
        ConfigError: An argument that is not supported.
        PromptError: A mask that is not left-padded, or a row without tokens.
    """
    _check_mode(config, caller)
    _check_outputs(config, caller)
    _check_cache(config, model_kwargs.get("past_key_values"), caller)
    for processor in processors:
        for kind, what in _PROCESSORS.items():
            if isinstance(processor, kind):
                raise ConfigError(f"outpace.generate does not support {what}{_INSTEAD}")
    for name, value in model_kwargs.items():
        if name not in _KNOWN_INPUTS and value is not None:
            raise ConfigError(
                f"outpace.generate passes token ids to the model and nothing else, found {name}; take it out of the inputs if "
                f"the text does not need it (del inputs[{name!r}])"
            )
    if input_ids.ndim != 2 or input_ids.shape[1] == 0:
        raise ConfigError(f"outpace.generate needs input_ids of shape [batch, length], found {list(input_ids.shape)}")
    _check_device(model, input_ids)
    padding = _padding(input_ids, model_kwargs.get("attention_mask"))
    _check_positions(input_ids, padding, model_kwargs.get("position_ids"))
    return padding


def _check_mode(config: GenerationConfig, caller: Caller) -> None:
    if caller.assistant_model is not None:
        raise ConfigError("outpace.generate does not use assistant_model: it speculates itself, see drafter")
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        what = _MODES.get(mode.name, f"generation mode {mode.value}")
        raise ConfigError(f"outpace.generate does not support {what}{_INSTEAD}")
    if getattr(config, "guidance_scale", None) not in (None, 1, 1.0) or caller.negative_prompt:
        raise ConfigError(
            "outpace.generate does not support classifier-free guidance (guidance_scale, negative_prompt_ids)"
            + _INSTEAD
        )


def _check_outputs(config: GenerationConfig, caller: Caller) -> None:
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise ConfigError(f"outpace.generate does not support {name}{_INSTEAD}")
    if caller.synced_gpus:
        raise ConfigError("outpace.generate does not support synced_gpus: each process ends when its own rows do")


def _check_cache(config: GenerationConfig, cache: Any, caller: Caller) -> None:
    if config.cache_implementation not in (None, "dynamic"):
        raise ConfigError(
            "outpace.generate keeps keys and values itself and supports no other cache, found "
            f"cache_implementation={config.cache_implementation!r}"
        )
    given = caller.past_key_values is not None
    if given or (cache is not None and (type(cache) is not DynamicCache or cache.get_seq_length() > 0)):
        raise ConfigError(
            "outpace.generate keeps keys and values itself and neither reads nor fills past_key_values, found a "
            f"{type(cache).__name__}"
        )


def _check_device(model: PreTrainedModel, input_ids: torch.Tensor) -> None:
    device: Any = model.get_input_embeddings().weight.device
    # Inputs on the CPU are read without a copy; an offloaded model may have its weights anywhere.
    if input_ids.device.type not in ("cpu", device.type) and device.type != "meta":
        raise ConfigError(
            f"input_ids are on {input_ids.device} and the model is on {device}; move them: inputs.to({str(device)!r})"
        )


def _padding(input_ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    batch_size, length = input_ids.shape
    if mask is None:
        return torch.zeros(batch_size, dtype=torch.int64)
    if mask.shape != input_ids.shape:
        raise PromptError(
            f"attention_mask must have the shape of input_ids, {list(input_ids.shape)}, found {list(mask.shape)}"
        )
    present = mask.to("cpu") != 0  # [B, L]
    padding = length - present.sum(dim=1)  # [B]
    expected = torch.arange(length)[None] >= padding[:, None]
    wrong = (present != expected).any(dim=1).nonzero()
    if len(wrong):
        raise PromptError(
            f"attention_mask must be zeros, then ones, in each row (padding on the left); row {int(wrong[0])} is not: load "
            "the tokenizer with padding_side='left'. Without an attention_mask Transformers takes every pad token for padding: "
            "pass attention_mask=torch.ones_like(input_ids) if some of them are text"
        )
    if bool((padding == length).any()):
        raise PromptError(
            f"row {int((padding == length).nonzero()[0])} of attention_mask leaves no token of the prompt"
        )
    return padding


def _check_positions(input_ids: torch.Tensor, padding: torch.Tensor, found: torch.Tensor | None) -> None:
    if found is None:
        return
    expected = (torch.arange(input_ids.shape[1])[None] - padding[:, None]).clamp_min(0)  # [B, L]
    present = torch.arange(input_ids.shape[1])[None] >= padding[:, None]
    found = found.to("cpu")
    if found.shape[-1] != input_ids.shape[1] or found.ndim != 2 or bool(((found != expected) & present).any()):
        raise ConfigError(
            "outpace.generate counts positions from 0 in each row; position_ids of your own are not supported"
        )
