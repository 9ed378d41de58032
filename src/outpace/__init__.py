"""Outpace: lossless speculative decoding for any Hugging Face causal language model."""

from outpace._version import __version__

__all__ = ["__version__"]
