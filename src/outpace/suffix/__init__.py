"""Suffix automata on flat arrays, compiled by Numba."""

from outpace.suffix.frozen import FrozenAutomaton
from outpace.suffix.growing import GrowingAutomaton, Match

__all__ = ["FrozenAutomaton", "GrowingAutomaton", "Match"]
