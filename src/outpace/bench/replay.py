"""Replay: what a drafter would have saved on outputs that were recorded before, without a model.

Each trace is one sequence. The drafter gets the prompt, then the first output token as prefill gives it; then, step
after step, it drafts, what agrees with the recorded output is accepted, and the recorded token after it is the bonus
token. Nothing past the recorded end is accepted.

**Mean accepted tokens** (MAT): committed tokens a step, over all traces together; bonus tokens and the end-of-sequence
token count, prefill's step and its first token do not. 1.00 is plain autoregressive decoding. **Nodes a step** are
those that would be verified, roots excluded. **Drafting time** is all the drafter's own work (``open``, ``propose``,
``observe``, ``close``) over the number of steps, after everything was compiled.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from outpace._compile import compiled
from outpace.bench.traces import Trace
from outpace.draft import Drafter, build_drafter
from outpace.errors import ConfigError
from outpace.reduce import select
from outpace.tree import Int32Array, Verdicts

_MOST_PROPOSED = 1024  # cap of each tree; a drafter's own limit is lower
_KEY = 0
_NO_PATH = np.zeros(0, np.int32)
_NO_PATH_OFFSETS = np.zeros(2, np.int32)


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Figures of one replay.

    Attributes:
        drafter: Its spec.
        mean_accepted_tokens: Committed tokens a step.
        by_category: The same for each category of traces.
        nodes_per_step: Drafted nodes that were verified, a step.
        draft_us_per_step: Microseconds of the drafter's own work, a step.
        steps: Verify steps.
        tokens: Tokens that they committed.
        traces: Recorded outputs.
        max_nodes: Limit of each tree's nodes, or None.
    """

    drafter: str
    mean_accepted_tokens: float
    by_category: dict[str, float]
    nodes_per_step: float
    draft_us_per_step: float
    steps: int
    tokens: int
    traces: int
    max_nodes: int | None

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


@dataclass(slots=True)
class _Counts:
    steps: int = 0
    tokens: int = 0
    nodes: int = 0
    draft_ns: int = 0


@dataclass(slots=True)
class Replay:
    """A replay under way: add traces one by one, then take the `result`.

    Attributes:
        drafter: What drafts.
        name: How the result calls it.
        max_nodes: Limit of each tree's nodes, or None.
    """

    drafter: Drafter
    name: str
    max_nodes: int | None = None
    _total: _Counts = field(default_factory=_Counts)
    _by_category: dict[str, _Counts] = field(default_factory=dict)
    _traces: int = 0

    def add(self, trace: Trace, namespace: str = "") -> None:
        """Replay one trace."""
        counts = _replay_trace(self.drafter, trace, self.max_nodes, namespace)
        self._traces += 1
        for part in (self._total, self._by_category.setdefault(trace.category, _Counts())):
            part.steps += counts.steps
            part.tokens += counts.tokens
            part.nodes += counts.nodes
            part.draft_ns += counts.draft_ns

    @property
    def result(self) -> ReplayResult:
        """The figures so far; means over no steps are 0."""
        total, steps = self._total, max(self._total.steps, 1)
        return ReplayResult(
            drafter=self.name,
            mean_accepted_tokens=total.tokens / steps,
            by_category={name: c.tokens / max(c.steps, 1) for name, c in sorted(self._by_category.items())},
            nodes_per_step=total.nodes / steps,
            draft_us_per_step=total.draft_ns / 1000 / steps,
            steps=total.steps,
            tokens=total.tokens,
            traces=self._traces,
            max_nodes=self.max_nodes,
        )


def start_replay(drafter: str | Drafter, traces: Iterable[Trace], max_nodes: int | None = None) -> Replay:
    """Build the drafter, tell it the recorded outputs if it needs them (``oracle``), and compile what it runs.

    Args:
        drafter: A spec, or a drafter with no open sequences.
        traces: All that will be added. Of several with the same prompt, ``oracle`` knows the last.
        max_nodes: Limit of each tree's nodes, applied by `outpace.reduce.select`; None for the drafter's own.

    Raises:
        ConfigError: The drafter or the limit cannot be used.
    """
    if max_nodes is not None and max_nodes < 0:
        raise ConfigError(f"max_nodes must be at least 0, found {max_nodes}")
    warm_up = _warm_up_trace()
    known = {tuple(t.prompt_ids.tolist()): t.output_ids.tolist() for t in (*traces, warm_up)}
    name = drafter if isinstance(drafter, str) else drafter.name
    run = Replay(build_drafter(drafter, known), name, max_nodes)
    _replay_trace(run.drafter, warm_up, max_nodes, namespace="warm-up")
    return run


def replay_traces(traces: Iterable[Trace], drafter: str | Drafter, max_nodes: int | None = None) -> ReplayResult:
    """Replay recorded outputs through a drafter; see `start_replay`."""
    traces = list(traces)
    run = start_replay(drafter, traces, max_nodes)
    for trace in traces:
        run.add(trace)
    return run.result


def _warm_up_trace() -> Trace:
    """A text that takes a drafter through its paths: matches, misses, text that outgrows what was reserved."""
    rng = np.random.default_rng(0)
    text = rng.integers(0, 40, 1200).astype(np.int32)
    text[600:700] = text[500:600]
    return Trace(text[:100], text[100:])


def _replay_trace(drafter: Drafter, trace: Trace, max_nodes: int | None, namespace: str) -> _Counts:
    clock = time.perf_counter_ns
    recorded, keys, caps = trace.output_ids, [_KEY], np.full(1, _MOST_PROPOSED, np.int32)
    counts = _Counts()
    first = _verdicts(_NO_PATH, recorded[:1])
    begin = clock()
    drafter.open(_KEY, trace.prompt_ids, namespace)
    drafter.observe(keys, first)
    counts.draft_ns += clock() - begin
    at = 1
    while at < len(recorded):
        begin = clock()
        trees = drafter.propose(keys, caps)
        counts.draft_ns += clock() - begin
        if max_nodes is not None:
            trees = select(trees, max_nodes)
        path = _accepted(trees.tokens, trees.parents, recorded, at)
        committed = recorded[at : at + len(path) + 1]
        verdicts = _verdicts(path, committed)
        begin = clock()
        drafter.observe(keys, verdicts)
        counts.draft_ns += clock() - begin
        at += len(committed)
        counts.steps += 1
        counts.tokens += len(committed)
        counts.nodes += trees.num_nodes
    begin = clock()
    drafter.close(_KEY)
    counts.draft_ns += clock() - begin
    return counts


def _verdicts(path: Int32Array, committed: Int32Array) -> Verdicts:
    """Verdicts of a batch of one."""
    path_offsets = np.array([0, len(path)], np.int32) if len(path) else _NO_PATH_OFFSETS
    return Verdicts(path_offsets, path, np.array([0, len(committed)], np.int32), committed)


@compiled
def _accepted(tokens: Int32Array, parents: Int32Array, recorded: Int32Array, at: int) -> Int32Array:
    """The nodes of one tree that agree with ``recorded[at:]``, from the root downwards."""
    path = np.empty(min(len(tokens), len(recorded) - at), np.int32)
    depth, node = 0, -1
    for candidate in range(len(tokens)):  # parents come first, so one pass finds the whole path
        if depth == len(path):
            break
        if parents[candidate] == node and tokens[candidate] == recorded[at + depth]:
            path[depth] = candidate
            node = candidate
            depth += 1
    return path[:depth]
