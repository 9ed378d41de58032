"""Prompts in the forms that a caller may give them, to token ids."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

from outpace.errors import ConfigError, PromptError
from outpace.tree import Int32Array

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | SequenceOf[int] | SequenceOf[Message] | npt.NDArray[np.integer[Any]] | torch.Tensor


def as_list(prompts: Prompt | SequenceOf[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list: a string, a flat list of ids or one conversation is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, np.ndarray | torch.Tensor):
        return list(prompts) if prompts.ndim == 2 else [prompts]
    if not isinstance(prompts, SequenceOf) or (len(prompts) and isinstance(prompts[0], int | np.integer | Mapping)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def to_token_ids(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, why_no_tokenizer: str = ""
) -> Int32Array:
    """Token ids of one prompt.

    Args:
        prompt: Text, a conversation (a list of ``{"role": ..., "content": ...}``), or token ids.
        tokenizer: Needed for the first two.
        vocab_size: Ids must be below it.
        why_no_tokenizer: For the error, if there is none.

    Raises:
        PromptError: Empty, not encodable, of no known form, or with ids outside the vocabulary.
        ConfigError: A tokenizer or a chat template is needed and there is none.
    """
    ids: Any = prompt
    if not isinstance(prompt, SequenceOf | np.ndarray | torch.Tensor) or isinstance(prompt, bytes):
        raise PromptError(_unknown_form(prompt))
    is_array = isinstance(prompt, np.ndarray | torch.Tensor)
    if isinstance(prompt, str) or (not is_array and len(prompt) and isinstance(prompt[0], Mapping)):
        if tokenizer is None:
            raise ConfigError(
                f"a text prompt needs a tokenizer, and there is none{why_no_tokenizer}; pass tokenizer=..., or token ids"
            )
        ids = _encode_text(prompt, tokenizer) if isinstance(prompt, str) else _encode_chat(ids, tokenizer)
    try:
        array = np.asarray(ids)
    except (ValueError, TypeError) as error:
        raise PromptError(f"expected a flat list of token ids: {error}") from error
    if array.size == 0:
        raise PromptError("the prompt is empty: expected at least one token (a BOS token, for instance)")
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise PromptError(f"{_unknown_form(prompt)} of shape {list(array.shape)} and dtype {array.dtype}")
    if array.min() < 0 or array.max() >= vocab_size:
        raise PromptError(f"token ids must be from 0 to {vocab_size - 1}, found {array.min()} to {array.max()}")
    return array.astype(np.int32)


def _unknown_form(prompt: object) -> str:
    return f"a prompt must be text, a list of messages or a flat list of token ids, found {type(prompt).__name__}"


def _encode_text(prompt: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the prompt is not valid text: character {error.start} is {prompt[error.start]!r}, which UTF-8 cannot encode"
        ) from error
    encoded: Any = tokenizer(prompt)
    ids: list[int] = encoded["input_ids"]
    return ids


def _encode_chat(messages: SequenceOf[Message], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError("the tokenizer has no chat template; give the prompt as text, or set tokenizer.chat_template")
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise PromptError(f"message {place} must be a mapping with 'role' and 'content', found {message!r}")
    try:
        encoded: Any = tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, tokenize=True, return_dict=True
        )
    except Exception as error:  # templates raise whatever their authors chose
        raise PromptError(f"the chat template refused the conversation: {error}") from error
    ids: list[int] = encoded["input_ids"]
    return ids
