"""Drafters: what proposes tokens. One protocol (`Drafter`), one file a drafter, one registry."""

from outpace.draft.base import Drafter, SignalNeeds, Signals
from outpace.draft.none import NoneDrafter
from outpace.draft.oracle import OracleDrafter
from outpace.draft.registry import available_drafters, build_drafter

__all__ = ["Drafter", "NoneDrafter", "OracleDrafter", "SignalNeeds", "Signals", "available_drafters", "build_drafter"]
