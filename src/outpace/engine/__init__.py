"""The engine: scheduling, the step, requests and their figures."""

from outpace.engine.engine import Engine
from outpace.engine.output import EngineFigures, Figures, FinishReason, Output, Progress, total_figures
from outpace.engine.prompts import Prompt
from outpace.engine.text import TextStream

__all__ = [
    "Engine",
    "EngineFigures",
    "Figures",
    "FinishReason",
    "Output",
    "Progress",
    "Prompt",
    "TextStream",
    "total_figures",
]
