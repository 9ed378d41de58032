"""How much memory there is for keys and values."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch

from outpace._memory import free_main_memory
from outpace.model.storage import LayerKV


def available_rows(layers: SequenceOf[LayerKV], share: float = 0.5) -> int:
    """Rows that fit into ``share`` of the memory that is free now on the scarcest device."""
    bytes_on: dict[torch.device, int] = {}
    for layer in layers:
        bytes_on[layer.device] = bytes_on.get(layer.device, 0) + layer.row_bytes
    rows = [int(free_memory(device) * share) // per_row for device, per_row in bytes_on.items()]
    return max(1, min(rows, default=1))


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on ``device``: on the CPU of the machine, or of the container if it has less."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free_main_memory()
