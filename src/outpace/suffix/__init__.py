"""Suffix automata on flat arrays, compiled by Numba."""

from outpace.suffix.growing import GrowingAutomaton, Match

__all__ = ["GrowingAutomaton", "Match"]
