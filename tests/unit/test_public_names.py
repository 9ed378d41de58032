"""Names of `outpace` are imported when they are first used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import outpace

SCRIPT = """
import sys
import outpace
assert not {"torch", "transformers", "numba"} & set(sys.modules), "imported too much"
assert set(outpace.__all__) <= set(dir(outpace))
assert outpace.errors.ConfigError and outpace.OutpaceError
assert "torch" not in sys.modules, "errors need no torch"
from outpace import *
assert Engine is outpace.Engine is outpace.engine.Engine
"""


def test_importing_outpace_is_fast_and_names_work() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", outpace.__all__)
def test_every_public_name_is_there(name: str) -> None:
    value = getattr(outpace, name)
    assert name == "__version__" or value.__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'outpace' has no attribute 'Engin'"):
        outpace.Engin  # noqa: B018
    with pytest.raises(ImportError, match="Engin"):
        from outpace import Engin  # noqa: F401


def test_lazy_names_are_the_public_ones() -> None:
    assert {*outpace._HOMES, "__version__"} == set(outpace.__all__)
