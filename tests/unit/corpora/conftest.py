from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from outpace.assets import BUILTIN_MODEL
from outpace.tokenizers import TextTokenizer


@pytest.fixture(scope="module")
def box() -> TextTokenizer:
    return TextTokenizer.load(BUILTIN_MODEL)


@pytest.fixture
def load_once(box: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TextTokenizer, "load", lambda name: box)


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """Three documents with tokens, one without."""
    path = tmp_path / "in.jsonl"
    texts = ("def f(x):\n    return x", "", "def g(x):\n    return 2 * x", "for i in range(3): print(i)")
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def arrays(tmp_path: Path) -> list[Path]:
    """Ten documents of 4,000 ids."""
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"{number}.npy" for number in range(10)]
    for path in paths:
        np.save(path, rng.integers(0, 4096, 4000))
    return paths
