"""How much memory there is for keys and values."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch

from outpace.model.arena import LayerKV


def available_rows(layers: SequenceOf[LayerKV], share: float = 0.5) -> int:
    """Rows that fit into ``share`` of the memory that is free now on the scarcest device."""
    bytes_on: dict[torch.device, int] = {}
    for layer in layers:
        bytes_on[layer.device] = bytes_on.get(layer.device, 0) + layer.row_bytes
    rows = [int(free_memory(device) * share) // per_row for device, per_row in bytes_on.items()]
    return max(1, min(rows, default=1))


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on ``device``."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4 * 2**30  # unknown (macOS, Windows): modest, and `kv_tokens` overrides it
