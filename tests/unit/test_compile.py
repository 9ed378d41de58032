"""Kernels compile and run where Numba finds no folder for its cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from numba.core import caching

from outpace._compile import c_function, compiled, source_digest

RUN = """
import numba.core.caching as caching
for locator in caching.CacheImpl._locator_classes:
    locator.ensure_cache_path = refuse = lambda self: (_ for _ in ()).throw(PermissionError("read-only"))
import torch, transformers
from outpace import Engine, SamplingParams
config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                                  num_attention_heads=2, num_key_value_heads=1)
model = transformers.LlamaForCausalLM(config).eval()
model.generation_config.eos_token_id = None
engine = Engine(model, drafter="suffix", backend="cpu")
print(len(engine.generate([[1, 2, 3, 1, 2]], SamplingParams(max_tokens=8))[0].token_ids))
"""


def test_the_engine_runs_without_a_writable_cache(tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path / "absent"), "NUMBA_CACHE_DIR": ""}
    found = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, env=environment, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "8"


def test_functions_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])

    def double(x: int) -> int:
        return 2 * x

    def nothing(block):  # type: ignore[no-untyped-def]
        pass

    assert compiled(double)(4) == 8
    assert c_function(nothing).address


def test_functions_with_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))

    def triple(x: int) -> int:
        return 3 * x

    assert compiled(triple)(4) == 12
    assert any(path.suffix == ".nbc" for path in tmp_path.rglob("*"))


def test_a_change_of_any_file_makes_what_was_cached_stale() -> None:
    @compiled
    def twice(x: int) -> int:
        return 2 * x

    stamp = twice._cache._cache_file._source_stamp  # type: ignore[attr-defined]
    assert stamp[1] == source_digest()
