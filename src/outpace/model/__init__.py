"""The target model: loading, probing, packed passes, keys and values."""

from outpace.model.arena import KVArena
from outpace.model.load import LoadOptions, load_model, load_tokenizer
from outpace.model.masks import MaskSpec
from outpace.model.memory import available_rows
from outpace.model.plan import StepPlan, pack
from outpace.model.probe import probe, unwrap
from outpace.model.storage import LayerKV
from outpace.model.target import Target

__all__ = [
    "KVArena",
    "LayerKV",
    "LoadOptions",
    "MaskSpec",
    "StepPlan",
    "Target",
    "available_rows",
    "load_model",
    "load_tokenizer",
    "pack",
    "probe",
    "unwrap",
]
