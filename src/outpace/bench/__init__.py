"""Measurements: replays of recorded outputs."""

from outpace.bench.replay import ReplayResult, replay_traces
from outpace.bench.traces import Trace, read_traces

__all__ = ["ReplayResult", "Trace", "read_traces", "replay_traces"]
