"""Where the recorded traces, prompts and tokenizers lie; tests that need them are skipped where they are absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def data_path(*parts: str) -> Path:
    """A file of the data folder (OUTPACE_DATA, or ../shared/data beside the checkout); skips the test without it."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    path = Path(os.environ.get("OUTPACE_DATA", beside)).joinpath(*parts)
    if not path.exists():
        pytest.skip(f"no {path}; set OUTPACE_DATA to the folder that holds {'/'.join(parts)}")
    return path
