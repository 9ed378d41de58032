"""What the tests of building corpora share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outpace.assets import BUILTIN_MODEL
from outpace.corpora.build import BuildOptions

MEMORY = 2**24  # so that the tests do not ask for what is free
SHARDED = 2**21  # bytes: about 8,000 tokens a shard


def options(**changes: Any) -> BuildOptions:
    return BuildOptions(**{"tokenizer": BUILTIN_MODEL, "memory": MEMORY} | changes)


def beside(tmp_path: Path, *known: Path) -> list[str]:
    """What lies in the folder that the test did not make itself."""
    return sorted(path.name for path in tmp_path.iterdir() if path not in known)
