"""Outpace inside other libraries: Transformers' ``generate``."""

from outpace.integrations.engines import release
from outpace.integrations.hook import generate

__all__ = ["generate", "release"]
