"""Outpace: lossless speculative decoding for any Hugging Face causal language model.

>>> import outpace
>>> engine = outpace.Engine("path/or/hub-id", drafter="suffix")
>>> [output] = engine.generate("Once upon a time", outpace.SamplingParams(max_tokens=64))
>>> output.text, output.figures.mean_accepted_tokens
"""

from outpace._version import __version__
from outpace.config import Constraint, EngineConfig, SamplingParams
from outpace.draft import Drafter, OracleDrafter, SignalNeeds, Signals, available_drafters, build_drafter
from outpace.engine import Engine, EngineFigures, Figures, Output, Progress
from outpace.errors import OutpaceError
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
]
