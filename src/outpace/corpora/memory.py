"""What the machine has and what processes hold of it; sizes in bytes as people write them."""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Iterable
from pathlib import Path

from outpace.errors import ConfigError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_LIMIT = 2.0**63
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes in a size such as ``"2GB"``, ``"1.5 GiB"``, ``"800M"`` or ``"4000000"``.

    Raises:
        ConfigError: It is no size, or more than any machine has.
    """
    found = _SIZE.fullmatch(text)
    if found is None or found[2].lower() not in _UNITS:
        raise ConfigError(f"expected a size such as 2GB, 1.5GiB or 800M, found {text!r}")
    size = float(found[1]) * _UNITS[found[2].lower()]
    if size >= _LIMIT:
        raise ConfigError(
            f"expected a size of less than 2^63 bytes, found {text if len(text) <= 40 else text[:37] + '...'}"
        )
    return int(size)


def size_text(num_bytes: float) -> str:
    """Bytes for people, with three digits or so: ``"1.25 GB"``."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            break
        num_bytes /= 1000
    return f"{num_bytes:,.0f} {unit}" if unit == "bytes" or num_bytes >= 100 else f"{num_bytes:,.3g} {unit}"


def resident(processes: Iterable[int]) -> int:
    """Bytes that some processes hold now, mapped files apart; of those that are gone, or where nothing tells, 0."""
    return sum(_status(process, "RssAnon") for process in processes)


def peak_resident() -> int:
    """The most bytes that this process held at any time, mapped files included."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def num_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _status(process: int, field: str) -> int:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)
