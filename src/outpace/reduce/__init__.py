"""Reduction: verify only what is likely. Drafters propose; `select` alone cuts."""

from outpace.reduce.budget import NodeBudget
from outpace.reduce.calibrate import Calibrator
from outpace.reduce.guard import Guard
from outpace.reduce.select import select

__all__ = ["Calibrator", "Guard", "NodeBudget", "select"]
