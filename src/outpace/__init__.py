"""Outpace: lossless speculative decoding for any Hugging Face causal language model.

>>> import outpace
>>> engine = outpace.Engine("path/or/hub-id", drafter="suffix")
>>> [output] = engine.generate("Once upon a time", outpace.SamplingParams(max_tokens=64))
>>> output.text, output.figures.mean_accepted_tokens
"""

import importlib
from typing import TYPE_CHECKING, Any

from outpace._version import __version__

if TYPE_CHECKING:
    from outpace.config import Constraint, EngineConfig, SamplingParams
    from outpace.draft import Drafter, OracleDrafter, SignalNeeds, Signals, available_drafters, build_drafter
    from outpace.engine import Engine, EngineFigures, Figures, Output, Progress
    from outpace.errors import OutpaceError
    from outpace.integrations import generate
    from outpace.model import LoadOptions
    from outpace.tree import DraftTrees, Origin, Verdicts
    from outpace.verify import TokenLogprobs

__all__ = [
    "Constraint",
    "DraftTrees",
    "Drafter",
    "Engine",
    "EngineConfig",
    "EngineFigures",
    "Figures",
    "LoadOptions",
    "OracleDrafter",
    "Origin",
    "OutpaceError",
    "Output",
    "Progress",
    "SamplingParams",
    "SignalNeeds",
    "Signals",
    "TokenLogprobs",
    "Verdicts",
    "__version__",
    "available_drafters",
    "build_drafter",
    "generate",
]

# Where the names come from. They are imported when they are first used: torch and Transformers take seconds, and
# `outpace --help` needs neither.
_MODULES = {
    "config": ("Constraint", "EngineConfig", "SamplingParams"),
    "draft": ("Drafter", "OracleDrafter", "SignalNeeds", "Signals", "available_drafters", "build_drafter"),
    "engine": ("Engine", "EngineFigures", "Figures", "Output", "Progress"),
    "errors": ("OutpaceError",),
    "integrations": ("generate",),
    "model": ("LoadOptions",),
    "tree": ("DraftTrees", "Origin", "Verdicts"),
    "verify": ("TokenLogprobs",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


if not TYPE_CHECKING:  # or type checkers would accept every name

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        if name in _HOMES:
            value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
            globals()[name] = value  # the next access does not come here
            return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_HOMES})
