"""The attention function that unmodified models call, and what it does for a packed step.

Transformers looks up a model's attention function by name, and hands extra keyword arguments of ``model(...)`` on to it in
every layer. So we register one function and one mask function under the name ``outpace``, select that name for the length
of a pass, and pass the step along as the keyword ``outpace_step``. No modeling code is copied or changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from outpace.errors import LifecycleError, UnsupportedModelError
from outpace.model.masks import FULL, MaskFunction, MaskSpec, classify

ATTENTION_NAME = "outpace"
_LARGEST_SCORES = 2**25  # scores that the explicit softmax holds at a time


@dataclass(frozen=True, slots=True, eq=False)
class AttentionOptions:
    """What a layer wants of its attention, besides the mask.

    Attributes:
        scaling: Factor of the scores; None is ``key_dim ** -0.5``.
        softcap: Scores become ``softcap * tanh(score / softcap)``; None does nothing.
        sinks: ``[heads]``, one more score per head that takes part in the softmax and has no value; None for none.
    """

    scaling: float | None
    softcap: float | None
    sinks: torch.Tensor | None


class AttentionStep(Protocol):
    """What a pass carries to its attention layers."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: object,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Attend in one layer.

        Args:
            module: The attention module that asks.
            query: ``[1, heads, T, key_dim]``.
            key: ``[1, key_heads, T, key_dim]``, new tokens only.
            value: ``[1, key_heads, T, value_dim]``.
            mask: What our mask function returned for this layer, or what the model made of it.
            options: Scaling and the like.

        Returns:
            ``[1, T, heads, value_dim]``.
        """


def _attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    outpace_step: AttentionStep | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    if outpace_step is None:
        raise LifecycleError(
            "attention implementation 'outpace' only works inside outpace.Engine; it was selected by hand, or the model does "
            "not hand keyword arguments on to its attention layers"
        )
    if position_bias is not None:
        raise UnsupportedModelError("the model adds a position bias to its attention scores")
    return outpace_step.attend(
        module, query, key, value, attention_mask, AttentionOptions(scaling, softcap, s_aux)
    ), None


def _mask_function(
    *args: object, mask_function: MaskFunction | None = None, local_size: int | None = None, **_: object
) -> MaskSpec:
    return FULL if mask_function is None else classify(mask_function, local_size)


def register() -> None:
    """Make the name known to Transformers; again is harmless."""
    if ATTENTION_NAME not in AttentionInterface():  # type: ignore[no-untyped-call]
        AttentionInterface.register(ATTENTION_NAME, _attention_function)
        AttentionMaskInterface.register(ATTENTION_NAME, _mask_function)


def attention_configs(model: torch.nn.Module) -> list[PreTrainedConfig]:
    """The distinct configs that the model's parts look their attention implementation up in."""
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    return list(configs.values())


@contextmanager
def selected(configs: list[PreTrainedConfig], name: str = ATTENTION_NAME) -> Iterator[None]:
    """Select an attention implementation by name, and put back what was there."""
    # The public setter walks into sub-configs, and would overwrite there what it could not restore.
    before = [config._attn_implementation_internal for config in configs]
    try:
        for config in configs:
            config._attn_implementation_internal = name
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation_internal = implementation


def attend_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: AttentionOptions,
    *,
    causal: bool = False,
) -> torch.Tensor:
    """Attention of one sequence in plain torch operations; the definition that faster backends are compared with.

    Args:
        query: ``[heads, t, key_dim]``.
        key: ``[key_heads, length, key_dim]``; query heads ``g * n`` to ``g * (n + 1) - 1`` use key head ``n``.
        value: ``[key_heads, length, value_dim]``.
        mask: ``[t, length]``, added to the scores (0 or minus infinity), or None.
        options: Scaling, soft cap, sinks.
        causal: The mask is plain causal and ``length == t``; then ``mask`` must be None.

    Returns:
        ``[heads, t, value_dim]``.
    """
    if options.softcap is None and options.sinks is None:
        return _sdpa(query, key, value, mask, options.scaling, causal)
    heads, t, dim = query.shape
    if causal:
        mask = torch.full((t, t), float("-inf"), dtype=query.dtype, device=query.device).triu(1)
    block = max(1, _LARGEST_SCORES // (heads * key.shape[1]))
    if t > block:  # bound what is in memory at a time
        parts = [
            attend_reference(
                query[:, i : i + block], key, value, None if mask is None else mask[i : i + block], options
            )
            for i in range(0, t, block)
        ]
        return torch.cat(parts, dim=1)
    groups = heads // key.shape[0]
    scaling = dim**-0.5 if options.scaling is None else options.scaling
    folded = query.reshape(key.shape[0], groups * t, dim)
    scores = (torch.matmul(folded, key.transpose(1, 2)) * scaling).view(heads, t, -1)
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask is not None:
        scores = scores + mask
    scores = scores.float()
    if options.sinks is not None:
        sinks = options.sinks.float().view(heads, 1, 1).expand(heads, t, 1)
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    out = torch.matmul(weights.to(value.dtype).view(key.shape[0], groups * t, -1), value)
    return out.view(heads, t, -1)


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    causal: bool,
) -> torch.Tensor:
    heads, t, _ = query.shape
    key_heads = key.shape[0]
    attend: Any = torch.nn.functional.scaled_dot_product_attention
    if heads != key_heads and t == 1:
        # The query heads of one key head become its query rows: no keys are repeated.
        folded = query.reshape(1, key_heads, heads // key_heads, -1)
        out = attend(folded, key[None], value[None], attn_mask=mask, scale=scaling)
        return out.reshape(heads, 1, -1)  # type: ignore[no-any-return]
    out = attend(
        query[None],
        key[None],
        value[None],
        attn_mask=mask,
        scale=scaling,
        is_causal=causal,
        enable_gqa=heads != key_heads,
    )
    return out[0]  # type: ignore[no-any-return]
