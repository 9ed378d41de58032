"""Attention backends by name."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from outpace.config import BACKENDS
from outpace.errors import ConfigError, UnknownNameError
from outpace.model.arena import KVArena
from outpace.model.attention import AttentionStep
from outpace.model.cpu_backend import CpuBackend, supports
from outpace.model.masks import MaskSpec
from outpace.model.plan import StepPlan
from outpace.model.storage import LayerKV
from outpace.model.torch_backend import TorchBackend


class AttentionBackend(Protocol):
    """What makes the attention of a target's passes."""

    def step(self, plan: StepPlan, arena: KVArena) -> AttentionStep:
        """Begin one packed pass."""


def make_backend(
    name: str, layers: SequenceOf[LayerKV], layer_of: dict[int, int], masks: SequenceOf[MaskSpec]
) -> AttentionBackend:
    """The backend of that name for a model's layers.

    Args:
        name: ``"torch"``, plain SDPA on any device; ``"cpu"``, one compiled call a layer; ``"auto"``, the latter where it
            knows what a layer stores, else the former.
        layers: What each attention layer stores.
        layer_of: Index of each attention module (by ``id``).
        masks: The pattern of each layer.

    Raises:
        UnknownNameError: No such backend.
        ConfigError: The backend does not know what one of the layers stores.
    """
    if name not in BACKENDS:
        raise UnknownNameError("attention backend", name, BACKENDS)
    if name == "cpu":
        for index, layer in enumerate(layers):
            if not supports(layer):
                raise ConfigError(
                    "attention backend 'cpu' is for layers on the CPU in float32 or bfloat16, with as many value heads as "
                    f"key heads; layer {index} is on {layer.device} in {str(layer.dtype).removeprefix('torch.')} with "
                    f"{layer.key_heads} key and {layer.value_heads} value heads. Use 'auto' or 'torch'"
                )
    if name == "cpu" or (name == "auto" and any(supports(layer) for layer in layers)):
        return CpuBackend(layer_of, masks)
    return TorchBackend(layer_of, masks)
