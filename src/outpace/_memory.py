"""How much main memory is free."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_UNKNOWN = 4 * 2**30  # macOS, Windows: modest, and an option overrides it


def free_main_memory() -> int:
    """Bytes that can still be allocated: of the machine, or of the container if it has less."""
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
