"""How much memory there is for keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import torch

from outpace.model.storage import LayerKV

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_UNKNOWN = 4 * 2**30  # macOS, Windows: modest, and `kv_tokens` overrides it


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
    known = [*_left_in_machine(), *_left_in_cgroups()]
    return max(0, min(known, default=_UNKNOWN))


def _left_in_machine() -> Iterator[int]:
    for line in _lines(_PROC / "meminfo"):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _left_in_cgroups() -> Iterator[int]:
    """What each control group with a limit leaves: the process's own, and those around it."""
    for line in _lines(_PROC / "self" / "cgroup"):  # hierarchy:controllers:path
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, usage, cache = _CGROUPS, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):  # version 1
            root = _CGROUPS / "memory"
            limit, usage, cache = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        # In a container the path may be the one outside of it, of which only the root can be seen.
        own = root / path.strip().lstrip("/")
        for folder in (own, *(parent for parent in own.parents if parent.is_relative_to(root))):
            numbers = [*_lines(folder / limit), *_lines(folder / usage)]
            if len(numbers) == 2 and numbers[0].strip() != "max":
                yield int(numbers[0]) - int(numbers[1]) + _reclaimable(folder / "memory.stat", cache)


def _reclaimable(path: Path, field: str) -> int:
    """Bytes of files, such as a checkpoint just read, that count as used until somebody needs the room."""
    return next((int(line.split()[1]) for line in _lines(path) if line.split()[:1] == [field]), 0)


def _lines(path: Path) -> list[str]:
    """Lines of a file; none if it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
