"""What an engine settles before it runs: options, end-of-sequence ids, tokenizer, parameters for each prompt."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence as SequenceOf
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outpace.config import EngineConfig, SamplingParams, from_mapping
from outpace.engine.output import Figures, Output
from outpace.errors import ConfigError, OutpaceError, UnknownNameError
from outpace.model import LoadOptions, load_tokenizer


def split_options(options: dict[str, Any], *, loads: bool) -> tuple[EngineConfig, LoadOptions]:
    """Sort an engine's options by what they are for.

    Args:
        options: Names and values.
        loads: Whether the model is given by name, so that it is loaded.

    Raises:
        UnknownNameError: Nothing has this name.
        ConfigError: A value does not fit, or a loading option for a loaded model.
    """
    own = {field.name for field in dataclasses.fields(EngineConfig)}
    loading = {field.name for field in dataclasses.fields(LoadOptions)}
    for name in options:
        if name not in own | loading:
            raise UnknownNameError("engine option", name, own | loading)
        if name in loading and not loads:
            raise ConfigError(f"{name} is for loading a model by name, and the model given is already loaded")
    return (
        from_mapping(EngineConfig, {k: v for k, v in options.items() if k in own}, "engine option"),
        from_mapping(LoadOptions, {k: v for k, v in options.items() if k in loading}, "loading option"),
    )


def eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """End-of-sequence ids of the generation config, else of the model's config."""
    generation: Any = getattr(model, "generation_config", None)
    found: Any = getattr(generation, "eos_token_id", None)
    if generation is None:
        found = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset(int(token) for token in (found if isinstance(found, list | tuple) else [found]))


def stop_tokens(
    params: SamplingParams, eos: frozenset[int], tokenizer: PreTrainedTokenizerBase | None
) -> dict[int, int | str]:
    """Token ids that end a request, and what its output names as the reason.

    Text leaves special tokens out, so a stop string that is one (a chat template's end of turn, for instance) would never
    be found there; it is watched for as a token.
    """
    found: dict[int, int | str] = {} if params.ignore_eos else {token: token for token in eos}
    found.update({token: token for token in params.stop_token_ids})
    special = set(getattr(tokenizer, "all_special_tokens", ()))
    for text in params.stop:
        if tokenizer is not None and text in special:
            found[int(tokenizer.convert_tokens_to_ids(text))] = text  # type: ignore[arg-type]
    return found


def params_for(params: SamplingParams | SequenceOf[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """One `SamplingParams` for each of ``count`` prompts.

    Raises:
        ConfigError: Several were given, but not as many as prompts; or something else was given.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    each: list[Any] = list(params) if isinstance(params, list | tuple) else [params]
    others = {type(own).__name__ for own in each if not isinstance(own, SamplingParams)}
    if others:
        raise ConfigError(f"params must be SamplingParams, or a list of them, found {', '.join(sorted(others))}")
    if len(each) != count:
        raise ConfigError(f"expected one SamplingParams for each of {count} prompts, found {len(each)}")
    return each


def failed_output(index: int, error: OutpaceError) -> Output:
    """The output of prompt ``index`` that was refused."""
    return Output(f"rejected-{index}", index, 0, [], [], "", "error", None, None, None, Figures(), error)


def tokenizer_beside(model: str | os.PathLike[str], options: LoadOptions) -> tuple[PreTrainedTokenizerBase | None, str]:
    """The tokenizer that lies beside a model, or None and why there is none; token ids work without."""
    try:
        return load_tokenizer(model, options), ""
    except OutpaceError as error:
        return None, f" ({error})"
